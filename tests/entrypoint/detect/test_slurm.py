"""Slurm steps with changed variables: contradictions, which have to be refused, and variants, which have to work."""

import shlex
import subprocess
from dataclasses import replace

import pytest

from muster.entrypoint import recording
from muster.entrypoint.detect import resolve
from muster.entrypoint.environment import Environment
from muster.entrypoint.options import LaunchOptions
from muster.errors import MusterError
from tests.entrypoint import recorded
from tests.entrypoint.conftest import COMMANDS, clean_environment
from tests.entrypoint.recorded import FOLDERS, detect

FOLDER = FOLDERS / "slurm"


def step(**changes: str) -> Environment:
    """A task of a Slurm step, rank 1 of 2 nodes, with some variables changed."""
    variables = dict(recording.load(FOLDER / "b_srun_N2_1per.node02.1.env").variables)
    return Environment(variables | changes, host=changes.get("host", "node02"))


def test_host_list_that_cannot_be_read() -> None:
    with pytest.raises(MusterError, match="SLURM_STEP_NODELIST can't be read"):
        detect(step(SLURM_STEP_NODELIST="node[01-02"))


def test_task_count_that_disagrees_with_the_list() -> None:
    with pytest.raises(MusterError, match="disagree on the number of nodes"):
        detect(step(SLURM_STEP_TASKS_PER_NODE="1(x3)", SLURM_TASKS_PER_NODE="1(x3)", SLURM_STEP_NUM_TASKS="3"))


def test_variables_of_another_node_are_noticed() -> None:
    with pytest.raises(MusterError, match="this host has node rank 0"):
        detect(step(host="node01"))


def test_a_host_name_that_slurm_does_not_know_is_no_error() -> None:
    assert detect(step(host="node02-ib0")).node_rank == 1


def test_a_shell_by_ssh_on_a_node_of_a_job_is_told_the_way_in() -> None:
    """pam_slurm_adopt gives it the job's id, and nothing else."""
    with pytest.raises(MusterError, match="entered the job by ssh") as refusal:
        detect(Environment({"SLURM_JOB_ID": "9", "HOME": "/root"}, host="node01"))
    assert "srun --jobid=9 --overlap" in refusal.value.fix
    # Some sites set SLURM_CONF for all users.
    with pytest.raises(MusterError, match="entered the job by ssh"):
        detect(Environment({"SLURM_JOB_ID": "9", "SLURM_CONF": "/etc/slurm/slurm.conf"}, host="node01"))
    with pytest.raises(MusterError, match="SLURM_JOB_NODELIST is missing") as refusal:
        detect(Environment({"SLURM_JOB_ID": "9"}, host="node01", engine="docker"))
    assert "docker run" in refusal.value.fix
    assert "; or, if it is but one node, --nnodes 1 --node-rank 0; or " in refusal.value.fix
    by_hand = LaunchOptions(nnodes="1", node_rank=0)
    assert detect(Environment({"SLURM_JOB_ID": "9"}, host="node01", engine="docker"), by_hand).num_nodes == 1


@pytest.mark.parametrize("engine", [None, "apptainer"])
def test_a_shell_by_ssh_goes_by_the_users_list_of_hosts(engine: str | None) -> None:
    """pdsh -w node[01-02] MUSTER_HOSTS=node[01-02] train ddp, from the script of the job."""
    shell = Environment({"SLURM_JOB_ID": "9", "MUSTER_HOSTS": "node[01-02]"}, host="node02", engine=engine)
    found = detect(shell)
    assert (found.launcher, found.node_rank, found.hosts) == ("manual", 1, ("node01", "node02"))
    with pytest.raises(MusterError, match="SLURM_JOB_NODELIST is missing"):
        detect(replace(shell, variables={**shell, "SLURM_PROCID": "1"}))


