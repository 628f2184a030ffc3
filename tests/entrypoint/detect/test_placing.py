"""Launchers: the order of ranks, nodes with different numbers of them, launchers inside others, leftover variables."""

import socket
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from muster.entrypoint import recording
from muster.entrypoint.detect import resolve, traces
from muster.entrypoint.detect.allocation import Allocation
from muster.entrypoint.environment import Environment
from muster.entrypoint.options import LaunchOptions
from muster.entrypoint.rendezvous import address as rendezvous, file as rendezvous_file
from muster.errors import MusterError
from tests.entrypoint.recorded import FOLDERS, detect

OMPI_IN_SLURM = recording.load(FOLDERS / "mpi" / "ompi_in_salloc.node02.3.env")
FLUX = recording.load(FOLDERS / "flux" / "flux_in_pbs_run-N2n4g1.pbsn2.task3.env")
PALS = recording.load(FOLDERS / "documented" / "pals_file_v1.x3001c0s13b0n0.0.env")
SRUN = recording.load(FOLDERS / "slurm" / "c_srun_N2_2per.node02.2.env")

INTERFACE = "MPIR_CVAR_CH3_INTERFACE_HOSTNAME"


def hydra(rank: int, size: int, local_rank: int, local_size: int, **more: str) -> Environment:
    """A process of mpiexec over ssh."""
    names = {"PMI_RANK": rank, "PMI_SIZE": size, "MPI_LOCALRANKID": local_rank, "MPI_LOCALNRANKS": local_size}
    return Environment({name: str(value) for name, value in names.items()} | more, host=more.get("host", "b"))


def changed(env: Environment, **variables: str) -> Environment:
    return Environment({**env, **variables}, env.host, env.files)


def place(found: Allocation) -> tuple[int, int, int, int]:
    return found.node_rank, found.local_rank, found.rank, found.world_size


def test_ranks_are_assumed_to_lie_in_blocks_and_a_note_says_so() -> None:
    found = detect(hydra(5, 8, 1, 4))
    assert place(found) == (1, 1, 5, 8)
    assert [note for note in found.notes if "blocks of 4 a node" in note]
    assert [note for note in found.notes if "each node is assumed to run 4 processes" in note]
    assert detect(hydra(1, 4, 1, 4)).notes == ()  # on one node there is only one order


@pytest.mark.parametrize(
    ("ranks", "reason"),
    [
        ((1, 4, 0, 2), "don't lie in blocks"),
        ((2, 4, 1, 2), "don't lie in blocks"),
        ((3, 5, 1, 2), "different numbers of processes"),
        ((4, 4, 0, 2), "contradict each other"),
        ((0, 4, 2, 2), "contradict each other"),
        ((0, 2, 0, 4), "contradict each other"),
        ((0, 4, 0, 0), "contradict each other"),
    ],
)
def test_ranks_that_cannot_lie_in_blocks_are_refused(ranks: tuple[int, int, int, int], reason: str) -> None:
    with pytest.raises(MusterError, match=reason):
        detect(hydra(*ranks))


def test_ranks_in_turns_are_right_where_the_hosts_are_known() -> None:
    listed = {"MUSTER_HOSTS": "a,b"}
    assert place(detect(hydra(1, 4, 0, 2, **listed))) == (1, 0, 1, 4)
    assert place(detect(hydra(3, 4, 1, 2, **listed))) == (1, 1, 3, 4)
    assert place(detect(hydra(2, 4, 1, 2, **listed, host="a"))) == (0, 1, 2, 4)
    with pytest.raises(MusterError, match="neither in blocks nor in turns, so where they meet is unknown"):
        detect(hydra(0, 4, 0, 2, **listed))


def test_a_list_of_hosts_that_one_node_alone_sees_numbers_no_nodes() -> None:
    first = recording.load(FOLDERS / "grid_engine_own" / "hydra.node01.0.env")
    in_turn = "".join(reversed(first.files["PE_HOSTFILE"].splitlines(keepends=True)))
    found = detect(replace(first, files={**first.files, "PE_HOSTFILE": in_turn}))
    assert (found.node_rank, found.rank, found.num_nodes) == (0, 0, 2)


