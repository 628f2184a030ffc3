"""The whole argv and variables that a launch makes of an allocation, for each mode."""

import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from muster.entrypoint import recording, resources, show
from muster.entrypoint.detect import resolve
from muster.entrypoint.environment import Environment
from muster.entrypoint.launch import start
from muster.entrypoint.launch.program import Additions, Launch, Program
from muster.entrypoint.options import LaunchOptions
from muster.entrypoint.rendezvous import address, network
from muster.errors import MusterError
from muster.variables import LaunchVariable
from tests.entrypoint.conftest import Run
from tests.entrypoint.test_cli import three_lines

FOLDER = Path(__file__).resolve().parents[2] / "recordings" / "slurm"
TRAINER = Program("module", ("muster.train", "ddp", "--epochs=3"), is_ours=True)
JAX = Program("program", ("python",), framework="jax")


def planned(env: Environment, options: LaunchOptions | None = None, program: Program = TRAINER) -> Launch:
    options = options or LaunchOptions()
    allocation = resolve.resolve(env, options, ["train", "ddp"])
    found = start.Context(env, options, allocation, address.meet(allocation, env, options))
    return start.plan(found, program, ["train", "ddp"])


def recorded(name: str, **changes: str) -> Environment:
    env = recording.load(FOLDER / f"{name}.env")
    return replace(env, variables={**env, **changes})


def test_agent_on_the_second_of_two_nodes() -> None:
    found = planned(recorded("b_srun_N2_1per.node02.1"))
    assert list(found.argv) == [
        sys.executable,
        "-P",
        "-m",
        "muster.entrypoint.agent",
        "--nnodes=2",
        "--node-rank=1",
        "--rdzv-backend=static",
        "--master-addr=node01",
        "--master-port=61009",
        "--rdzv-conf=timeout=900",
        "--nproc-per-node=2",
        "--rdzv-id=9.0",
        "--max-restarts=0",
        "-m",
        "muster.train",
        "ddp",
        "--epochs=3",
    ]
    assert found.additions.variables == {
        "OMP_NUM_THREADS": "1",
        "PYTHONSAFEPATH": "1",
        "MUSTER_COMMAND": "train ddp",
        "MUSTER_SCHEDULER": "slurm",
        "MUSTER_NODES": "node01,node02",
    }


EXECS = """
import os, signal, sys
def show(*words):
    print({signal.SIGUSR1, signal.SIGUSR2} <= signal.pthread_sigmask(signal.SIG_BLOCK, []))
    sys.stdout.flush()
    os._exit(0)
os.execvpe = show
sys.argv = ["train", "ddp", "--nproc-per-node=2"]
from muster.entrypoint.main import train
train()
"""


def test_a_warning_that_comes_before_the_agent_is_there_waits_for_it(tmp_path: Path) -> None:
    """The scheduler's early signals end a process that has no handler for them."""
    argv = [sys.executable, "-c", EXECS]
    done = subprocess.run(argv, cwd=tmp_path, env={"PATH": os.defpath}, capture_output=True, text=True, timeout=240)
    assert done.stdout.split() == ["True"], done.stderr


def test_the_trainers_are_told_of_the_job() -> None:
    job = {"SLURM_RESTART_COUNT": "2", "SLURM_JOB_START_TIME": "1800000000", "SLURM_JOB_END_TIME": "1800003600"}
    told = {
        "MUSTER_SCHEDULER": "slurm",
        "MUSTER_ATTEMPT": "2",
        "MUSTER_SCHEDULER_START_TIME": "1800000000",
        "MUSTER_SCHEDULER_END_TIME": "1800003600",
    }
    assert told.items() <= planned(recorded("b_srun_N2_1per.node02.1", **job)).additions.variables.items()
    yours = planned(recorded("b_srun_N2_1per.node02.1", **job, MUSTER_ATTEMPT="7")).additions.variables
    assert "MUSTER_ATTEMPT" not in yours
    assert not [name for name in planned(Environment({}, host="laptop")).additions.variables if name in told]
    another = planned(recorded("b_srun_N2_1per.node02.1", **job), program=Program("script", ("a.py",)))
    assert not told.keys() & another.additions.variables.keys()