@pytest.mark.parametrize(
    ("tasks", "words", "asked"),
    [
        ("4(x2)", " --cpus-per-task=32 ", {"SLURM_NTASKS": "8"}),
        ("1(x2)", " --cpus-per-task=8 ", {"SLURM_NTASKS": "2"}),
        ("4,1", " ", {"SLURM_NTASKS": "5"}),
        ("node", " ", {"SLURM_NTASKS": "2"}),
        ("4(x2)", " ", {}),  # no tasks were asked for: this may count hardware threads that can't be used
    ],
)
def test_one_task_a_node_is_given_the_cores_of_all_tasks_of_the_job(
    tasks: str, words: str, asked: dict[str, str]
) -> None:
    """By itself it gets those of one task: seen in 22.05 with SRUN_CPUS_PER_TASK; since 23.11 without it (man page)."""
    script = recording.load(FOLDER / "a_sbatch_N2.node01.0.env")
    told = {"SLURM_CPUS_PER_TASK": "8", "SLURM_TASKS_PER_NODE": tasks, **asked}
    with pytest.raises(MusterError) as refusal:
        detect(Environment({**script, **told}, "node01"))
    assert refusal.value.fix == f"srun --nodes=2 --ntasks=2{words}--ntasks-per-node=1 train ddp"


@pytest.mark.parametrize(
    ("asked", "is_by_gpu"), [("cpu=4,gres/gpu=1", True), ("gres/gpu:h100:1", True), ("cpu:4", False)]
)
def test_gpus_by_task_in_the_words_of_newer_releases(asked: str, is_by_gpu: bool) -> None:
    """`sbatch --tres-per-task`, by https://slurm.schedmd.com/sbatch.html#OPT_SLURM_TRES_PER_TASK."""
    found = recording.load(FOLDERS / "slurm_own" / "batch_gpus_per_task.node01.0.env")
    variables = {name: found[name] for name in found if name != "SLURM_GPUS_PER_TASK"}
    with pytest.raises(MusterError, match="nothing started this process") as refusal:
        detect(Environment(variables | {"SLURM_TRES_PER_TASK": asked}, host="node01"))
    assert (refusal.value.fix == "srun train ddp") == is_by_gpu


def test_a_task_whose_container_got_its_rank_alone_does_not_train_alone() -> None:
    """As by docker run -e SLURM_PROCID -e SLURM_NTASKS."""
    of_step = [("SLURM_STEP_ID",), ("SLURM_STEP_NODELIST", "SLURM_NODEID")]
    of_step += [("SLURM_NODELIST", "SLURM_NTASKS"), ("SLURM_TASKS_PER_NODE",), ("SLURM_GTIDS",)]
    heterogeneous = recording.load(FOLDERS / "slurm_own" / "het_group_1.node02.0.env")
    with pytest.raises(MusterError, match="SLURM_JOB_ID is missing"):
        detect(Environment({name: heterogeneous[name] for name in heterogeneous if "HET_" in name}, host="node02"))
    for names in (("SLURM_PROCID", "SLURM_NTASKS"), ("SLURM_NODEID", "SLURM_NNODES"), ("SLURM_LOCALID",), *of_step):
        with pytest.raises(MusterError, match="SLURM_JOB_ID is missing") as refusal:
            detect(Environment({name: step()[name] for name in names}, host="node02", engine="docker"))
        assert "docker run" in refusal.value.fix


@pytest.mark.parametrize("name", ["SLURM_PROCID", "SLURM_LOCALID"])
def test_the_second_task_of_a_node_that_lost_the_steps_number_does_not_train_alone(name: str) -> None:
    """As by docker run -e SLURM_JOB_ID -e SLURM_JOB_NODELIST -e SLURM_JOB_NUM_NODES -e SLURM_PROCID."""
    job = {"SLURM_JOB_ID": "9", "SLURM_JOB_NODELIST": "node02", "SLURM_JOB_NUM_NODES": "1", "SLURM_NTASKS": "2"}
    with pytest.raises(MusterError, match="SLURM_STEP_ID is missing") as refusal:
        detect(Environment({**job, name: "1"}, host="node02", engine="docker"))
    assert "docker run" in refusal.value.fix
    # The batch script.
    assert detect(Environment({**job, name: "0"}, host="node02")).num_nodes == 1