def test_more_nodes_than_the_job_has_are_two_jobs() -> None:
    with pytest.raises(MusterError, match="makes 4 nodes, but the job has 2"):
        detect(hydra(3, 4, 0, 1, MUSTER_HOSTS="a,b"))


def test_a_launch_on_fewer_nodes_than_the_job_has_must_be_meant() -> None:
    env = hydra(1, 2, 1, 2, MUSTER_HOSTS="a,b,c")
    with pytest.raises(MusterError, match="uses 1 of the job's 3 nodes") as refusal:
        detect(env)
    assert "--nnodes 1" in refusal.value.fix
    found = detect(env, LaunchOptions(nnodes="1"))
    assert (place(found), found.hosts) == ((0, 1, 1, 2), ("b",))


def test_a_launch_of_pals_on_fewer_nodes_than_the_job_has_must_be_meant() -> None:
    env = changed(PALS, MUSTER_HOSTS="x3001c0s13b0n0,x3001c0s13b1n0,x3001c0s13b2n0")
    with pytest.raises(MusterError, match="pals uses 2 of the job's 3 nodes"):
        detect(env)
    assert place(detect(env, LaunchOptions(nnodes="2"))) == (0, 0, 0, 4)


def test_mvapich_3_has_other_names_for_the_same() -> None:
    mpirun_rsh = recording.load(FOLDERS / "documented" / "mvapich_ssh.node02.3.env")
    renamed = {name.replace("MV2_", "MVP_"): value for name, value in mpirun_rsh.items()}
    found = detect(Environment(renamed, mpirun_rsh.host))
    assert (found.launcher, *place(found)) == ("mvapich", 1, 1, 3, 4)
    del renamed["MVP_COMM_WORLD_RANK"]
    with pytest.raises(MusterError, match="MVP_COMM_WORLD_RANK is missing"):
        detect(Environment(renamed, mpirun_rsh.host))


def test_pmi_beside_the_same_rank_of_pals_is_no_other_launcher() -> None:
    assert detect(PALS).rejected == ()


def test_a_job_that_a_step_submitted_keeps_the_variables_that_srun_set_in_pals_stead() -> None:
    """sbatch in a shell of salloc or srun --pty, on HPE's systems: each step gets new ones, a job's script none."""
    of_shell = recording.load(FOLDERS / "documented" / "srun_cray_shasta.nid001012.0.env")
    left = {name: value for name, value in of_shell.items() if name.startswith(("PALS_", "PMI_"))}
    script = recording.load(FOLDERS / "slurm" / "g_array_0.node01.0.env")
    found = detect(changed(script, **left))
    assert (found.scheduler, found.launcher, found.num_nodes) == ("slurm", "local", 1)
    assert found.rejected == ("pals: PALS_APID=4711.3 PALS_RANKID=0 was set by srun, for Cray MPI",)
    with pytest.raises(MusterError, match="nothing started this process on each of them"):
        detect(changed(recording.load(FOLDERS / "slurm" / "a_sbatch_N2.node01.0.env"), **left))
    assert place(detect(changed(SRUN, **left))) == place(detect(SRUN))
    # Without Slurm's variables, only these show that there are several processes.
    assert detect(Environment(left | {"PALS_LOCAL_SIZE": "2"}, host="nid001012")).world_size == 4


def test_pmi_alone_belongs_to_the_launcher_that_set_it() -> None:
    found = detect(changed(SRUN, PMI_RANK="2", PMI_SIZE="4"))
    assert (found.launcher, found.rank) == ("srun", 2)
    with pytest.raises(MusterError, match="without MPI_LOCALRANKID, MPI_LOCALNRANKS"):
        detect(changed(SRUN, PMI_RANK="0", PMI_SIZE="4"))
    with pytest.raises(MusterError, match="without MPI_LOCALRANKID, MPI_LOCALNRANKS"):
        detect(Environment({"PMI_RANK": "0", "PMI_SIZE": "2"}, host="laptop"))