def test_nothing_is_left_of_the_launch_that_submitted_this_job() -> None:
    leaked = {str(name): "leaked" for name in LaunchVariable}
    for env in (Environment(leaked, host="laptop"), recorded("b_srun_N2_1per.node02.1", **leaked)):
        for program in (TRAINER, Program("script", ("a.py",))):
            found = planned(env, program=program).environment(env)
            assert "leaked" not in found.values()
            assert ("MUSTER_COMMAND" in found) == program.is_ours


def test_a_job_that_a_rank_submits_goes_by_its_own_variables() -> None:
    old = LaunchOptions(master_addr="old", master_port=7)
    rank = planned(recorded("c_srun_N2_2per.node02.3"), old).additions.variables
    assert rank["MASTER_ADDR"] == "old"
    for own, address_taken in ({}, "node01"), ({"MASTER_ADDR": "10.0.0.1"}, "10.0.0.1"):
        job = recorded("b_srun_N2_1per.node02.1", **{**rank, **own, "SLURM_JOB_ID": "9", "SLURM_JOBID": "9"})
        context = start.find(job, LaunchOptions(site="off"), ["train", "ddp"])
        assert context.rendezvous.master_addr == address_taken
        assert context.rendezvous.master_port == 61009
        found = start.plan(context, TRAINER, ["train", "ddp"]).environment(context.env)
        assert not {"RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT", LaunchVariable.RANK_VARIABLES} & found.keys()
        assert found.get("MASTER_ADDR") == own.get("MASTER_ADDR")


def test_a_job_that_is_refused_beside_variables_of_a_rank_shows_what_was_typed() -> None:
    """And what the user says by hand goes on."""
    env = Environment({"SLURM_JOB_ID": "5", LaunchVariable.RANK_VARIABLES: "4 RANK=1 WORLD_SIZE=2"}, host="node02")
    with pytest.raises(MusterError, match="entered the job by ssh") as refusal:
        start.find(env, LaunchOptions(site="off"), ["train", "ddp"])
    assert refusal.value.fix.endswith("--ntasks-per-node=1 train ddp")
    by_hand = LaunchOptions(site="off", nnodes="2", node_rank=1, master_addr="node01")
    assert start.find(env, by_hand, ["train", "ddp"]).allocation.node_rank == 1


def test_a_rank_that_starts_another_program_is_still_of_its_world() -> None:
    """As in a container that got no variable of the scheduler: the rank would train in a world of its own."""
    rank = planned(recorded("c_srun_N2_2per.node02.3"), LaunchOptions()).additions.variables
    with pytest.raises(MusterError, match="nothing shows which of them this is"):
        start.find(Environment(dict(rank), host="node02"), LaunchOptions(), ["train", "ddp"])


SCRIPT = Program("script", ("a.py",))


@pytest.mark.parametrize(
    ("recording", "program", "is_set"),
    [
        (None, SCRIPT, True),
        (None, TRAINER, False),  # it would watch its parent as an agent
        ("../mpi/intel_mpi.node01.1", SCRIPT, True),
        ("c_srun_N2_2per.node02.2", SCRIPT, False),  # Lightning goes by Slurm's variables
    ],
)
def test_a_rank_without_an_agent_is_torchruns_to_a_script(
    recording: str | None, program: Program, is_set: bool
) -> None:
    """With this variable Lightning compares its number of processes with WORLD_SIZE, and does not wait for others."""
    options = LaunchOptions(nproc_per_node=None if recording else "1")
    found = planned(recorded(recording) if recording else Environment({}, host="laptop"), options, program)
    assert ("TORCHELASTIC_RUN_ID" in found.additions.variables) == is_set


def test_a_script_that_is_one_rank_may_start_a_training() -> None:
    """As one that searches for the best learning rate."""
    alone = LaunchOptions(nproc_per_node="1")
    env = Environment(planned(Environment({}, host="laptop"), alone, SCRIPT).environment({}), host="laptop")
    for options, program in (LaunchOptions(nproc_per_node="2"), TRAINER), (alone, TRAINER), (alone, SCRIPT):
        found = planned(env, options, program).environment(env)
        assert ("TORCHELASTIC_RUN_ID" in found) == (program is SCRIPT)
    other = replace(env, variables={**env, "TORCHELASTIC_RUN_ID": "of torchrun"})
    with pytest.raises(MusterError, match="torchrun started this process already"):
        planned(other, alone, TRAINER)