def test_a_step_that_keeps_the_jobs_variables_is_told_why_it_is_refused() -> None:
    """As in a step by srun --preserve-env -N2 -n2 in a job of -N2 --ntasks-per-node=2."""
    with pytest.raises(MusterError, match="SLURM_STEP_ variables") as refusal:
        detect(step(SLURM_TASKS_PER_NODE="2(x2)"))
    assert "--preserve-env" in refusal.value.fix


@pytest.mark.parametrize(
    ("told", "attempt"),
    [
        ({}, 0),
        ({"SLURM_RESTART_COUNT": "2"}, 2),
        ({"SLURM_JOB_RESTART_COUNT": "0"}, 0),
        ({"SLURM_JOB_RESTART_COUNT": "2"}, 2),
    ],
)
def test_restarts_are_counted_by_slurmd_and_by_parastation(told: dict[str, str], attempt: int) -> None:
    found = detect(step(**told))
    assert found.attempt == attempt
    assert not attempt or found.sources["attempt"].endswith("RESTART_COUNT=2")


def test_cyclic_ranks_are_not_computed_from_the_node() -> None:
    env = recording.load(FOLDER / "c_srun_N2_2per.node02.2.env")
    cyclic = Environment({**env, "SLURM_PROCID": "1", "SLURM_GTIDS": "1,3"}, host="node02")
    found = detect(cyclic)
    assert (found.node_rank, found.local_rank, found.rank) == (1, 0, 1)


def test_uneven_tasks_are_ranks_each() -> None:
    env = recording.load(FOLDER / "c_srun_N2_2per.node02.2.env")
    uneven = {"SLURM_STEP_TASKS_PER_NODE": "2,1", "SLURM_TASKS_PER_NODE": "2,1", "SLURM_STEP_NUM_TASKS": "3"}
    uneven["SLURM_GTIDS"] = "2"
    found = detect(Environment({**env, **uneven}, host="node02"))
    assert (found.rank, found.world_size, found.ranks_per_node) == (2, 3, (2, 1))


def test_a_job_submitted_inside_a_step_on_another_node_is_no_task_of_that_step() -> None:
    """As in `srun --pty bash`, and there `sbatch job.sh`: the script keeps the step's variables."""
    script = recording.load(FOLDERS / "slurm_own" / "sbatch_in_step_elsewhere.node02.0.env")
    assert detect(replace(script, variables={**script, "SLURM_TASKS_PER_NODE": "8"})).launcher == "local"
    # On the step's host it may be the shell of a salloc typed there, or a task of another job's `srun --jobid`.
    with pytest.raises(MusterError, match="variables of two jobs are mixed") as refusal:
        detect(replace(script, host="node01"))
    line = "srun --nodes=1 --ntasks=1 --ntasks-per-node=1 train ddp"
    assert refusal.value.fix == f"in a shell or script of one job: {line}"


@pytest.mark.parametrize(
    "told", [{"NNODES": "2", "NODE_RANK": "1"}, {"NUM_NODES": "2", "NODE_RANK": "0"}, {"NODE_RANK": "1"}]
)
def test_steps_of_a_loop_over_the_nodes_do_not_train_alone_each(told: dict[str, str]) -> None:
    """As in `for i in 0 1; do NNODES=2 NODE_RANK=$i srun --nodes=1 --nodelist=node0$((i + 1)) train ddp & done`."""
    alone = recording.load(FOLDERS / "slurm_own" / "step_on_second_node.node02.0.env")
    with pytest.raises(MusterError, match="uses 1 of the job's 2 nodes") as refusal:
        detect(replace(alone, variables={**alone, **told}))
    assert all(f"{name}={value}" in refusal.value.seen for name, value in told.items() if value != "0")
    assert "--nnodes 1" in refusal.value.fix
    assert detect(replace(alone, variables={**alone, **told}), LaunchOptions(nnodes="1")).num_nodes == 1
    assert detect(replace(alone, variables={**alone, "NNODES": "1", "NODE_RANK": "0"})).num_nodes == 1
    assert detect(step(**told)).num_nodes == 2
    # A job's script may tell the number of its nodes to all, and start a step on some.
    assert detect(replace(alone, variables={**alone, "NNODES": "2"})).num_nodes == 1
    # A command for one process, such as the export of a model, is alone on purpose.
    single = resolve.resolve(
        replace(alone, variables={**alone, **told}), LaunchOptions(), ["train", "export"], is_single=True
    )
    assert single.num_nodes == 1