def test_a_step_of_parastation_on_one_node_of_two_is_no_launch_of_hydra() -> None:
    task = recording.load(FOLDERS / "documented" / "srun_parastation_uneven.jwb0001.0.env")
    one = {"NODELIST": "jwb0001", "NUM_NODES": "1", "NUM_TASKS": "2", "TASKS_PER_NODE": "2"}
    of_step = {f"SLURM_STEP_{name}": value for name, value in one.items()}
    found = detect(changed(task, **of_step, SLURM_TASKS_PER_NODE="2", PMI_SIZE="2"))
    assert (found.launcher, found.hosts, found.world_size) == ("srun", ("jwb0001",), 2)
    # A PMI_RANK that does not fit the task is that of mpiexec inside the step, or of another task.
    with pytest.raises(MusterError):
        detect(changed(task, PMI_RANK="1"))


def test_two_launchers_with_several_tasks_a_node_are_refused() -> None:
    leaked = {"PMI_RANK": "0", "PMI_SIZE": "4", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2"}
    cyclic = changed(SRUN, **leaked)
    with pytest.raises(MusterError, match=r"neither in blocks nor in turns|two launchers disagree"):
        detect(cyclic)


def test_open_mpi_made_for_another_host_loses_to_tasks_that_srun_started() -> None:
    leaked = {name: value for name, value in OMPI_IN_SLURM.items() if name.startswith(("OMPI_", "PMIX_"))}
    found = detect(changed(SRUN, **(leaked | {"PMIX_HOSTNAME": "login1"})))
    assert (found.launcher, found.rank) == ("srun", 2)
    assert "openmpi: PMIX_HOSTNAME=login1, but this host is node02" in found.rejected


@pytest.mark.parametrize("variable", [INTERFACE, "PMI_HOSTNAME", "HYDRA_BSTRAP_LOCALHOST"])
@pytest.mark.parametrize("name", ["localhost", "127.0.0.1", "10.0.0.2", "fe80::1", "b", "B.cluster"])
def test_hydra_may_know_this_host_by_an_address(variable: str, name: str) -> None:
    assert place(detect(hydra(2, 4, 0, 2, **{variable: name}))) == (1, 0, 2, 4)
    with pytest.raises(MusterError, match="seem to belong to another process"):
        detect(hydra(2, 4, 0, 2, **{variable: "login1"}))


def test_hydra_may_know_this_host_by_a_second_name(monkeypatch: pytest.MonkeyPatch) -> None:
    known = {"b-ib": "127.0.1.1", "a-ib": "192.0.2.7"}

    def resolve(host: str, *_: object, **__: object) -> list[tuple[int, int, int, str, tuple[str, int]]]:
        if host not in known:
            raise OSError("Name or service not known")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (known[host], 0))]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    for name in ("b-ib", "a-ib", "no-such"):
        env = replace(hydra(2, 4, 0, 2, **{INTERFACE: name}), is_live=True)
        if name == "b-ib":
            assert place(detect(env)) == (1, 0, 2, 4)
        else:
            with pytest.raises(MusterError, match="seem to belong to another process"):
                detect(env)


def test_open_mpi_whose_daemon_is_another_process_is_left_over() -> None:
    with pytest.raises(MusterError, match="did not start its daemon"):
        detect(changed(OMPI_IN_SLURM, SLURM_TASK_PID="999"))


def test_a_step_of_the_job_that_submitted_this_one_is_left_over() -> None:
    with pytest.raises(MusterError, match="left over from the step in which it was submitted"):
        detect(changed(SRUN, SLURM_TASKS_PER_NODE="4(x2)"))


def test_a_task_of_flux_sees_all_devices_of_its_job() -> None:
    found = detect(FLUX)
    assert (found.gpus_seen, found.nproc_per_node, found.local_rank) == (2, 2, 1)


def test_a_job_of_flux_on_one_node() -> None:
    of_job = {"FLUX_JOB_ID": "f1", "FLUX_JOB_NNODES": "1", "FLUX_JOB_SIZE": "2"}
    found = detect(Environment({**of_job, "FLUX_TASK_RANK": "1", "FLUX_TASK_LOCAL_ID": "1"}, host="a"))
    assert place(found) == (0, 1, 1, 2)