def test_a_list_of_nodes_too_long_for_a_variable_is_left_out() -> None:
    env = recorded("b_srun_N2_1per.node02.1")
    found = start.find(env, LaunchOptions(site="off"), ["train", "ddp"])
    for number, is_told in ((2000, True), (9408, False)):
        nodes = tuple(f"frontier{node:05d}" for node in range(number))
        many = replace(found.allocation, hosts=nodes, tasks_per_node=(1,) * number, ranks_per_node=(2,) * number)
        assert ("MUSTER_NODES" in start.for_ours(replace(found, allocation=many), [])) == is_told


def test_worker_is_python_with_the_five_variables() -> None:
    found = planned(recorded("c_srun_N2_2per.node02.2"))
    assert list(found.argv) == [sys.executable, "-u", "-m", "muster.train", "ddp", "--epochs=3"]
    five = {"RANK": "2", "LOCAL_RANK": "0", "WORLD_SIZE": "4", "MASTER_ADDR": "node01", "MASTER_PORT": "61001"}
    assert five.items() <= found.additions.variables.items()
    assert found.additions.variables["LOCAL_WORLD_SIZE"] == "2"


def test_one_node_takes_a_free_port() -> None:
    found = planned(Environment({}, host="laptop"))
    assert list(found.argv[4:]) == [
        "--nnodes=1",
        "--node-rank=0",
        "--rdzv-backend=static",
        "--master-addr=127.0.0.1",
        "--master-port=0",
        "--rdzv-conf=timeout=900",
        "--nproc-per-node=2",
        "--rdzv-id=local.0",
        "--max-restarts=0",
        "-m",
        "muster.train",
        "ddp",
        "--epochs=3",
    ]


def test_the_port_of_one_node_is_picked_when_its_program_starts() -> None:
    env, program = Environment({}, host="a"), Program("program", ("python", "main.py"), framework="jax")

    def port(env: Environment) -> int:
        variables = planned(env, LaunchOptions(), program).additions.variables
        return int(variables["JAX_COORDINATOR_ADDRESS"].rpartition(":")[2])

    assert port(env) == 0  # a dry run
    assert port(replace(env, is_live=True)) >= 1024


def test_process_1_without_an_init_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    env, note = Environment({"PATH": "/nowhere"}, host="a", is_live=True), "this is process 1, with no tini"
    assert note not in "\n".join(planned(env).additions.notes)
    monkeypatch.setattr(os, "getpid", lambda: 1)
    assert note in "\n".join(planned(env).additions.notes)


def test_one_node_with_a_port_of_the_users() -> None:
    found = planned(Environment({}, host="laptop"), LaunchOptions(master_port=61007))
    assert {"--nnodes=1", "--master-addr=127.0.0.1", "--master-port=61007"} <= set(found.argv)


def test_by_hand() -> None:
    options = LaunchOptions(nnodes=2, node_rank=1, master_addr="10.0.0.7", master_port=4242, nproc_per_node="3")
    found = planned(Environment({}, host="b"), options)
    assert list(found.argv[4:9]) == [
        "--nnodes=2",
        "--node-rank=1",
        "--rdzv-backend=static",
        "--master-addr=10.0.0.7",
        "--master-port=4242",
    ]
    assert "--nproc-per-node=3" in found.argv


def test_by_hand_without_an_address_is_refused() -> None:
    with pytest.raises(MusterError, match="the address of node rank 0 is unknown"):
        planned(Environment({}, host="b"), LaunchOptions(nnodes=2, node_rank=1))


@pytest.mark.parametrize(
    ("program", "words"),
    [
        (Program("script", ("a b.py", "-x")), ["a b.py", "-x"]),
        (Program("module", ("pkg.main",)), ["-m", "pkg.main"]),
        (Program("program", ("./run.sh", "1")), ["--no-python", "./run.sh", "1"]),
    ],
)
def test_the_users_program_in_torchruns_words(program: Program, words: list[str]) -> None:
    found = planned(Environment({}, host="laptop"), program=program)
    assert list(found.argv[13:]) == words
    # The program's own folder stays on its module path.
    assert "PYTHONSAFEPATH" not in found.additions.variables


