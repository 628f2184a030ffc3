"""Schedulers: files that can't be read, MUSTER_HOSTS, two schedulers at once, host names, unknown schedulers."""

import re
import shlex
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from muster.entrypoint import recording
from muster.entrypoint.detect import families, manual, mpi, resolve, traces
from muster.entrypoint.detect.hostlist import HostListError, index_of
from muster.entrypoint.environment import Environment
from muster.entrypoint.options import LaunchOptions
from muster.entrypoint.rendezvous import address, network
from muster.errors import MusterError
from tests.entrypoint.recorded import FOLDERS, detect

PBS = recording.load(FOLDERS / "pbs" / "pbs_batch_1node.env")
PBS_TASK = recording.load(FOLDERS / "pbs" / "pbs_cgroupshook_gpu1_pbsdsh.pbsn2.task40000001.618.env")
PBS_RANK = recording.load(FOLDERS / "pbs" / "pbs_mpi_hydra-tmrsh.rank3.pbsn2.env")
QRSH = recording.load(FOLDERS / "grid_engine" / "pe_two.qrsh_noV.node02.env")
BLAUNCH = recording.load(FOLDERS / "documented" / "lsf_blaunch.hosta.0.env")
LSF = recording.load(FOLDERS / "documented" / "lsf_blaunch_slots.hosta.0.env")
SLURM = recording.load(FOLDERS / "slurm" / "b_srun_N2_1per.node02.1.env")
SLURM_SHELL = recording.load(FOLDERS / "slurm" / "g_array_0.node01.0.env")


def changed(env: Environment, **variables: str) -> Environment:
    return replace(env, variables={**env, **variables})


def test_hosts_of_a_file_come_once_each_in_the_order_of_their_first_line() -> None:
    job, _ = families.find_job(replace(PBS, files={"PBS_NODEFILE": "n2\nn1\nn2\n\nn3\nn1\n"}))
    assert job
    assert (job.hosts, job.slots, job.num_nodes) == (("n2", "n1", "n3"), (2, 2, 1), 3)


@pytest.mark.parametrize(
    ("variables", "line"),
    [
        (
            "KUBERNETES_SERVICE_HOST=1 JOB_COMPLETION_INDEX=1",
            "muster run --nnodes PODS --node-rank INDEX --master-addr",
        ),
        (
            "KUBERNETES_SERVICE_HOST=1 K_MPI_JOB_ROLE=worker",
            "mpirun -n PODS --map-by ppr:1:node --bind-to none muster run -m own 'a b'",
        ),
        ("FLUX_JOB_ID=f12", "flux run -N NODES -n NODES --exclusive muster run -m own 'a b'"),
        ("SLURM_JOB_ID=9 SLURM_STEP_ID=x", "srun ... muster run -m own 'a b'"),
        ("LSB_JOBID=1 LSB_MCPU_HOSTS=a,2,b,2 LSF_PM_TASKID=1", "`blaunch muster run -m own 'a b'`"),
    ],
)
def test_a_refusal_shows_the_command_that_was_typed(variables: str, line: str) -> None:
    env = Environment(dict(pair.replace(",", " ").split("=", 1) for pair in variables.split(" ")), "a")
    with pytest.raises(MusterError) as refusal:
        resolve.resolve(env, LaunchOptions(), ["muster", "run", "-m", "own", "a b"])
    assert line in refusal.value.fix
    assert " -m own 'a b'" in refusal.value.fix
    assert "train ddp" not in refusal.value.fix


def test_a_file_is_read_from_disk_in_a_live_process(tmp_path: Path) -> None:
    nodes = tmp_path / "31.pbshead"
    nodes.write_text("pbsn1\npbsn2\n")
    live = replace(changed(PBS_TASK, PBS_NODEFILE=str(nodes)), files={}, is_live=True)
    assert detect(live).node_rank == 1


@pytest.mark.parametrize("name", ["missing", "folder", "/dev/zero", "binary"])
def test_a_file_that_cannot_be_seen_is_named_with_the_options_that_show_it(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    if name == "folder":
        path.mkdir()
    if name == "binary":
        path.write_bytes(b"\xff\xfe")
    live = replace(changed(PBS_TASK, PBS_NODEFILE=str(path)), files={}, is_live=True)
    with pytest.raises(MusterError) as refusal:
        detect(live)
    assert f"--bind {path}," in refusal.value.fix
    assert f"--volume {path}:{path}:ro" in refusal.value.fix
    assert "MUSTER_HOSTS=" in refusal.value.fix
    assert str(path) in refusal.value.seen


def test_hosts_that_cannot_be_seen_are_no_matter_where_the_ranks_are_told() -> None:
    found = detect(replace(PBS_RANK, files={}))
    assert (found.rank, found.local_rank, found.world_size, found.node_rank, found.hosts) == (3, 1, 4, 1, ())
    assert "--bind /var/spool/pbs/aux/8.pbshead" in "\n".join(found.notes)


@pytest.mark.parametrize("listed", ["pbsn1,pbsn2", "pbsn[1-2]", " pbsn1 pbsn2\n"])
def test_listed_hosts_take_the_place_of_the_schedulers(listed: str) -> None:
    found = detect(replace(changed(PBS_TASK, MUSTER_HOSTS=listed), files={}))
    assert (found.scheduler, found.job_id, found.hosts, found.node_rank) == ("pbs", "31.pbshead", ("pbsn1", "pbsn2"), 1)
    assert "MUSTER_HOSTS" in found.sources["hosts"]
    assert [note for note in found.notes if note.startswith("MUSTER_HOSTS=") and "yours" in note]


def test_listed_hosts_tell_a_task_of_qrsh_its_place() -> None:
    found = detect(changed(QRSH, MUSTER_HOSTS="node01,node02"))
    assert (found.launcher, found.mode, found.node_rank, found.num_nodes) == ("qrsh", "agent", 1, 2)


def test_listed_hosts_do_not_make_several_tasks_of_pbsdsh_on_a_node_one(tmp_path: Path) -> None:
    task = recording.load(FOLDERS / "pbs" / "pbs_scatter2x2_pbsdsh.pbsn2.task20000001.env")
    with pytest.raises(MusterError, match="pbsdsh starts 2 tasks on a node") as refusal:
        detect(changed(task, MUSTER_HOSTS="pbsn1,pbsn2"))
    # A task's PATH is not the job script's: it needs the path of train.
    assert "/PATH/TO/train ddp" in refusal.value.fix
    with pytest.raises(MusterError, match="pbsdsh starts 2 tasks on a node") as refusal:
        resolve.resolve(task, LaunchOptions(), ["muster", "run", "own.py"])
    assert refusal.value.fix.endswith("/PATH/TO/muster run own.py")
    # On the first node PBS leaves PBS_NODEFILE out of a task's variables, and keeps the file.
    first = recording.load(FOLDERS / "pbs" / "pbs_scatter2x2_pbsdsh.pbsn1.task00000002.env")
    (tmp_path / "aux").mkdir()
    (tmp_path / "pbs.conf").write_text(f"PBS_EXEC=/opt/pbs\nPBS_HOME={tmp_path}\n")
    (tmp_path / "aux" / first["PBS_JOBID"]).write_text("pbsn1\npbsn1\n")
    packed = changed(first, MUSTER_HOSTS="pbsn1", PBS_CONF_FILE=str(tmp_path / "pbs.conf"))
    with pytest.raises(MusterError, match="pbsdsh starts 2 tasks on a node") as refusal:
        detect(replace(packed, is_live=True))
    assert f"{shlex.quote(str(Path(sys.executable).with_name('train')))} ddp" in refusal.value.fix


def test_a_task_on_the_first_node_finds_the_file_of_nodes_that_pbs_does_not_name_there(tmp_path: Path) -> None:
    first = recording.load(FOLDERS / "pbs" / "pbs_cgroupshook_gpu1_pbsdsh.pbsn1.task00000002.1332.env")
    (tmp_path / "aux").mkdir()
    (tmp_path / "pbs.conf").write_text(f"PBS_HOME={tmp_path}\n")
    (tmp_path / "aux" / first["PBS_JOBID"]).write_text("pbsn1\npbsn2\n")
    live = replace(changed(first, PBS_CONF_FILE=str(tmp_path / "pbs.conf")), is_live=True)
    assert (detect(live).node_rank, detect(live).hosts) == (0, ("pbsn1", "pbsn2"))


def test_listed_hosts_without_a_scheduler_are_a_launch_by_hand() -> None:
    found = detect(Environment({"MUSTER_HOSTS": "alpha.example.org beta"}, host="Alpha"))
    assert (found.scheduler, found.launcher, found.node_rank, found.num_nodes) == ("manual", "manual", 0, 2)
    with pytest.raises(MusterError, match="this host, gamma, is not in the job's list"):
        detect(Environment({"MUSTER_HOSTS": "alpha,beta"}, host="gamma"))
    with pytest.raises(MusterError, match="MUSTER_HOSTS can't be read"):
        detect(Environment({"MUSTER_HOSTS": "alpha[1-"}, host="alpha"))
    assert detect(Environment({"MUSTER_HOSTS": " alpha, beta[1, 2] ,\tgamma"}, host="gamma")).node_rank == 3
    twice = detect(Environment({"MUSTER_HOSTS": "alpha,alpha,beta,beta"}, host="beta"))
    assert (twice.node_rank, twice.num_nodes) == (1, 2)
    assert "hosts: 2" in twice.notes[0]


@pytest.mark.parametrize(
    ("listed", "wrong"),
    [
        ("alpha:4,beta:4", "alpha:4 is a host with a number of slots"),
        ("localhost,alpha", "localhost is a name of every host"),
        ("127.0.0.1 alpha", "127.0.0.1 is a name of every host"),
        ("alpha,alpha.example.org", "alpha.example.org is listed with and without domain"),
    ],
)
def test_entries_that_name_no_single_host_are_refused(listed: str, wrong: str) -> None:
    """On the other nodes the same list would seem right, and they would wait in vain."""
    with pytest.raises(MusterError, match=re.escape(wrong)) as refusal:
        detect(Environment({"MUSTER_HOSTS": listed}, host="alpha"))
    assert refusal.value.seen.startswith("MUSTER_HOSTS=")


def test_listed_addresses_are_known_by_the_hosts_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "is_own", lambda host: host == "192.0.2.8")
    env = Environment({"MUSTER_HOSTS": "192.0.2.7,192.0.2.8"}, host="alpha", is_live=True)
    found = detect(env)
    assert (found.node_rank, found.hosts) == (1, ("192.0.2.7", "192.0.2.8"))
    with pytest.raises(MusterError, match="this host, alpha, is not in the job's list"):
        detect(replace(env, is_live=False))