def test_flux_that_disagrees_with_a_launcher_inside_it() -> None:
    with pytest.raises(MusterError, match="disagree on which process this is"):
        detect(changed(FLUX, PMI_RANK="0"))


def test_flux_in_turns_and_uneven_flux_are_refused() -> None:
    with pytest.raises(MusterError, match=r"don't lie in blocks, .* this node's rank is unknown"):
        detect(changed(FLUX, FLUX_TASK_RANK="2", PMI_RANK="2"))
    with pytest.raises(MusterError, match="different numbers of tasks") as refusal:
        detect(changed(FLUX, FLUX_JOB_SIZE="5", PMI_SIZE="5"))
    assert "flux run -N 2 -n 2 --exclusive train ddp" in refusal.value.fix


def test_no_launch_line_can_be_made_to_run_something_else() -> None:
    script = recording.load(FOLDERS / "grid_engine" / "pe_two.master.node01.env")
    hostile = Environment(dict(script), script.host, {"PE_HOSTFILE": "node01 1 q x\n$(reboot) 1 q x\n"})
    with pytest.raises(MusterError, match="holds"):
        detect(hostile)


def test_an_instance_of_flux_left_over_from_elsewhere_is_no_launcher_of_this_job() -> None:
    """PBS gives each job a TMPDIR of its own, and the socket of a leftover Flux is not in it."""
    script = recording.load(FOLDERS / "flux" / "flux_in_pbs_instance-script.env")
    with pytest.raises(MusterError) as refusal:
        detect(changed(script, TMPDIR="/var/tmp/pbs.37.pbshead"))
    assert refusal.value.fix.startswith("mpiexec ")


def test_a_task_of_srun_that_merely_sees_an_instance_of_flux_is_no_shell_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    shell = replace(recording.load(FOLDERS / "documented" / "flux_in_slurm_shell.node01.x.env"), is_live=True)
    monkeypatch.setattr(traces, "ancestors", lambda: ["bash", "flux-broker-0", "slurmstepd"])
    with pytest.raises(MusterError, match="nothing started this process on each of them"):
        detect(shell)
    monkeypatch.setattr(traces, "ancestors", lambda: ["slurmstepd", "systemd"])
    assert detect(shell).launcher == "srun"


def test_tasks_of_hyperqueue_are_no_world_of_the_srun_that_started_its_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each task trains by itself, and all see the variables of their node's worker."""
    of_worker = recording.load(FOLDERS / "slurm" / "b_srun_N2_1per.node02.1.env")
    task = replace(changed(of_worker, HQ_JOB_ID="1", HQ_TASK_ID="0"), is_live=True)
    monkeypatch.setattr(traces, "ancestors", lambda: ["bash", "hq", "slurmstepd"])
    with pytest.raises(MusterError, match="nothing started this process on each of them") as refusal:
        detect(task)
    assert "--nnodes 1" in refusal.value.fix
    assert "srun --nodefile=$HQ_NODE_FILE" in refusal.value.fix
    alone = resolve.resolve(task, LaunchOptions(nnodes="1"), ["train", "ddp"])
    assert (alone.num_nodes, alone.hosts, alone.launcher) == (1, ("node02",), "local")
    in_pbs = recording.load(FOLDERS / "pbs" / "pbs_cgroupshook_gpu1_pbsdsh.pbsn2.task40000001.618.env")
    with pytest.raises(MusterError, match="nothing started this process on each of them") as refusal:
        detect(changed(in_pbs, HQ_JOB_ID="1", HQ_TASK_ID="0"))
    assert "--nnodes 1" in refusal.value.fix
    assert "srun" not in refusal.value.fix
    # A task may use srun: what that starts is a launch of its own.
    monkeypatch.setattr(traces, "ancestors", lambda: ["bash", "slurmstepd"])
    assert (detect(task).launcher, detect(task).num_nodes) == ("srun", 2)
    # A container that can't see its parent processes may be either.
    monkeypatch.setattr(traces, "ancestors", lambda: ["tini"])
    with pytest.raises(MusterError, match="nothing started this process on each of them"):
        detect(task)