def test_a_warning_that_comes_early_is_kept_for_what_listens_and_ends_what_does_not() -> None:
    script = Program("script", ("a.py",))
    agent, spawning = LaunchOptions(nproc_per_node="2"), LaunchOptions(nproc_per_node="2", spawn=2)
    alone = Environment({}, host="a")
    assert [planned(alone, options, script).handles_signals for options in (agent, spawning)] == [True, True]
    rank = recorded("c_srun_N2_2per.node02.2")
    assert [planned(rank, program=program).handles_signals for program in (script, TRAINER)] == [False, True]


def test_a_program_of_its_own_in_worker_mode() -> None:
    found = planned(recorded("c_srun_N2_2per.node02.2"), program=Program("program", ("./run.sh", "1")))
    assert list(found.argv) == ["./run.sh", "1"]


PROCID = "rank = int(os.environ['SLURM_PROCID'])"
SPAWNS = "torch.multiprocessing.spawn(train, nprocs=4)"
OPTION = "parser.add_argument('--local_rank', type=int, required=True)"


@pytest.mark.parametrize(
    ("text", "recording", "words"),
    [
        (PROCID, "b_srun_N2_1per.node01.0", "srun --ntasks-per-node=2 muster run own.py"),
        (PROCID, "c_srun_N2_2per.node01.0", None),
        (f"{PROCID} if 'RANK' not in os.environ else 0", "b_srun_N2_1per.node01.0", None),
        (SPAWNS, "b_srun_N2_1per.node01.0", "--nproc-per-node 1"),
        (SPAWNS, "c_srun_N2_2per.node01.0", "one task on each node"),
        (OPTION, "b_srun_N2_1per.node01.0", "LOCAL_RANK"),
        (f"{OPTION} # LOCAL_RANK", "b_srun_N2_1per.node01.0", None),
        ("accelerator = Accelerator()", "b_srun_N2_1per.node01.0", "ACCELERATE_USE_CPU=true"),
        ("accelerator = Accelerator()", "c_srun_N2_2per.node01.0", "ACCELERATE_USE_CPU=true"),
        ("arguments = TrainingArguments('runs')", "b_srun_N2_1per.node01.0", "ACCELERATE_USE_CPU=true"),
        ("arguments = Seq2SeqTrainingArguments('runs')", "b_srun_N2_1per.node01.0", "ACCELERATE_USE_CPU=true"),
        ("arguments = TrainingArguments('runs', use_cpu=True)", "b_srun_N2_1per.node01.0", None),
        ("import torch", "b_srun_N2_1per.node01.0", None),
        (None, "b_srun_N2_1per.node01.0", None),
    ],
)
def test_a_script_made_for_another_launch_is_told_so(
    tmp_path: Path, text: str | None, recording: str, words: str | None
) -> None:
    script = tmp_path / "own.py"
    if text is not None:
        script.write_text(text)
    found = planned(recorded(recording), program=Program("script", (str(script),)))
    notes = [note for note in found.additions.notes if note.startswith("own.py ")]
    assert len(notes) == (words is not None)
    assert words is None or words in notes[0]


def test_a_script_that_is_the_only_rank_of_its_task_may_read_the_tasks_number(tmp_path: Path) -> None:
    script = tmp_path / "own.py"
    script.write_text(PROCID)
    one = LaunchOptions(nproc_per_node="1")
    found = planned(recorded("b_srun_N2_1per.node01.0"), one, Program("script", (str(script),)))
    assert [note for note in found.additions.notes if note.startswith("own.py ")] == []


@pytest.mark.parametrize(
    ("more", "is_told"), [({}, True), ({"ACCELERATE_USE_CPU": "true"}, False), ({"CUDA_VISIBLE_DEVICES": "0,1"}, False)]
)
def test_accelerate_is_told_of_cpus_where_it_would_train_alone_in_each_rank(
    tmp_path: Path, more: dict[str, str], is_told: bool
) -> None:
    script = tmp_path / "own.py"
    script.write_text("accelerator = Accelerator()")
    options = LaunchOptions(nproc_per_node="2")
    found = planned(Environment(more, host="laptop"), options, Program("script", (str(script),)))
    assert any("ACCELERATE_USE_CPU" in note for note in found.additions.notes) == is_told
    alone = planned(
        Environment(more, host="laptop"), LaunchOptions(nproc_per_node="1"), Program("script", (str(script),))
    )
    assert not any("ACCELERATE_USE_CPU" in note for note in alone.additions.notes)