def test_listed_hosts_do_not_make_a_job_script_a_task() -> None:
    with pytest.raises(MusterError, match="nothing started this process on each of them"):
        detect(changed(PBS, MUSTER_HOSTS="pbsn1,pbsn2"))


def test_another_host_that_is_listed_alone_is_not_this_one() -> None:
    script = recording.load(FOLDERS / "slurm" / "a_sbatch_N2.node01.0.env")
    assert detect(changed(script, MUSTER_HOSTS="node01")).hosts == ("node01",)
    one = recording.load(FOLDERS / "slurm" / "g_array_0.node01.0.env")
    assert detect(replace(one, host="of-container", variables={**one, "MUSTER_HOSTS": "node01"})).num_nodes == 1
    with pytest.raises(MusterError, match="lists only node02, but this host is node01"):
        detect(changed(script, MUSTER_HOSTS="node02"))


def test_listed_hosts_that_a_step_does_not_run_on_are_to_be_unset() -> None:
    with pytest.raises(MusterError) as refusal:
        detect(changed(SLURM, MUSTER_HOSTS="node01-ib,node02-ib"))
    assert refusal.value.fix == "unset MUSTER_HOSTS"
    # The step's first task, on a host whose own name is in the list, is not taken for another job's script.
    first = changed(SLURM, MUSTER_HOSTS="node01-ib,node02-ib", SLURM_PROCID="0", SLURM_NODEID="0", SLURM_GTIDS="0")
    with pytest.raises(MusterError) as refusal:
        detect(replace(first, host="node01-ib"))
    assert refusal.value.fix == "unset MUSTER_HOSTS"


def test_a_node_rank_in_a_variable_wins_and_is_checked() -> None:
    script = recording.load(FOLDERS / "pbs" / "pbs_scatter2x2_script.env")
    found = detect(changed(script, MUSTER_NODE_RANK="0"))
    assert (found.launcher, found.node_rank, found.num_nodes, found.hosts) == ("manual", 0, 2, ("pbsn1", "pbsn2"))
    assert "MUSTER_NODE_RANK" in "\n".join(found.notes)
    with pytest.raises(MusterError, match="this host has node rank 0"):
        detect(changed(script, MUSTER_NODE_RANK="1"))
    with pytest.raises(MusterError, match="started 2 here"):
        detect(changed(PBS_RANK, MUSTER_NODE_RANK="1"))
    with pytest.raises(MusterError, match="MUSTER_NODE_RANK needs the number of nodes"):
        detect(Environment({"MUSTER_NODE_RANK": "1"}, host="laptop"))
    with pytest.raises(MusterError, match="below the number of nodes"):
        detect(Environment({"MUSTER_NODE_RANK": "2", "MUSTER_HOSTS": "a,b"}, host="c"))


@pytest.mark.parametrize(
    "left",
    [
        {"SLURM_JOB_ID": "9"},
        {"SLURM_JOB_ID": "9", "SLURM_PROCID": "1"},
        {"PBS_JOBID": "7.pbshead"},
        {"FLUX_JOB_ID": "f3aXYz"},
        {**SLURM, "PBS_JOBID": "7.pbshead", "PBS_ENVIRONMENT": "PBS_BATCH", "NCPUS": "4"},
    ],
    ids=["ssh", "docker", "pbs", "flux", "two schedulers"],
)
def test_a_node_by_hand_needs_no_variables_of_a_scheduler(left: dict[str, str]) -> None:
    """for i in 0 1; do ssh node0$i train ddp --nnodes 2 --node-rank $i --master-addr node00 & done"""
    node, by_hand = Environment(left, host="gpu7"), LaunchOptions(nnodes="2", node_rank=1, master_addr="node00")
    with pytest.raises(MusterError) as refusal:
        detect(node)
    found = detect(node, by_hand)
    assert (found.launcher, found.node_rank, found.num_nodes) == ("manual", 1, 2)
    assert found.rejected == (refusal.value.wrong,)
    assert detect(changed(node, MUSTER_NODE_RANK="1"), LaunchOptions(nnodes="2", master_addr="node00")).node_rank == 1
    assert detect(changed(node, MUSTER_HOSTS="node00,gpu7"), by_hand).hosts == ("node00", "gpu7")
    # Values that the user does not give have to come from the scheduler.
    with pytest.raises(MusterError, match=re.escape(refusal.value.wrong)):
        detect(node, LaunchOptions(node_rank=1))


def test_a_node_rank_by_hand_is_not_that_of_several_tasks_on_a_node() -> None:
    """srun --ntasks-per-node=2 muster run --nnodes 2 --node-rank $SLURM_NODEID: two would have each node rank."""
    task = recording.load(FOLDERS / "slurm" / "c_srun_N2_2per.node02.3.env")
    options = LaunchOptions(nnodes="2", node_rank=1, master_addr="node01")
    with pytest.raises(MusterError, match="--node-rank is for one process a node, and srun started 2") as refusal:
        detect(task, options)
    assert refusal.value.fix == "leave out --node-rank and --nproc-per-node: each task is a rank"
    assert detect(task, replace(options, node_rank=None)).rank == 3
    # With --node-rank $SLURM_PROCID each task is a node of its own; with --nnodes 1 it trains by itself.
    assert detect(task, replace(options, nnodes="4", node_rank=3)).num_nodes == 4
    assert detect(task, replace(options, nnodes="1", node_rank=0)).num_nodes == 1