def test_apps_of_parsl_are_no_world_of_what_started_its_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """srun, or mpiexec of PALS, starts a pool of workers on each node: each app would wait for the other nodes."""
    of_worker = recording.load(FOLDERS / "slurm" / "b_srun_N2_1per.node02.1.env")
    app = replace(changed(of_worker, PARSL_WORKER_RANK="0", PARSL_WORKER_COUNT="4"), is_live=True)
    # The second name is that of process_worker_pool.py, as the kernel cuts it.
    monkeypatch.setattr(traces, "ancestors", lambda: ["python3", "process_worker_", "bash", "slurmstepd"])
    of_pals = recording.load(FOLDERS / "documented" / "pals_hidden_in_pbs.x3001c0s13b1n0.1.env")
    for env in (app, changed(of_pals, PARSL_WORKER_RANK="0")):
        with pytest.raises(MusterError, match="nothing started this process on each of them") as refusal:
            detect(env)
        assert refusal.value.fix == "on this node alone: --nnodes 1"
    assert resolve.resolve(app, LaunchOptions(nnodes="1"), ["train", "ddp"]).num_nodes == 1
    # An app may use srun: what that starts is a launch of its own.
    monkeypatch.setattr(traces, "ancestors", lambda: ["bash", "slurmstepd"])
    assert (detect(app).launcher, detect(app).num_nodes) == ("srun", 2)


def test_flux_in_turns_is_refused_by_all_its_tasks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Ranks 0 and 3 of `flux run -N2 -n4 --taskmap=cyclic` look as if the ranks lay in blocks."""
    of_flux = {"FLUX_JOB_ID": "f1", "FLUX_JOB_SIZE": "2", "FLUX_JOB_NNODES": "2", "FLUX_TASK_LOCAL_ID": "0"}
    options = LaunchOptions(rendezvous_dir=str(tmp_path), rdzv_timeout=20)
    first = replace(Environment(of_flux | {"FLUX_TASK_RANK": "0"}, host="a"), is_live=True)
    second = replace(Environment(of_flux | {"FLUX_TASK_RANK": "1"}, host="b"), is_live=True)
    # Signal handlers belong to the main thread.
    monkeypatch.setattr(rendezvous_file, "exit_on_terminate", lambda: None)
    allocation = detect(first)
    meeting = rendezvous.meet(allocation, first, options)
    reason = MusterError("the tasks don't lie in blocks", seen="", fix="")
    with ThreadPoolExecutor() as pool:
        pool.submit(rendezvous.refuse_all, reason, second, options)
        with pytest.raises(MusterError, match="don't lie in blocks"):
            rendezvous.by_file(meeting, allocation, first, options)


def test_different_numbers_of_processes_as_the_file_of_nodes_has_them() -> None:
    """PBS's select=1:mpiprocs=2+1:mpiprocs=1, and mpiexec without options."""
    of_pbs = recording.load(FOLDERS / "pbs" / "pbs_mpi_hydra-tmrsh.rank3.pbsn2.env")
    nodes = {"PBS_NODEFILE": "pbsn1\npbsn1\npbsn2\n"}
    for host, ranks, expected in (
        ("pbsn1", (0, 3, 0, 2), (0, 0, 0, 3)),
        ("pbsn1", (1, 3, 1, 2), (0, 1, 1, 3)),
        ("pbsn2", (2, 3, 0, 1), (1, 0, 2, 3)),
    ):
        found = detect(Environment({**of_pbs, **hydra(*ranks), INTERFACE: host}, host, nodes))
        assert (place(found), found.hosts, found.ranks_per_node) == (expected, ("pbsn1", "pbsn2"), (2, 1))
    # Ranks that are dealt in turns are not where the counts alone would put them.
    with pytest.raises(MusterError, match="different numbers of processes"):
        detect(Environment({**of_pbs, **hydra(2, 3, 1, 2), INTERFACE: "pbsn1"}, "pbsn1", nodes))