def test_several_tasks_a_node_and_nproc_per_node_contradict_each_other() -> None:
    env = recording.load(FOLDER / "c_srun_N2_2per.node02.2.env")
    with pytest.raises(MusterError, match="torchrun needs one task a node") as refusal:
        detect(env, LaunchOptions(nproc_per_node="2"))
    assert "--ntasks=2 --ntasks-per-node=1" in refusal.value.fix


HETEROGENEOUS = [
    recording
    for recording in recorded.load("slurm_own")
    if recording.scenario in ("het_group_0_1", "het_reversed", "het_group_1")
]


@pytest.mark.parametrize("recording", HETEROGENEOUS, ids=str)
def test_the_groups_of_a_heterogeneous_job_by_their_old_names(recording: recorded.Recording) -> None:
    """Tasks in Slurm 22.05 have `..._PACK_GROUP_0` and none of the newer `..._HET_GROUP_0`."""
    env = recording.environment
    old = {name: value for name, value in env.items() if "_HET_GROUP_" not in name}
    assert any("_JOB_NODELIST_PACK_GROUP_" in name for name in old)
    found, truth = detect(Environment(old, env.host)), detect(env)
    assert (found.hosts, found.node_rank, found.rank) == (truth.hosts, truth.node_rank, truth.rank)


def test_a_job_that_was_submitted_in_a_heterogeneous_one_has_none_of_its_groups() -> None:
    left = {name: value for name, value in HETEROGENEOUS[0].environment.items() if "_HET_" in name}
    script = recording.load(FOLDER / "g_array_0.node01.0.env")
    for env in (script, step()):
        alone, found = detect(env), detect(Environment({**env, **left, "SLURM_JOB_ID": "700"}, env.host))
        assert (found.job_id, found.hosts, found.node_rank) == ("700", alone.hosts, alone.node_rank)


@pytest.mark.process
@pytest.mark.parametrize(("how", "code"), [("-ic", 2), ("-c", 0)], ids=["typed", "in a script"])
def test_what_is_typed_in_the_shell_of_one_task_does_not_wait_for_the_others(how: str, code: int) -> None:
    """In `srun -n2 --pty bash` the second shell has no terminal, and ends; a script runs in both tasks."""
    job = {"JOB_ID": "9", "JOB_NODELIST": "node01", "JOB_NUM_NODES": "1", "PTY_PORT": "33841"}
    step = {"STEP_ID": "0", "STEP_NODELIST": "node01", "STEP_NUM_NODES": "1", "STEP_NUM_TASKS": "2"}
    place = {"STEP_TASKS_PER_NODE": "2", "NODEID": "0", "PROCID": "0", "LOCALID": "0"}
    env = clean_environment() | {f"SLURM_{name}": value for name, value in {**job, **step, **place}.items()}
    # Without `exit`, bash would replace itself by its last command, and there would be no shell.
    shell = shlex.join(["bash", "--norc", how, f"{COMMANDS / 'muster'} detect; exit $?"])
    done = subprocess.run(["script", "-qec", shell, "/dev/null"], env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == code, done.stdout
    assert ("srun --overlap" in done.stdout) == (code == 2)