@pytest.mark.parametrize(
    ("word", "is_told"), [("--cpu", False), ("--use_cpu", False), ("--use-cpu=True", False), ("--cpus=4", True)]
)
def test_a_script_of_accelerate_with_its_option_for_cpus_gets_no_note(tmp_path: Path, word: str, is_told: bool) -> None:
    script = tmp_path / "own.py"
    script.write_text("parser.add_argument('--cpu', action='store_true'); accelerator = Accelerator(cpu=arguments.cpu)")
    program = Program("script", (str(script), word))
    found = planned(Environment({}, host="laptop"), LaunchOptions(nproc_per_node="2"), program)
    told = [note for note in found.additions.notes if "ACCELERATE_USE_CPU" in note]
    assert bool(told) == is_told
    assert all("since 1.13" in note for note in told)  # with older versions of Accelerate the ranks train together


@pytest.mark.parametrize(
    ("is_installed", "recording", "is_told"),
    [
        (True, "b_srun_N2_1per.node01.0", True),
        (True, "c_srun_N2_2per.node01.0", False),  # MPI may have started each task
        (False, "b_srun_N2_1per.node01.0", False),  # the script then runs without MPI
    ],
)
def test_a_script_that_asks_mpi_for_its_rank_is_told_that_each_is_a_world_of_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_installed: bool, recording: str, is_told: bool
) -> None:
    script = tmp_path / "own.py"
    script.write_text("try:\n    from mpi4py import MPI\nexcept ImportError:\n    MPI = None\n")
    if is_installed:
        (tmp_path / "mpi4py").mkdir()
        (tmp_path / "mpi4py" / "__init__.py").touch()
        monkeypatch.syspath_prepend(tmp_path)
    found = planned(recorded(recording), program=Program("script", (str(script),)))
    assert any("MPI" in note for note in found.additions.notes) == is_told


def test_what_the_user_set_stays_and_a_line_says_so() -> None:
    found = planned(recorded("b_srun_N2_1per.node02.1", OMP_NUM_THREADS="7", MASTER_ADDR="node01i", MASTER_PORT="4000"))
    assert "OMP_NUM_THREADS" not in found.additions.variables
    assert {"--master-addr=node01i", "--master-port=4000"} <= set(found.argv)
    for name in ("OMP_NUM_THREADS=7", "MASTER_ADDR=node01i", "MASTER_PORT=4000"):
        assert any(note.startswith(name) for note in found.additions.notes), name


@pytest.mark.parametrize(
    ("name", "threads", "taken"),
    [
        ("pbs/pbs_batch_1node", "4", "2"),  # an agent, whose two ranks share the chunk's four
        ("pbs/pbs_mpi_hydra-tmrsh.rank3.pbsn2", "4", "2"),  # two ranks by mpiexec on this node
        ("pbs/pbs_batch_1node", "1", "1"),
    ],
)
def test_threads_that_pbs_sets_are_no_wish_of_the_user(name: str, threads: str, taken: str) -> None:
    """PBS sets OMP_NUM_THREADS in each process of a chunk to the number of all the chunk's cores."""
    env = recording.load(FOLDER.parent / f"{name}.env")
    found = planned(replace(env, variables={**env, "NCPUS": threads, "OMP_NUM_THREADS": threads}))
    assert found.additions.variables["OMP_NUM_THREADS"] == taken
    notes = "\n".join(found.additions.notes)
    assert "OMP_NUM_THREADS" not in notes if threads == taken else "was set by pbs" in notes
    assert f"OMP_NUM_THREADS={threads} is yours" not in notes
    of_the_user = planned(replace(env, variables={**env, "NCPUS": threads, "OMP_NUM_THREADS": "3"}))
    assert "OMP_NUM_THREADS=3 is yours: it was kept" in of_the_user.additions.notes


def test_an_operators_address_is_not_called_the_users() -> None:
    env = recording.load(FOLDER.parent / "documented" / "kubeflow_pytorchjob.mnist-worker-1.2.env")
    found = planned(env)
    assert "--master-addr=mnist-master-0" in found.argv
    assert not [note for note in found.additions.notes if "yours" in note]