def test_a_file_of_nodes_that_torque_writes_on_the_first_host_alone_numbers_no_nodes() -> None:
    of_torque = {"PBS_JOBID": "9.srv", "PBS_ENVIRONMENT": "PBS_BATCH", "PBS_NODEFILE": "/var/spool/torque/aux//9.srv"}
    of_torque |= {"PBS_NUM_PPN": "2", "PBS_TASKNUM": "1"}
    nodes = {"PBS_NODEFILE": "c1\nc1\nc2\nc2\n"}
    found: list[Allocation] = []
    for rank, host in enumerate(("c1", "c1", "c2", "c2")):
        env = hydra(rank, 4, rank % 2, 2, **of_torque, **{INTERFACE: host})
        found.append(detect(replace(env, host=host, files=nodes if host == "c1" else {})))
    assert [place(one) for one in found] == [(0, 0, 0, 4), (0, 1, 1, 4), (1, 0, 2, 4), (1, 1, 3, 4)]
    # Otherwise the first node's ranks would meet at its name, and wait for the others, which look for a file.
    assert {one.hosts for one in found} == {()}


def test_a_job_of_grid_engine_that_has_slurms_names_too_is_one_job() -> None:
    """Gridware's slurm-shim sets them, with the same id; its srun starts the tasks."""
    of_srun = recording.load(FOLDERS / "slurm" / "b_srun_N2_1per.node01.0.env")
    of_grid = {"SGE_TASK_ID": "undefined", "NHOSTS": "2", "NSLOTS": "4", "PE_HOSTFILE": "/var/spool/pe_hostfile"}
    files = {"PE_HOSTFILE": "node01 2 main.q UNDEFINED\nnode02 2 main.q UNDEFINED\n"}
    first = Environment({**of_srun, **of_grid, "JOB_ID": of_srun["SLURM_JOB_ID"]}, "node01", files)
    found = detect(first)
    assert (found.scheduler, found.launcher, found.num_nodes) == ("slurm", "srun", 2)
    assert [line for line in found.rejected if "the same job" in line]
    with pytest.raises(MusterError, match="nothing shows which of them runs this process"):
        detect(Environment({**first, "JOB_ID": "77"}, "node01", files))


def test_a_job_of_slurm_with_a_plugin_that_sets_pbss_names_is_one_job() -> None:
    """Slurm's spank_pbs.so sets them, on nodes whose own names differ from Slurm's."""
    of_srun = recording.load(FOLDERS / "slurm" / "b_srun_N2_1per.node02.1.env")
    of_pbs = {"PBS_JOBID": of_srun["SLURM_JOB_ID"], "PBS_NODENUM": "1", "PBS_TASKNUM": "1", "PBS_QUEUE": "debug"}
    found = detect(Environment({**of_srun, **of_pbs}, "alias2"))
    assert (found.scheduler, found.launcher, found.node_rank, found.num_nodes) == ("slurm", "srun", 1, 2)
    with pytest.raises(MusterError, match="nothing shows which of them runs this process"):
        detect(Environment({**of_srun, **of_pbs, "PBS_JOBID": "7.pbshead"}, "alias2"))


def test_the_nodes_of_a_job_of_nqsv_have_one_job_id() -> None:
    """NEC's NQSV sets PBS's variables, with the number of the node before the job's id."""
    of_pbs = recording.load(FOLDERS / "pbs" / "pbs_mpi_ompi-tmrsh.rank2.pbsn2.env")
    assert {detect(changed(of_pbs, PBS_JOBID=f"{node}:8.nqsv")).job_id for node in "01"} == {"8.nqsv"}
    with pytest.raises(MusterError, match="no job id"):
        detect(changed(of_pbs, PBS_JOBID="0:"))


def test_hosts_in_turns_are_told_of_a_process_a_node() -> None:
    of_pbs = recording.load(FOLDERS / "pbs" / "pbs_mpi_hydra-tmrsh.rank3.pbsn2.env")
    nodes = {"PBS_NODEFILE": "pbsn1\npbsn2\npbsn1\npbsn2\n"}
    with pytest.raises(MusterError, match="makes 4 nodes, but the job has 2") as refusal:
        detect(Environment({**of_pbs, **hydra(3, 4, 0, 1), INTERFACE: "pbsn2"}, "pbsn2", nodes))
    assert "mpiexec -n 2 -ppn 1 train ddp" in refusal.value.fix