def test_slurms_variables_left_over_in_a_job_of_pbs_are_named() -> None:
    leaked = {name: value for name, value in SLURM.items() if name.startswith("SLURM_")}
    found = detect(changed(PBS_TASK, **leaked))
    assert (found.scheduler, found.launcher, found.node_rank) == ("pbs", "pbsdsh", 1)
    assert [line for line in found.rejected if line.startswith("slurm (SLURM_JOB_ID=9): left over")]
    assert [line for line in found.rejected if line.startswith("srun: belongs to slurm")]


def test_two_schedulers_that_both_know_this_host_are_refused() -> None:
    both = replace(changed(PBS_TASK, **SLURM), host="node02", files={"PBS_NODEFILE": "node01\nnode02\n"})
    with pytest.raises(MusterError, match="slurm and pbs are all set"):
        detect(both)


def test_ranks_that_nobody_set_are_refused_rather_than_forgotten() -> None:
    with pytest.raises(MusterError, match="nothing shows which of them this is"):
        detect(Environment({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a"}, host="laptop"))
    assert detect(Environment({"RANK": "0", "WORLD_SIZE": "1"}, host="laptop")).num_nodes == 1
    meant = LaunchOptions(nnodes="1")
    assert detect(Environment({"RANK": "1", "WORLD_SIZE": "2"}, host="laptop"), meant).num_nodes == 1
    assert detect(changed(PBS, RANK="1", WORLD_SIZE="2")).rejected == (
        "RANK=1 WORLD_SIZE=2: set by hand or left over, not used",
    )


OF_OPENMPI = dict(zip(mpi.OPENMPI, ("3", "4", "1", "2"), strict=True))


@pytest.mark.parametrize("copied", [OF_OPENMPI, {"MV2_COMM_WORLD_LOCAL_RANK": "1"}], ids=["openmpi", "mvapich"])
@pytest.mark.parametrize(
    ("file", "launcher"),
    [
        ("slurm/c_srun_N2_2per.node02.3", "srun"),
        ("slurm/c3_srun_N2_2per_pmix.node02.3", "srun"),
        ("mpi/mpich_ssh.node02.3", "hydra"),
    ],
)
def test_variables_that_a_script_copies_from_its_launcher_are_no_other_launchers(
    copied: dict[str, str], file: str, launcher: str
) -> None:
    """In srun bind.sh train ddp, the script uses Open MPI's names, and sets them to $SLURM_PROCID and so on."""
    found = detect(changed(recording.load(FOLDERS / f"{file}.env"), **copied))
    assert (found.launcher, found.rank, found.local_rank, found.ranks_per_node) == (launcher, 3, 1, (2, 2))


def test_variables_that_say_something_else_than_the_launcher_are_refused() -> None:
    task = recording.load(FOLDERS / "slurm" / "c_srun_N2_2per.node02.3.env")
    with pytest.raises(MusterError, match="PMIX_RANK or PMIX_NAMESPACE, which mpirun sets too, is missing"):
        detect(changed(task, **OF_OPENMPI, SLURM_GTIDS="0,2", SLURM_PROCID="2"))


def test_processes_of_launchers_that_tell_a_rank_only_do_not_train_alone_each() -> None:
    of_prterun = {"PMIX_RANK": "1", "PMIX_NAMESPACE": "prterun-node01-10332@1", "PMIX_HOSTNAME": "node01"}
    of_aprun = changed(PBS, ALPS_APP_PE="1", ALPS_APP_ID="123")
    of_horovod = changed(PBS, HOROVOD_RANK="1", HOROVOD_SIZE="2")
    for env in (Environment(of_prterun, host="node01"), changed(PBS, MPT_MPI_RANK="1"), of_aprun, of_horovod):
        with pytest.raises(MusterError, match="nothing shows which of them this is") as refusal:
            detect(env)
        assert re.search("_RANK=1|ALPS_APP_PE=1|HOROVOD_SIZE=2", refusal.value.seen)
        assert detect(env, LaunchOptions(nnodes="1")).num_nodes == 1
    # As in a job that was submitted from a shell that srun had started with PMIx.
    assert detect(changed(PBS, **of_prterun)).num_nodes == 1


def test_processes_of_prterun_in_a_job_do_not_train_alone_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """The variables are those that prterun of Open MPI 5.0.11 sets; with the personality ompi it is mpirun."""
    of_prterun = {"PMIX_RANK": "1", "PMIX_NAMESPACE": "prterun-node01-10332@1", "PRTE_LAUNCHED": "1"}
    of_mpirun = dict(zip(mpi.OPENMPI, ("1", "2", "1", "2"), strict=True))
    shell = changed(SLURM_SHELL, **of_prterun)
    for env in (replace(shell, is_live=True), shell):
        for parents in (["bash", "prterun", "slurmstepd"], ["prted"]):
            monkeypatch.setattr(traces, "ancestors", lambda parents=parents: parents)
            with pytest.raises(MusterError, match="prterun started this process") as refusal:
                detect(env, LaunchOptions(nnodes="1"))
            assert "PMIX_RANK=1" in refusal.value.seen
            assert "--personality ompi" in refusal.value.fix
            assert detect(changed(env, **of_mpirun)).rank == 1
    # Left over from a process that submitted this job.
    monkeypatch.setattr(traces, "ancestors", lambda: ["bash", "slurmstepd"])
    assert detect(replace(shell, is_live=True)).num_nodes == 1
    # One process on each of the hosts that the user lists.
    assert detect(Environment({**of_prterun, "MUSTER_HOSTS": "a,b"}, host="b")).node_rank == 1


@pytest.mark.parametrize("name", ["LSB_HOSTS", "LSF_PM_TASKID"])
def test_a_task_of_blaunch_that_lost_its_job_does_not_train_alone(name: str) -> None:
    """As in a container that got only this variable, or in a task of lsrun outside any job."""
    with pytest.raises(MusterError, match="LSB_JOBID is missing"):
        detect(Environment({name: BLAUNCH[name]}, host="hosta"))


@pytest.mark.parametrize("name", ["PBS_TASKNUM", "PBS_NODENUM"])
def test_a_task_of_pbs_that_lost_its_job_does_not_train_alone(name: str) -> None:
    with pytest.raises(MusterError, match="PBS_JOBID is missing"):
        detect(Environment({name: PBS_TASK[name]}, host="pbsn2"))


def test_a_login_node_is_not_the_one_node_of_a_job_of_lsf() -> None:
    of_job = {"LSB_JOBID": "7", "LSB_MCPU_HOSTS": "node01 4"}
    assert detect(Environment(of_job, host="node01.cluster")).num_nodes == 1
    with pytest.raises(MusterError, match="lsf lists only node01, but this host is login1") as refused:
        detect(Environment(of_job, host="login1"))
    assert "MUSTER_HOSTS=login1" in refused.value.fix


def test_a_shell_of_salloc_on_a_login_node_is_not_the_node_of_its_job() -> None:
    of_job = {"SLURM_JOB_ID": "9", "SLURM_JOB_NUM_NODES": "1", "SLURM_JOB_NODELIST": "node01"}
    with pytest.raises(MusterError, match="slurm lists only node01, but this host is login1") as refused:
        detect(Environment(of_job, host="login1"))
    assert refused.value.fix.startswith("srun ")
    # The batch script on a node whose own name differs from Slurm's.
    assert detect(Environment({**of_job, "SLURMD_NODENAME": "node01"}, host="n1")).num_nodes == 1


def test_a_script_on_a_host_that_pbs_does_not_list_is_not_alone() -> None:
    with pytest.raises(MusterError, match="pbs lists only pbsn1, but this host is pbsn9") as refusal:
        detect(replace(PBS, host="pbsn9"))
    # A container may have another name each time.
    assert refusal.value.fix.endswith("; or train ddp --nnodes 1 --node-rank 0")
    assert detect(replace(PBS, host="pbsn10"), LaunchOptions(nnodes="1", node_rank=0)).num_nodes == 1


def test_a_shell_of_flux_may_say_that_it_is_one_node() -> None:
    shell = recording.load(FOLDERS / "documented" / "flux_instance.node01.x.env")
    found = detect(shell, LaunchOptions(nnodes="1"))
    assert found.num_nodes == 1
    assert found.sources["scheduler"].startswith("FLUX_URI=")


def test_a_task_of_flux_names_its_job_as_the_source() -> None:
    found = detect(recording.load(FOLDERS / "flux" / "flux_in_pbs_run-N2n4g1.pbsn2.task3.env"))
    assert found.sources["scheduler"].startswith("FLUX_JOB_ID=")


@pytest.mark.parametrize(
    ("told", "attempt"),
    [
        ({}, 0),
        ({"LSB_RESTART": "Y"}, 1),
        ({"LSB_RESTART": "Y", "MUSTER_ATTEMPT": "2"}, 2),
        ({"MUSTER_ATTEMPT": "0"}, 0),
    ],
)
def test_attempts_of_lsf_are_counted_by_the_script(told: dict[str, str], attempt: int) -> None:
    """They all have the same job id: only the attempt makes their rendezvous different."""
    job, _ = families.find_job(changed(LSF, **told))
    assert job
    assert job.attempt == attempt


@pytest.mark.parametrize("task", ["0", "2", "3"])
def test_a_task_of_blaunch_that_is_not_this_hosts_is_refused(task: str) -> None:
    with pytest.raises(MusterError, match="blaunch's task does not fit the job's list of hosts"):
        detect(changed(BLAUNCH, LSF_PM_TASKID=task))


def test_the_launch_node_is_no_node_that_jsrun_leaves_out() -> None:
    task = recording.load(FOLDERS / "documented" / "lsf_jsrun_one_a_node.h36n18.1.env")
    # Also where each host has one slot: then only the number of hosts shows that there is a launch node.
    one_slot = {"LSB_HOSTS": "batch2 h36n03 h36n18", "LSB_MCPU_HOSTS": "batch2 1 h36n03 1 h36n18 1"}
    for found in (detect(task), detect(changed(task, **one_slot))):
        assert (found.node_rank, found.hosts) == (1, ("h36n03", "h36n18"))
        assert not [note for note in found.notes if "nodes" in note]


@pytest.mark.parametrize("slots", [2, 4])
def test_blaunch_with_several_slots_a_host_is_refused(slots: int) -> None:
    hosts = ["hosta"] * slots + ["hostb"] * slots
    told = {"LSB_HOSTS": " ".join(hosts), "LSB_MCPU_HOSTS": f"hosta {slots} hostb {slots}"}
    with pytest.raises(MusterError, match="a task for each slot or one for each host") as refusal:
        detect(changed(LSF, **told, LSB_DJOB_NUMPROC=str(2 * slots)))
    assert "bsub -n 2 -R" in refusal.value.fix


def test_tasks_of_torques_pbsdsh_are_told_from_its_job_script() -> None:
    """Torque counts PBS_TASKNUM in decimal digits from 1, which is the job script."""
    of_torque = {"PBS_JOBID": "9.srv", "PBS_ENVIRONMENT": "PBS_BATCH", "PBS_NODEFILE": "/var/spool/torque/aux//9.srv"}

    def process(host: str, task: str, nodes: str) -> Environment:
        return Environment({**of_torque, "PBS_NUM_PPN": "2", "PBS_TASKNUM": task}, host, {"PBS_NODEFILE": nodes})

    with pytest.raises(MusterError, match="pbsdsh starts 2 tasks on a node"):
        detect(process("c1", "3", "c1\nc1\n"))
    found = detect(process("c2", "2", "c1\nc2\n"))
    assert (found.launcher, found.node_rank, found.num_nodes) == ("pbsdsh", 1, 2)
    assert detect(process("c1", "1", "c1\nc1\n")).launcher == "local"
    # Torque has no pbs_tmrsh.
    with pytest.raises(MusterError) as refusal:
        detect(process("c1", "3", "c1\nc1\n"))
    assert "pbsdsh -h HOST env MUSTER_HOSTS=" in refusal.value.fix


def test_a_variable_of_torque_that_a_site_sets_in_pbs_makes_no_torque() -> None:
    """MetaCentrum sets PBS_NUM_PPN. PBS counts tasks in hexadecimal digits, and all nodes see its node file."""
    task = recording.load(FOLDERS / "pbs" / "pbs_scatter2x2_pbsdsh.pbsn2.task20000001.env")
    nodes = {"PBS_NODEFILE": "pbsn1\npbsn2\n"}
    found = detect(replace(changed(task, PBS_NUM_PPN="2", PBS_TASKNUM="2000000A"), files=nodes))
    assert (found.launcher, found.node_rank, found.job.is_shared) == ("pbsdsh", 1, True)
    with pytest.raises(MusterError, match="pbsdsh starts 2 tasks on a node") as refusal:
        detect(changed(task, PBS_NUM_PPN="2"))
    assert "pbs_tmrsh HOST env MUSTER_HOSTS=" in refusal.value.fix


def test_gpus_of_grid_engine_are_counted() -> None:
    script = recording.load(FOLDERS / "grid_engine" / "pe_two.master.node01.env")
    one_node = replace(script, files={"PE_HOSTFILE": "node01 2 main.q@node01 UNDEFINED\n"})
    for name in ("SGE_HGR_gpu", "SGE_HGR_gpu_card", "SGE_HGR_NVIDIA_GPUS"):
        assert detect(changed(one_node, NHOSTS="1", **{name: "0 1 3"})).nproc_per_node == 3
    assert detect(changed(one_node, NHOSTS="1", SGE_HGR_licence="0 1 3")).gpus_seen == 0
    assert detect(changed(one_node, NHOSTS="1", SGE_HGR_a_gpu_mem="16G", SGE_HGR_gpu="0 1")).gpus_seen == 2


def test_a_job_of_grid_engine_on_one_host_needs_no_file_of_hosts() -> None:
    """A container usually does not see the file's folder. In a task of a larger job, too, NHOSTS is 1."""
    script = recording.load(FOLDERS / "grid_engine_own" / "pe_one_host_script.node02.x.env")
    found = detect(replace(script, files={}))
    assert (found.hosts, found.mode, found.sources["hosts"]) == (("node02",), "agent", "NHOSTS=1")
    for refused in (changed(script, NHOSTS="2"), recording.load(FOLDERS / "grid_engine" / "pe_two.qrsh_V.node02.env")):
        with pytest.raises(MusterError, match="the file that PE_HOSTFILE names can't be read"):
            detect(replace(refused, files={}))


@pytest.mark.parametrize(
    ("hosts", "host", "place"),
    [
        (("n1", "n2"), "n2", 1),
        (("n1.x.org", "n2.x.org"), "n2", 1),
        (("n1", "n2"), "N2.x.org", 1),
        (("n1", "n2"), "n3", None),
        (("n1", "n2"), None, None),
        (("10.0.0.1", "10.0.0.2"), "10.0.0.2", 1),
        (("10.0.0.1", "10.1.0.1"), "10", None),
        (("a.x", "a.y"), "a.y", 1),
    ],
)
def test_the_place_of_this_host(hosts: tuple[str, ...], host: str | None, place: int | None) -> None:
    assert index_of(hosts, host) == place


def test_a_name_that_two_hosts_share_is_no_place() -> None:
    with pytest.raises(HostListError, match=r"a could be a\.x or a\.y"):
        index_of(("a.x", "a.y"), "a")


@pytest.mark.parametrize(("restarted", "attempt"), [("0", 0), ("1", 1)])
def test_grid_engine_tells_which_attempt_this_is(restarted: str, attempt: int) -> None:
    job, _ = families.find_job(changed(QRSH, RESTARTED=restarted))
    assert job
    assert job.attempt == attempt


def test_a_pod_whose_name_volcano_does_not_list_is_told_by_its_index_where_there_is_one_list() -> None:
    """As where a pod has a host name of its own."""
    worker = recording.load(FOLDERS / "documented" / "volcano_workers.job-worker-1.1.env")
    assert detect(replace(worker, host="other")).node_rank == 1
    of_two_lists = recording.load(FOLDERS / "documented" / "volcano_pytorch.job-worker-0.1.env")
    with pytest.raises(MusterError, match="disagree on which pod"):
        detect(replace(of_two_lists, host="other"))


@pytest.mark.parametrize("missing", ["VC_TASK_INDEX", "VK_TASK_INDEX"])
def test_one_index_of_a_pod_is_enough_for_volcano(missing: str) -> None:
    worker = recording.load(FOLDERS / "documented" / "volcano_workers.job-worker-1.1.env")
    left = {name: value for name, value in worker.items() if name != missing}
    assert detect(replace(worker, variables=left, host="other")).node_rank == 1


def test_a_pod_of_volcano_without_its_env_plugin_is_told_by_its_name() -> None:
    """plugins: {pytorch: [...]}, as in Volcano's user guide, brings the lists of hosts, and no index."""
    for name, rank in (("master-0.0", 0), ("worker-0.1", 1), ("worker-1.2", 2)):
        pod = recording.load(FOLDERS / "documented" / f"volcano_pytorch.job-{name}.env")
        left = {key: value for key, value in pod.items() if "_TASK_INDEX" not in key}
        found = detect(replace(pod, variables=left))
        assert (found.node_rank, found.num_nodes, found.hosts[0]) == (rank, 3, "job-master-0.job")
        assert found.sources["node_rank"] == f"the name of this pod, {pod.host}"
        for wrong in ({"RANK": str((rank + 1) % 3)}, {"WORLD_SIZE": "4"}, {"VK_TASK_INDEX": "7"}):
            with pytest.raises(MusterError, match="disagree on which pod"):
                detect(replace(pod, variables=left | wrong))


def test_a_service_that_happens_to_be_called_pet_makes_no_job() -> None:
    """Kubernetes gives all pods the addresses of their namespace's services, in variables named after these."""
    service = {"PET_CLINIC_SERVICE_HOST": "10.96.7.7", "PET_CLINIC_PORT": "tcp://10.96.7.7:80"}
    alone = recording.load(FOLDERS / "documented" / "pod_alone.notebook-0.x.env")
    assert detect(changed(alone, **service)).scheduler == "local"
    old = recording.load(FOLDERS / "documented" / "kubeflow_pytorchjob_old.mnist-worker-0.1.env")
    assert (detect(changed(old, **service)).node_rank, detect(changed(old, **service)).num_nodes) == (1, 3)


def test_volcanos_tasks_may_have_any_names() -> None:
    """The manifest gives them to the plugin: pytorch: ["--master=leader", "--worker=follower"]."""
    for name, rank in (("master-0.0", 0), ("worker-0.1", 1), ("worker-1.2", 2)):
        pod = recording.load(FOLDERS / "documented" / f"volcano_pytorch.job-{name}.env")
        renamed = {"MASTER": "LEADER", "WORKER": "FOLLOWER"}
        variables = {key: value for key, value in pod.items() if not key.startswith(("VC_MASTER", "VC_WORKER"))}
        for old, new in renamed.items():
            hosts = pod[f"VC_{old}_HOSTS"].replace(old.lower(), new.lower())
            variables |= {f"VC_{new}_HOSTS": hosts, "MASTER_ADDR": "job-leader-0.job"}
        assert pod.host
        host = pod.host.replace("master", "leader").replace("worker", "follower")
        found = detect(replace(pod, variables=variables, host=host))
        assert (found.node_rank, found.hosts[0]) == (rank, "job-leader-0.job")


def test_the_masters_pod_of_volcanos_mpi_plugin_is_no_node() -> None:
    """By https://github.com/volcano-sh/volcano/blob/master/docs/user-guide/how_to_use_mpi_plugin.md"""
    workers = "job-worker-0.job,job-worker-1.job"
    first = recording.load(FOLDERS / "documented" / "volcano_workers.job-worker-0.0.env")
    master = changed(replace(first, host="job-master-0"), VC_MASTER_HOSTS="job-master-0.job", MPI_HOST=workers)
    with pytest.raises(MusterError, match="the number of nodes of this kubernetes job is unknown") as refusal:
        detect(master)
    assert "mpirun --host $MPI_HOST -n PODS " in refusal.value.fix


def test_a_third_task_of_volcano_is_none_of_its_pytorch_plugins_pods() -> None:
    """By pkg/controllers/job/plugins/distributed-framework/pytorch/pytorch.go: it gets WORLD_SIZE, and no RANK."""
    third = {"VC_TENSORBOARD_HOSTS": "job-tensorboard-0.job", "VC_TENSORBOARD_NUM": "1"}
    for name, rank in (("master-0.0", 0), ("worker-0.1", 1), ("worker-1.2", 2)):
        pod = changed(recording.load(FOLDERS / "documented" / f"volcano_pytorch.job-{name}.env"), **third)
        assert (detect(pod).node_rank, detect(pod).num_nodes) == (rank, 3)
        with pytest.raises(MusterError, match="disagree on which pod"):
            detect(changed(pod, RANK=str((rank + 1) % 3)))
    left = {key: value for key, value in pod.items() if key != "RANK"}
    with pytest.raises(MusterError, match="disagree on which pod"):
        detect(replace(pod, host="job-tensorboard-0", variables=left | {"VC_TASK_INDEX": "0", "VK_TASK_INDEX": "0"}))


@pytest.mark.parametrize("hosts", ["", "mpi.example.org", "job-worker-0.job,job-worker-1.job"])
def test_a_users_own_mpi_host_makes_no_pod_the_master_of_volcanos_mpi_plugin(hosts: str) -> None:
    worker = recording.load(FOLDERS / "documented" / "volcano_workers.job-worker-1.1.env")
    assert detect(changed(worker, MPI_HOST=hosts)).node_rank == 1
    pod = recording.load(FOLDERS / "documented" / "kubeflow_pytorchjob.mnist-worker-0.1.env")
    job, _ = families.find_job(changed(pod, MPI_HOST=hosts))
    assert "mpirun" not in job.launch


def test_the_pods_of_several_jobs_in_a_jobset_are_told_apart_by_their_own_node_rank() -> None:
    """It comes from the label jobset.sigs.k8s.io/job-global-index: in each Job JOB_COMPLETION_INDEX begins at 0."""
    first = recording.load(FOLDERS / "documented" / "kubeflow_trainjob.train-node-0-0.0.env")
    second = replace(first, host="train-node-1-0")
    for host in ("train-node-1-0", "train-worker-0-0"):
        assert detect(changed(replace(first, host=host), PET_NODE_RANK="1")).node_rank == 1
    # With hostNetwork a pod has its node's name.
    assert detect(replace(first, host="pool-b-1-0")).node_rank == 0
    with pytest.raises(MusterError, match="disagree on which pod"):
        detect(changed(second, PET_NODE_RANK="2"))
    # Without it both would be node rank 0, and each would wait for the other.
    with pytest.raises(MusterError, match="disagree on which pod"):
        detect(replace(second, variables={name: value for name, value in second.items() if name != "PET_NODE_RANK"}))
    with pytest.raises(MusterError, match="disagree on which pod"):
        detect(changed(first, PET_NODE_RANK="1"))
    by_author = recording.load(FOLDERS / "documented" / "jobset_processes.train-workload-0-0.0.env")
    assert detect(replace(changed(by_author, NODE_RANK="1"), host="train-workload-1-0")).node_rank == 1


def test_the_pods_of_a_leaderworkerset_meet_at_their_leader() -> None:
    worker = recording.load(FOLDERS / "documented" / "leader_worker_set.lws-0-1.1.env")
    # Where pods' names have a hash, only the leader's address is known.
    for pod in (worker, changed(replace(worker, host="lws-7f9c-1"), LWS_LEADER_ADDRESS="10.0.0.7")):
        found = detect(pod)
        met = address.meet(found, pod, LaunchOptions())
        assert (found.num_nodes, found.node_rank) == (2, 1)
        assert (met.master_addr, met.master_port) == (pod["LWS_LEADER_ADDRESS"], address.FIRST_PORT)
    with pytest.raises(MusterError, match="disagree on which pod this is"):
        detect(replace(worker, host="lws-0"))
    with pytest.raises(MusterError, match="LWS_GROUP_SIZE is missing"):
        detect(replace(worker, variables={key: text for key, text in worker.items() if key != "LWS_GROUP_SIZE"}))
    leader = recording.load(FOLDERS / "documented" / "leader_worker_set.lws-0.0.env")
    assert detect(changed(leader, LWS_GROUP_SIZE="1")).num_nodes == 1


def test_a_pod_of_an_indexed_job_whose_author_tells_the_number_of_pods_has_its_place() -> None:
    """Only NNODES gives it: WORLD_SIZE is torch's, and does not count pods."""
    pod = recording.load(FOLDERS / "documented" / "indexed_job.example-1.1.env")
    found = detect(changed(pod, NNODES="2", MASTER_ADDR="example-0.svc"))
    assert (found.scheduler, found.node_rank, found.hosts) == ("kubernetes", 1, ("example-0.svc", "example-1.svc"))
    with pytest.raises(MusterError, match="disagree on which pod"):
        detect(changed(pod, NNODES="1"))


def test_the_pods_of_ucloud_are_told_their_number_beside_volcanos_index() -> None:
    """Each job there gets Volcano's index, even a job of one pod."""
    alone = recording.load(FOLDERS / "documented" / "pod_alone.notebook-0.x.env")
    for rank, num_pods in ((0, 1), (0, 2), (1, 2)):
        of_volcano = {"VC_TASK_INDEX": str(rank), "VK_TASK_INDEX": str(rank), "VC_JOB_NUM": str(num_pods)}
        told = {"UCLOUD_RANK": str(rank), "UCLOUD_TASK_COUNT": str(num_pods)}
        pod = changed(replace(alone, host=f"j-55512-job-{rank}"), **of_volcano)
        found = detect(changed(pod, **told))
        assert (found.scheduler, found.node_rank, found.num_nodes) == ("kubernetes", rank, num_pods)
        with pytest.raises(MusterError, match="the number of nodes of this kubernetes job"):
            detect(pod)


def test_a_pod_of_an_elastic_job_takes_what_the_refusal_asks_for() -> None:
    elastic = recording.load(FOLDERS / "documented" / "kubeflow_elastic.mnist-worker-0.0.env")
    with pytest.raises(MusterError, match="gives its pods no ranks") as refusal:
        detect(elastic)
    assert refusal.value.fix.endswith("; or on each pod: train ddp --nnodes PODS --node-rank INDEX --master-addr HOST")
    found = detect(elastic, LaunchOptions(nnodes="2", node_rank=1, master_addr="mnist-worker-0"))
    assert (found.num_nodes, found.node_rank) == (2, 1)


def test_an_elastic_job_without_a_range_gives_its_pods_no_ranks_either() -> None:
    elastic = recording.load(FOLDERS / "documented" / "kubeflow_elastic.mnist-worker-0.0.env")
    with pytest.raises(MusterError, match="an elastic job gives its pods no ranks"):
        detect(changed(elastic, PET_NNODES="3"))


@pytest.mark.parametrize(
    "told", [{"WORLD_SIZE": "8"}, {"RANK": "1"}, {"NNODES": "1", "WORLD_SIZE": "8"}, {"PET_NNODES": ""}]
)
def test_a_pod_whose_variables_disagree_takes_what_the_refusal_asks_for(told: dict[str, str]) -> None:
    """As where the author of a manifest gives the number of processes, and nothing else."""
    pod = changed(recording.load(FOLDERS / "documented" / "pod_alone.notebook-0.x.env"), **told)
    with pytest.raises(MusterError) as refusal:
        detect(pod)
    assert refusal.value.fix == "on each pod: train ddp --nnodes PODS --node-rank INDEX --master-addr HOST"
    found = detect(pod, LaunchOptions(nnodes="2", node_rank=1, master_addr="pod-0"))
    assert (found.num_nodes, found.node_rank) == (2, 1)
    assert detect(pod, LaunchOptions(nnodes="1", node_rank=0)).num_nodes == 1
    found = detect(changed(pod, MUSTER_NODE_RANK="1"), LaunchOptions(nnodes="2", master_addr="pod-0"))
    assert (found.num_nodes, found.node_rank) == (2, 1)


@pytest.mark.parametrize("pod", ["pod_alone.notebook-0.x", "kubeflow_pytorchjob_old.mnist-worker-0.1"])
@pytest.mark.parametrize("local_rank", ["0", "1"])
@pytest.mark.parametrize("size", ["LOCAL_SIZE", "LOCAL_WORLD_SIZE"])
def test_ranks_of_a_launcher_inside_a_pod_are_no_pods(pod: str, local_rank: str, size: str) -> None:
    """DeepSpeed's launcher sets LOCAL_SIZE, Ray Train LOCAL_WORLD_SIZE."""
    env = recording.load(FOLDERS / "documented" / f"{pod}.env")
    told = {"RANK": "1", "WORLD_SIZE": "3", "LOCAL_RANK": local_rank, size: "3"}
    with pytest.raises(MusterError, match="a launcher inside this pod"):
        detect(changed(env, **told))


@pytest.mark.parametrize("size", ["LOCAL_SIZE", "LOCAL_WORLD_SIZE"])
@pytest.mark.parametrize("job", [PBS, SLURM], ids=["script of one node", "task on each node"])
def test_ranks_of_a_launcher_inside_a_job_do_not_start_a_world_each(job: Environment, size: str) -> None:
    """As `deepspeed` or Ray start them: each would become its node's agent, and start as many ranks again."""
    with pytest.raises(MusterError, match="a launcher inside this job"):
        detect(changed(job, RANK="3", WORLD_SIZE="4", LOCAL_RANK="3", **{size: "4"}))
    # Variables that users set for their own scripts.
    assert detect(changed(job, RANK="0", WORLD_SIZE="4", LOCAL_RANK="0")).mode == "agent"
    # As from a script that passes them all, even where they are not set: docker run -e LOCAL_RANK=$LOCAL_RANK
    assert detect(changed(job, RANK="", WORLD_SIZE="", LOCAL_RANK="", **{size: ""})).mode == "agent"
    assert detect(changed(job, **{size: "4"})).mode == "agent"


@pytest.mark.parametrize(
    ("name", "several", "one"),
    [
        (
            "AFO_ENV_CLUSTER_SPEC",
            '{"worker":["a:2222,2223","b:2222,2223"],"role":"worker","index":1}',
            '{"worker":["a:2222,2223"],"role":"worker","index":0}',
        ),
        ("AWS_BATCH_JOB_NUM_NODES", "2", "1"),
        ("AZUREML_NODE_COUNT", "2", "1"),
        ("AZ_BATCH_HOST_LIST", "10.0.0.4,10.0.0.5", "10.0.0.4"),
        (
            "CLUSTER_SPEC",
            '{"cluster":{"workerpool0":["a:2222"],"workerpool1":["b:2222"]},"task":{"type":"workerpool1","index":0}}',
            '{"cluster":{"workerpool0":["a:2222"]},"task":{"type":"workerpool0","index":0}}',
        ),
        ("ARNOLD_WORKER_NUM", "2", "1"),
        ("COORDINATOR_ADDRESS", "jaxjob-simple-worker-0", "localhost"),
        ("NCCL_HOSTID", "modalfdaa:0:1::2", "node02"),
        ("BACKENDAI_CLUSTER_SIZE", "2", "1"),
        ("BEAKER_REPLICA_COUNT", "2", "1"),
        ("CCP_NODES", "2 NODE02 8 NODE03 8", "1 NODE02 8"),
        ("COBALT_JOBSIZE", "2", "1"),
        ("CRANE_JOB_NUM_NODES", "2", "1"),
        ("DMLC_NUM_WORKER", "2", "1"),
        ("HYDRA_HOST_FILE", "/etc/mpi/hostfile", "hosts"),
        ("I_MPI_HYDRA_HOST_FILE", "/etc/mpi/hostfile", "hosts"),
        ("OMPI_MCA_orte_default_hostfile", "/etc/mpi/hostfile", "hosts"),
        ("DSTACK_NODES_NUM", "2", "1"),
        ("HOROVOD_SIZE", "4", "1"),
        ("HOST_NUM", "2", "1"),
        ("HQ_NUM_NODES", "2", "1"),
        ("JH_HOSTS", "node01 4 node02 4", "node01 4"),
        ("KUBEBRAIN_REPLICA_TOTAL", "2", "1"),
        ("LEPTON_JOB_TOTAL_WORKERS", "2", "1"),
        ("MF_PARALLEL_NUM_NODES", "2", "1"),
        ("MLP_WORKER_NUM", "2", "1"),
        ("NGC_ARRAY_SIZE", "2", "1"),
        ("NNODES", "2", "1"),
        ("NODE_COUNT", "2", "1"),
        ("NODE_NUM", "2", "1"),
        ("NODE_RANK", "1", "0"),
        ("RANK", "1", "0"),
        ("SLURM_NTASKS", "2", "1"),
        ("SLURM_JOB_NUM_NODES", "2", "1"),
        ("NUM_NODES", "2", "1"),
        ("OCI__WORKER_COUNT", "1", "0"),
        ("PADDLE_TRAINERS_NUM", "2", "1"),
        ("PJM_NODE", "4", "1"),
        ("PJM_VNODES", "2", "1"),
        ("RLAUNCH_REPLICA_TOTAL", "2", "1"),
        ("SENSECORE_PYTORCH_NNODES", "2", "1"),
        ("SKYPILOT_NUM_NODES", "2", "1"),
        ("SM_HOSTS", '["algo-1","algo-2"]', '["algo-1"]'),
        ("SNOWFLAKE_JOBS_COUNT", "2", "1"),
        ("JAX_NUM_PROCESSES", "2", "1"),
        ("SUBMITIT_LOCAL_NTASKS", "2", "1"),
        (
            "TF_CONFIG",
            '{"cluster":{"chief":["a:2222"],"worker":["b:2222"]},"task":{"type":"worker","index":1}}',
            '{"cluster":{"chief":["a:2222"]},"task":{"type":"chief","index":0}}',
        ),
        ("_CONDOR_NPROCS", "2", "1"),
    ],
)
def test_the_nodes_of_an_unknown_scheduler_do_not_train_alone_each(name: str, several: str, one: str) -> None:
    with pytest.raises(MusterError, match="nothing shows which of them this is") as refusal:
        detect(Environment({name: several}, "node02"))
    assert refusal.value.seen == f"{name}={several}"
    assert "--node-rank I" in refusal.value.fix
    assert detect(Environment({name: one}, "node02")).num_nodes == 1
    assert detect(Environment({name: several}, "node02"), LaunchOptions(nnodes="1")).num_nodes == 1
    assert detect(Environment({name: several, "MUSTER_HOSTS": "node01,node02"}, "node02")).node_rank == 1


def test_a_jaxjob_of_one_pod_trains_alone() -> None:
    pod = {"COORDINATOR_ADDRESS": "jaxjob-simple-worker-0", "NUM_PROCESSES": "1", "PROCESS_ID": "0"}
    assert detect(Environment(pod, "jaxjob-simple-worker-0")).num_nodes == 1


@pytest.mark.parametrize("told", [{"NODE_RANK": "0"}, {"MASTER_ADDR": "node00"}, {"MASTER_ADDR": "10.0.0.5"}])
def test_a_node_of_a_loop_by_hand_without_their_number_is_told_what_to_type(told: dict[str, str]) -> None:
    """for i in 0 1; do ssh node0$i MASTER_ADDR=node00 NODE_RANK=$i train ddp & done: the first node trains alone."""
    (note,) = detect(Environment(told, "node01")).notes
    assert re.match(r"(NODE_RANK=0|MASTER_ADDR=\S+) gives no number of nodes: one is assumed", note)
    assert note.endswith("on each: --nnodes N --node-rank I --master-addr HOST")
    for name in ("NNODES", "WORLD_SIZE"):
        assert not detect(Environment({**told, name: "1"}, "node01")).notes
    assert not detect(Environment(told, "node01"), LaunchOptions(nnodes="1")).notes
    assert not detect(Environment({"MASTER_ADDR": "node01.cluster", "MASTER_PORT": "29500"}, "node01")).notes
    for own in ("localhost", "0.0.0.0", "[::1]"):
        assert not detect(Environment({"MASTER_ADDR": own, "MASTER_PORT": "29500"}, "node01")).notes


def test_a_number_of_nodes_that_counts_gpus_beside_one_of_hosts_makes_no_nodes() -> None:
    """As on a machine of Tencent's with 8 GPUs."""
    assert detect(Environment({"HOST_NUM": "1", "NODE_NUM": "8"}, "node02")).num_nodes == 1


@pytest.mark.parametrize(("hosts", "num_nodes"), [('["algo-1", "algo-2"]', 2), ('["algo-1"]', 1)])
def test_the_nodes_of_a_job_of_sagemaker_do_not_train_alone_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hosts: str, num_nodes: int
) -> None:
    """In a container without its toolkit, which would set SM_HOSTS."""
    file = tmp_path / "resourceconfig.json"
    file.write_text(f'{{"current_host": "algo-1", "hosts": {hosts}, "network_interface_name": "eth0"}}')
    monkeypatch.setattr(manual, "SAGEMAKER", file)
    job = Environment({"TRAINING_JOB_NAME": "gpt-1b"}, "ip-10-0-1-7", is_live=True)
    if num_nodes == 1:
        assert detect(job).num_nodes == 1
        return
    with pytest.raises(MusterError, match="nothing shows which of them this is") as refusal:
        detect(job)
    assert refusal.value.seen == "TRAINING_JOB_NAME=gpt-1b"
    assert detect(job, LaunchOptions(nnodes="2", node_rank=1, master_addr="algo-1")).node_rank == 1
    assert detect(Environment({}, "ip-10-0-1-7")).num_nodes == 1


def test_the_nodes_of_a_job_of_oar_do_not_train_alone_each() -> None:
    def job(nodes: str) -> Environment:
        return Environment({"OAR_NODEFILE": "/var/lib/oar/12"}, "gros-2", {"OAR_NODEFILE": nodes})

    with pytest.raises(MusterError, match="nothing shows which of them this is"):
        detect(job("gros-1\ngros-1\ngros-2\n"))
    assert detect(job("gros-2\ngros-2\n")).num_nodes == 1


@pytest.mark.parametrize(
    ("name", "several", "one"),
    [
        ("BATCH_HOSTS_FILE", "10.0.0.4\n10.0.0.5\n", "10.0.0.4\n"),
        ("CCS_ALLOC_FILE", "agent-1 4 0-3\nagent-2 4 0-3\n\n", "agent-1 4 0-3\n\n"),
        ("OAR_NODEFILE", "gros-1\ngros-2\n", "gros-1\ngros-1\n"),
    ],
)
def test_the_nodes_in_the_file_of_an_unknown_scheduler_do_not_train_alone_each(
    name: str, several: str, one: str
) -> None:
    variables = {name: "/var/spool/12/hosts"}
    with pytest.raises(MusterError, match="nothing shows which of them this is"):
        detect(Environment(variables, "node02", {name: several}))
    assert detect(Environment(variables, "node02", {name: one})).num_nodes == 1
    # As in a container that does not see the file: the advice in the refusal works.
    with pytest.raises(MusterError, match="can't be read here") as refusal:
        detect(Environment(variables, "node02"))
    assert f"${name}" in refusal.value.fix
    assert "--nnodes 1" in refusal.value.fix
    assert detect(Environment(variables, "node02"), LaunchOptions(nnodes="1")).num_nodes == 1
    assert detect(Environment(variables | {"MUSTER_HOSTS": "node01,node02"}, "node02")).node_rank == 1
    assert detect(Environment({name: ""}, "node02")).num_nodes == 1


def test_one_process_a_pod_may_have_a_local_rank() -> None:
    old = recording.load(FOLDERS / "documented" / "kubeflow_pytorchjob_old.mnist-worker-0.1.env")
    assert detect(changed(old, LOCAL_RANK="0")).num_nodes == 3


def test_what_counts_processes_counts_no_pods() -> None:
    pod = recording.load(FOLDERS / "documented" / "jobset_processes.train-workload-0-1.1.env")
    assert detect(changed(pod, WORLD_SIZE="2")).num_nodes == 2
    for wrong in ({"GPUS_PER_NODE": "4"}, {"NODE_RANK": "0"}, {"RANK": "8"}):
        with pytest.raises(MusterError, match="the variables disagree"):
            detect(changed(pod, **wrong))
    first = recording.load(FOLDERS / "documented" / "jobset_processes.train-workload-0-0.0.env")
    assert detect(changed(first, NNODES="1", WORLD_SIZE="8")).num_nodes == 1
    worker = recording.load(FOLDERS / "documented" / "leader_worker_set.lws-0-1.1.env")
    assert detect(changed(worker, WORLD_SIZE="16", GPUS_PER_NODE="8")).num_nodes == 2


TWO_NODES = recording.load(FOLDERS / "pbs" / "pbs_scatter2x2_script.env")


@pytest.mark.parametrize(
    ("options", "source"), [(LaunchOptions(), "single"), (LaunchOptions(nnodes="1"), "--nnodes=1")]
)
def test_one_process_may_be_started_in_the_script_of_a_job_of_two_nodes(options: LaunchOptions, source: str) -> None:
    found = resolve.resolve(TWO_NODES, options, ["train", "single"], is_single=True)
    assert (found.num_nodes, found.hosts, found.job_id) == (1, ("pbsn1",), TWO_NODES["PBS_JOBID"])
    assert found.sources["num_nodes"] == source
    assert "this uses 1 of the job's 2 nodes" in found.notes
    assert detect(TWO_NODES, LaunchOptions(nnodes="1")).num_nodes == 1
    assert found.world_size == 1


def test_one_process_is_not_started_where_the_scheduler_gave_no_node() -> None:
    login = recording.load(FOLDERS / "slurm" / "d_salloc_bash.login.x.env")
    with pytest.raises(MusterError, match="none of the 2 nodes") as refusal:
        resolve.resolve(login, LaunchOptions(), ["train", "single"], is_single=True)
    assert refusal.value.fix == "srun --nodes=1 --ntasks=1 train single"


def test_several_tasks_of_one_process_are_told_a_way_out_that_is_taken() -> None:
    with pytest.raises(MusterError, match="this command runs in one process") as refusal:
        resolve.resolve(PBS_RANK, LaunchOptions(), ["train", "single"], is_single=True)
    assert "in the job script, by itself: train single" in refusal.value.fix


@pytest.mark.parametrize(
    ("target", "beside", "words"),
    [
        ("orterun", "", "--map-by ppr:1:node --bind-to none"),
        ("mpiexec.hydra", "", "-ppn 1"),
        # Open MPI 5, and a Hydra of another name.
        ("mpirun", "ompi_info", "--map-by ppr:1:node --bind-to none"),
        ("mpirun", "mpichversion", "-ppn 1"),
        # /usr/bin may have programs of both.
        ("mpiexec.mpich", "ompi_info", "-ppn 1"),
    ],
)
def test_the_launch_line_is_in_the_words_of_the_mpiexec_that_is_here(
    tmp_path: Path, target: str, beside: str, words: str
) -> None:
    program = tmp_path / target
    program.touch(0o755)
    (tmp_path / (beside or "other")).touch(0o755)
    (tmp_path / "mpiexec").symlink_to(program)
    nodes = tmp_path / "nodes"
    nodes.write_text("pbsn1\npbsn2\n")
    here = {"PATH": str(tmp_path), "PBS_NODEFILE": str(nodes)}
    with pytest.raises(MusterError) as refusal:
        detect(replace(changed(TWO_NODES, **here), is_live=True, files={}))
    assert refusal.value.fix.startswith("mpiexec -n 2 ")
    assert words in refusal.value.fix


def test_the_launch_line_of_cray_pals_leaves_a_task_all_cores(tmp_path: Path) -> None:
    (tmp_path / "pals" / "1.8" / "bin").mkdir(parents=True)
    (tmp_path / "pals" / "1.8" / "bin" / "mpiexec").touch(0o755)
    (tmp_path / "nodes").write_text("pbsn1\npbsn2\n")
    here = {"PATH": str(tmp_path / "pals" / "1.8" / "bin"), "PBS_NODEFILE": str(tmp_path / "nodes")}
    with pytest.raises(MusterError) as refusal:
        detect(replace(changed(TWO_NODES, **here), is_live=True, files={}))
    assert refusal.value.fix == "mpiexec -n 2 -ppn 1 --cpu-bind none train ddp"


@pytest.mark.parametrize("program", ["blaunch", "jsrun"])
def test_the_first_of_lsfs_hosts_is_the_launch_node_of_jsrun_only_where_there_is_one(
    tmp_path: Path, program: str
) -> None:
    """LSF fills its hosts one after the other: the first may have one slot, and the second the other seven."""
    (tmp_path / program).touch(0o755)
    job = {"LSB_JOBID": "7", "LSB_MCPU_HOSTS": "hosta 1 hostb 7", "PATH": str(tmp_path)}
    with pytest.raises(MusterError) as refusal:
        detect(Environment(job, "hosta", is_live=True))
    assert refusal.value.fix.startswith(f"{program} ")
    assert ("-z 'hosta hostb' " in refusal.value.fix) == (program == "blaunch")


def test_a_job_of_pbs_is_read_where_the_working_directory_was_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with pytest.raises(MusterError, match="nothing started this process"):
        detect(TWO_NODES)


def test_the_line_that_starts_a_task_on_each_host_names_some_where_the_hosts_are_not_known() -> None:
    env = recording.load(FOLDERS / "grid_engine_own" / "ompi.node02.3.env")
    with pytest.raises(MusterError) as refusal:
        resolve.resolve(env, LaunchOptions(nproc_per_node="2"), ["train", "ddp"])
    assert "for host in HOST0 HOST1; do " in refusal.value.fix
    assert " MUSTER_HOSTS=HOST0,HOST1 " in refusal.value.fix