def test_the_master_in_torchruns_own_words() -> None:
    found = planned(recorded("b_srun_N2_1per.node02.1", PET_MASTER_ADDR="pod-0", PET_MASTER_PORT="4000"))
    assert {"--master-addr=pod-0", "--master-port=4000"} <= set(found.argv)
    assert "PET_MASTER_ADDR=pod-0 is yours: it was kept" in found.additions.notes


def test_a_port_that_is_none() -> None:
    for value in ("http", "0", "65536", "-1", "9" * 5000, "٢٩٥٠٠"):
        with pytest.raises(MusterError, match="MASTER_PORT is no port"):
            planned(recorded("b_srun_N2_1per.node02.1", MASTER_PORT=value))


def test_options_win_over_the_environment() -> None:
    env = recorded("b_srun_N2_1per.node02.1", MASTER_ADDR="node01i")
    found = planned(env, LaunchOptions(master_addr="node01j"))
    assert "--master-addr=node01j" in found.argv


def test_inherited_pet_variables_are_removed() -> None:
    env = recorded("b_srun_N2_1per.node02.1", PET_NNODES="1", PET_RDZV_ENDPOINT="x:1")
    found = planned(env)
    assert found.additions.removed == ("PET_NNODES", "PET_RDZV_ENDPOINT")
    assert not [name for name in found.environment(env) if name.startswith("PET_")]


def test_the_agent_of_another_launch_is_not_missed() -> None:
    env = recorded("b_srun_N2_1per.node02.1", MUSTER_LAUNCH=".1234", MUSTER_COMMAND="train ddp")
    found = planned(env)
    assert "MUSTER_LAUNCH" not in found.environment(env)
    # Nor is a user's script that one of our ranks starts taken for a program of ours.
    another = planned(env, program=Program("script", ("a.py",)))
    assert "MUSTER_COMMAND" not in another.environment(env)


def test_the_next_attempt_and_the_next_step_meet_elsewhere() -> None:
    first = planned(recorded("b_srun_N2_1per.node02.1"))
    second = planned(recorded("b_srun_N2_1per.node02.1", SLURM_RESTART_COUNT="1"))
    third = planned(recorded("b_srun_N2_1per.node02.1", SLURM_STEP_ID="1"))
    ports = [next(word for word in found.argv if "--master-port" in word) for found in (first, second, third)]
    assert len(set(ports)) == 3
    assert "--rdzv-id=9.1" in second.argv


def test_ports_lie_above_the_ephemeral_range() -> None:
    ports = {
        address.port_of(job, attempt, step)
        for job in ("1", "4535", "4536", "99999999", "4.pbshead", "ƒ2a")
        for attempt in range(3)
        for step in range(3)
    }
    assert min(ports) >= 61000
    assert max(ports) <= 65535
    assert address.port_of("9", 0, 0) == 61009


@pytest.mark.parametrize(
    ("cores", "cpus_on_node", "ranks", "tasks", "threads"),
    [
        (8, None, 2, 1, 4),
        (8, 8, 2, 2, 4),  # not bound: the two tasks share the node's eight
        (4, 8, 2, 2, 4),  # each task was bound to four of the eight
        (1, 8, 2, 2, 1),
        (1, None, 4, 1, 1),
        (7, None, 2, 1, 3),
        (4, 8, 2, 1, 2),  # one agent, bound to less than the node: its ranks share what it has
    ],
)
def test_threads_of_a_rank(cores: int, cpus_on_node: int | None, ranks: int, tasks: int, threads: int) -> None:
    assert resources.threads_per_rank(cores, cpus_on_node, ranks, tasks) == threads


@pytest.mark.parametrize(("ranks", "cores", "is_told"), [(64, 1, True), (4, 1, False), (8, 2, False), (9, 2, True)])
def test_far_more_ranks_than_cores_are_told(ranks: int, cores: int, is_told: bool) -> None:
    env = recorded("b_srun_N2_1per.node02.1", SLURM_CPUS_ON_NODE=str(cores), SLURM_JOB_CPUS_PER_NODE=f"{cores}(x2)")
    found = planned(env, LaunchOptions(nproc_per_node=str(ranks)))
    assert (f"{ranks} ranks on this node share {cores} core" in "\n".join(found.additions.notes)) == is_told


@pytest.mark.parametrize(("cores", "ranks", "is_told"), [(1, 1, True), (2, 4, True), (4, 4, False)])
def test_an_agent_bound_to_a_core_is_told_how_to_start_it_unbound(
    monkeypatch: pytest.MonkeyPatch, cores: int, ranks: int, is_told: bool
) -> None:
    """As Open MPI binds one process a node, here to the two threads of a core."""
    monkeypatch.setattr(resources, "cores", lambda *_: cores)
    file = FOLDER.with_name("mpi_own") / "ompi_one_rank.node01.0.env"
    env = replace(recording.load(file), is_live=True, host=None)
    notes = "\n".join(planned(env, LaunchOptions(nproc_per_node=str(ranks), max_restarts=1)).additions.notes)
    assert ("mpirun --bind-to none" in notes) == is_told


@pytest.mark.parametrize("cores", [1, 6])
def test_a_rank_for_each_core(cores: int) -> None:
    env = recorded("b_srun_N2_1per.node02.1", SLURM_CPUS_ON_NODE=str(cores), SLURM_JOB_CPUS_PER_NODE=f"{cores}(x2)")
    assert f"--nproc-per-node={cores}" in planned(env, LaunchOptions(nproc_per_node="cpu")).argv


def test_a_taken_port_is_named(tmp_path: Path) -> None:
    import socket

    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(MusterError, match=rf"port {port} on .* is taken") as taken:
            network.check_port_free(port, "job 9")
        assert str(taken.value).count("\n") == 2
    network.check_port_free(port, "job 9")


def test_a_task_with_rank_0_finds_its_port_taken(command: Run) -> None:
    import socket

    counts = {"RANK": "0", "SIZE": "2", "LOCAL_RANK": "0", "LOCAL_SIZE": "2"}
    env = {f"OMPI_COMM_WORLD_{name}": value for name, value in counts.items()}
    env |= {"PMIX_RANK": "0", "PMIX_NAMESPACE": "prterun-here-1@1"}
    with socket.create_server(("", 0)) as server:
        answer = command("train", "ddp", f"--master-port={server.getsockname()[1]}", env=env)
    assert answer.returncode == 2
    assert "is taken" in three_lines(answer.stderr)[0]


def test_a_name_that_does_not_resolve_is_named() -> None:
    with pytest.raises(MusterError, match=r"no-such-host\.invalid, does not resolve"):
        network.resolve("no-such-host.invalid", "--master-addr")


@pytest.mark.parametrize(("address", "answer"), [("127.0.1.1", True), ("::1", True), ("10.0.0.1", False)])
def test_loopback(address: str, answer: bool) -> None:
    assert network.is_loopback(address) is answer


def test_the_loopback_interface_is_never_the_fabrics() -> None:
    assert network.fabric_interface(("127.0.1.1",)) != "lo"


def test_hostile_values_stay_one_word() -> None:
    hostile = "x; touch /tmp/owned $(id) `id`\n'\"\\\x1b[31m\x9b\u2028\udcff"
    found = planned(Environment({}, host="laptop"), program=Program("script", ("s.py", hostile)))
    last = show.script(found).split("s.py ", 1)[1]
    assert last.isprintable()
    read = subprocess.run(["bash", "-c", f"printf %s {last}"], capture_output=True, check=True, env={"LC_ALL": "C"})
    assert read.stdout == os.fsencode(hostile)


def test_a_variable_too_long_for_the_kernel_is_named() -> None:
    """As TF_CONFIG is, with the names of 10,000 nodes."""
    with pytest.raises(MusterError) as refusal:
        start.execute(Launch((sys.executable, "-c", ""), Additions({"TF_CONFIG": "x" * (4 << 20)})), Environment({}))
    assert "long" in refusal.value.wrong
    assert "TF_CONFIG" in refusal.value.seen


def test_no_name_of_a_variable_reaches_a_shell() -> None:
    hostile = {"PET_$(touch /tmp/owned)": "1", "PET_X; id": "2", "PET_NNODES": "2"}
    found = planned(recorded("b_srun_N2_1per.node02.1", **hostile))
    assert [line for line in show.script(found).splitlines() if "PET_" in line] == ["unset PET_NNODES"]


@pytest.mark.parametrize(
    "value", ["node01\x1b[31m", "node 01", "x" * 5000, "$(id)", "a,b", "-x", "[::1]", "node01:29500"]
)
def test_an_address_that_is_none(value: str) -> None:
    with pytest.raises(MusterError, match="MASTER_ADDR is no host name or address"):
        planned(recorded("b_srun_N2_1per.node02.1", MASTER_ADDR=value))
    with pytest.raises(MusterError, match="--master-addr is no host name or address"):
        planned(Environment({}, host="laptop"), LaunchOptions(nnodes="2", node_rank=0, master_addr=value))


@pytest.mark.parametrize("task", ["node01.0", "node02.1"])
@pytest.mark.parametrize("value", ["localhost", "127.0.0.1", "::1", "0.0.0.0", "::"])
def test_an_address_that_is_each_node_itself_is_refused_in_a_job(task: str, value: str) -> None:
    """As left over in a shell from a training on one machine: the nodes would wait for each other."""
    with pytest.raises(MusterError, match="means each node itself") as refusal:
        planned(recorded(f"b_srun_N2_1per.{task}", MASTER_ADDR=value))
    assert refusal.value.fix == "unset MASTER_ADDR"
    # By hand, to try a launch of several nodes on one machine.
    by_hand = LaunchOptions(nnodes="2", node_rank=1, master_addr=value)
    assert f"--master-addr={value}" in planned(Environment({}, host="laptop"), by_hand).argv


def test_the_master_pod_of_an_old_pytorchjob_may_call_itself_localhost() -> None:
    pod = {"KUBERNETES_SERVICE_HOST": "10.96.0.1", "MASTER_ADDR": "localhost", "WORLD_SIZE": "2"}
    assert "--master-addr=localhost" in planned(Environment(pod | {"RANK": "0"}, host="job-master-0")).argv
    with pytest.raises(MusterError, match="means each node itself"):
        planned(Environment(pod | {"RANK": "1"}, host="job-worker-0"))


@pytest.mark.parametrize(
    ("host", "name"),
    [
        ("jwb0001", "jwb0001i"),
        ("jwb0001.juwels", "jwb0001i.juwels"),
        ("0001", "0001i"),
        ("10.0.0.1", "10.0.0.1"),
        ("fe80::1", "fe80::1"),
        ("::ffff:10.0.0.1", "::ffff:10.0.0.1"),
    ],
)
def test_a_suffix_makes_another_name_and_no_other_address(host: str, name: str) -> None:
    assert address.with_suffix(host, "i") == name


def test_an_error_is_three_lines_whatever_is_in_it() -> None:
    error = MusterError("a\nb", seen="c\x1b[31m\nd", fix="e")
    assert len(str(error).splitlines()) == 3
    assert not re.search(r"[\x00-\x09\x0b-\x1f]", str(error))
    assert len(str(MusterError("a", seen="x" * 100_000, fix="e"))) < 2000


def test_one_node_with_a_port_of_the_users_starts_ranks_again() -> None:
    options = LaunchOptions(nproc_per_node="2", master_port=29501, max_restarts=3)
    assert "--max-restarts=3" in planned(Environment({}, host="laptop"), options).argv


def test_several_processes_are_refused_where_a_strategy_is_one() -> None:
    with pytest.raises(MusterError, match="one process") as refused:
        start.find(Environment({}, host="a"), LaunchOptions(nproc_per_node="4"), ["train", "single"], is_single=True)
    assert refused.value.seen == "--nproc-per-node=4"
    with pytest.raises(MusterError, match="one process") as refused:
        start.start(LaunchOptions(spawn=2, dry_run=True), TRAINER, ["train", "single"], is_single=True)
    assert refused.value.seen == "--spawn=2"
    found = start.find(Environment({}, host="a"), LaunchOptions(), ["train", "single"], is_single=True)
    assert found.allocation.world_size == 1


def test_processes_by_spawn_are_counted_wherever_a_launch_is_shown() -> None:
    found = start.find(Environment({}, host="a"), LaunchOptions(spawn=3), ["train", "ddp"]).allocation
    assert (found.world_size, found.sources["nproc_per_node"]) == (3, "--spawn=3")
    with pytest.raises(MusterError) as refused:
        planned(Environment({}, host="a"), LaunchOptions(nproc_per_node="3", spawn=3), JAX)
    assert refused.value.seen.startswith("--spawn=3,")
    assert refused.value.fix == "leave --spawn out"
