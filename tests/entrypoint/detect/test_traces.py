"""The container that a process is in, and a job's traces there: no process of a job may silently train alone."""

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from muster.entrypoint import recording
from muster.entrypoint.detect import resolve, traces
from muster.entrypoint.detect.reader import Reader
from muster.entrypoint.detect.traces import Trace
from muster.entrypoint.environment import UNKNOWN, Environment, container_engine
from muster.entrypoint.options import LaunchOptions
from muster.errors import MusterError
from tests.entrypoint import recorded
from tests.entrypoint.conftest import COMMANDS, clean_environment
from tests.entrypoint.test_cli import three_lines

# /proc/self/mountinfo of a process in Apptainer 1.4.5, with a file of PBS bound into it.
MOUNTS = """\
1210 1150 0:52 / / ro,relatime - overlay overlay ro,lowerdir=/x
1213 1210 0:6 / /dev rw,relatime - devtmpfs devtmpfs rw,size=12334492k,mode=755
1230 1210 254:0 /root /root rw,relatime - ext4 /dev/vda rw
1231 1210 254:0 /tmp /tmp rw,relatime - ext4 /dev/vda rw
1240 1210 254:0 /etc/passwd /etc/passwd rw,relatime - tmpfs tmpfs rw
"""
NODE_FILE = "1241 1210 254:0 /var/spool/pbs/aux/7.pbshead /var/spool/pbs/aux/7.pbshead ro - ext4 /dev/vda rw\n"
# /proc/self/cgroup in a container of Docker on a laptop, and that of a login session.
DOCKER = "0::/system.slice/docker-0123456789abcdef.scope\n"
SESSION = "0::/user.slice/user-1000.slice/session-3.scope\n"


@pytest.mark.parametrize(
    ("cgroup", "owner"),
    [
        ("0::/system.slice/slurmstepd.scope/job_9/step_0/user/task_0\n", "slurm"),
        ("0::/system.slice/node1_slurmstepd.scope/job_9/step_batch/user/task_special\n", "slurm"),
        ("0::/system.slice/slurmstepd.scope/sEKNKTV3WPV500/step_0/user/task_0\n", "slurm"),
        ("9:name=systemd:/\n4:memory:/slurm/uid_0/job_5/step_0\n0::/\n", "slurm"),
        ("4:memory:/slurm_node1/uid_1000/job_5/step_batch/task_0\n", "slurm"),
        ("5:devices:/pbs_jobs.service/jobid/7.pbshead\n", "pbs"),
        ("0::/pbs_jobs.service/jobs/12[3].pbshead\n", "pbs"),
        ("4:memory:/pbspro.slice/pbspro-7.pbshead.slice\n", "pbs"),
        ("0::/system.slice/flux.service\n", "flux"),
        ("5:cpuset:/lsf/euler/job.4711.2231.1700000000\n", "lsf"),
        ("0::/ocs8012.slice/ocs8012-jobs.slice/ocs8012.21.scope\n", "grid_engine"),
        ("0::/ocs8012.slice/ocs8012-jobs.slice/ocs8012-jobs-7.slice/ocs8012.7-1.node02.scope\n", "grid_engine"),
    ],
)
def test_the_control_group_tells(cgroup: str, owner: str) -> None:
    found = traces.find(cgroup, MOUNTS, ["bash"])
    assert found
    assert found.owner == owner
    assert found.seen.removeprefix("the control group ") in cgroup


@pytest.mark.parametrize(
    "cgroup",
    [
        "",
        "0::/\n",
        DOCKER,
        SESSION,
        "0::/system.slice/slurmd.service\n",
        "0::/ocs8012.slice/ocs8012-execd.service\n",
        "0::/kubepods.slice/pod1/cri-2\n",
    ],
)
def test_a_machine_without_a_job_has_no_trace(cgroup: str) -> None:
    assert traces.find(cgroup, MOUNTS, ["starter", "bash", "sshd", "systemd"]) is None


def test_a_file_that_is_bound_under_another_name_tells() -> None:
    elsewhere = NODE_FILE.replace("/var/spool/pbs/aux/7.pbshead ro", "/nodes ro")
    found = traces.find("", MOUNTS + elsewhere, ["bash"])
    assert found == Trace("pbs", "the mount /var/spool/pbs/aux/7.pbshead")


@pytest.mark.parametrize(
    ("name", "owner"),
    [
        ("slurmstepd", "slurm"),
        ("salloc", "slurm"),
        ("pbs_mom", "pbs"),
        ("sge_shepherd", "grid_engine"),
        ("flux-shell", "flux"),
        ("flux-broker-0", "flux"),
        ("res", "lsf"),
        ("palsd", "pals"),
        ("hydra_pmi_proxy", "mpi"),
        ("prted", "mpi"),
        ("mpirun.openmpi", "mpi"),
        ("mpiexec.hydra", "mpi"),
    ],
)
def test_a_process_above_tells(name: str, owner: str) -> None:
    found = traces.find(SESSION, MOUNTS, ["starter", "bash", name, "systemd"])
    assert found == Trace(owner, f"the process {name} above this one")


@pytest.mark.parametrize(
    ("path", "owner"),
    [
        ("/var/spool/pbs/aux/7.pbshead", "pbs"),
        ("/var/spool/slurmd/job00005/slurm_script", "slurm"),
        ("/var/spool/slurmd/node1/job00005", "slurm"),
        ("/opt/sge/default/spool/node01/active_jobs/2.1/pe_hostfile", "grid_engine"),
        ("/var/run/palsd/3f0e/apinfo", "pals"),
    ],
)
def test_a_mount_of_the_jobs_files_tells(path: str, owner: str) -> None:
    mounts = f"{MOUNTS}1241 1210 254:0 {path} {path} ro,relatime - ext4 /dev/vda rw\n"
    assert traces.find(DOCKER, mounts, []) == Trace(owner, f"the mount {path}")


@pytest.mark.parametrize("path", ["/var/spool/slurmd", "/var/spool/pbs", "/home/u/pbs/aux", "/home/palsdog"])
def test_a_folder_that_login_nodes_bind_too_tells_nothing(path: str) -> None:
    mounts = f"{MOUNTS}1241 1210 254:0 {path} {path} ro,relatime - ext4 /dev/vda rw\n"
    assert traces.find(DOCKER, mounts, []) is None


@pytest.mark.parametrize(
    ("names", "files", "engine"),
    [
        (["APPTAINER_CONTAINER"], [".dockerenv"], "apptainer"),
        (["SINGULARITY_CONTAINER"], [], "apptainer"),
        ([], [".singularity.d"], "apptainer"),
        ([], [".dockerenv"], "docker"),
        ([], ["run/.containerenv"], "podman"),
        (["KUBERNETES_SERVICE_HOST"], [], "kubernetes"),
        (["SLURM_JOB_ID"], [], None),
        ([], ["image.json"], UNKNOWN),
    ],
)
def test_the_engine(tmp_path: Path, names: list[str], files: list[str], engine: str | None) -> None:
    for file in files:
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).touch()
    assert container_engine(dict.fromkeys(names, "x"), tmp_path, project=tmp_path) == engine
    if not names:
        assert container_engine({}, None, project=tmp_path) is None


@pytest.fixture
def leave_traces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Gives this process ancestors, the nearest first, a control group and mounts."""

    def leave(names: list[str], cgroup: str = SESSION, mounts: str = MOUNTS) -> None:
        (tmp_path / "cgroup").write_text(cgroup)
        (tmp_path / "mountinfo").write_text(mounts)
        monkeypatch.setattr(traces, "PROC", tmp_path)
        monkeypatch.setattr(traces, "ancestors", lambda: names)

    return leave


def alone(engine: str | None = "apptainer", nnodes: str | None = None, **more: str) -> str:
    """The launcher that is found for a process without a job's variables in a container of `engine`."""
    env = Environment(more, "node01", is_live=True, engine=engine)
    return resolve.resolve(env, LaunchOptions(nnodes=nnodes), ["train", "ddp"]).launcher


def test_apptainer_with_cleanenv_in_a_job_is_refused(leave_traces: Callable[..., None]) -> None:
    leave_traces(["starter", "slurmstepd", "systemd"])
    with pytest.raises(MusterError) as refusal:
        alone()
    error = refusal.value
    assert error.wrong == "this container is inside a job of slurm, but none of the job's variables reached it"
    assert "the process slurmstepd above this one" in error.seen
    assert error.fix.startswith("leave --cleanenv or --containall out")
    assert "muster env --apptainer-args" in error.fix
    assert error.fix.endswith("or, if it is but one node, --nnodes 1")


def test_with_a_pid_namespace_it_was_containall(leave_traces: Callable[..., None]) -> None:
    cgroup = "0::/system.slice/slurmstepd.scope/job_9/step_0/user/task_0\n"
    leave_traces(["appinit"], cgroup)
    with pytest.raises(MusterError) as refusal:
        alone()
    assert "job_9" in refusal.value.seen
    assert "--containall" in refusal.value.fix


@pytest.mark.parametrize("engine", ["docker", "podman"])
def test_docker_is_told_how_to_pass_them(leave_traces: Callable[..., None], engine: str) -> None:
    leave_traces([], DOCKER, MOUNTS + NODE_FILE)
    with pytest.raises(MusterError, match="a job of pbs") as refusal:
        alone(engine)
    assert f"{engine} run $(muster env --docker-args) IMAGE COMMAND" in refusal.value.fix


def test_what_the_user_says_by_hand_goes_on(leave_traces: Callable[..., None]) -> None:
    leave_traces(["slurmstepd"])
    assert alone(nnodes="1") == "local"
    assert alone(MUSTER_HOSTS="node01") == "manual"
    assert alone(nnodes="2", MUSTER_NODE_RANK="0") == "manual"


@pytest.mark.parametrize(
    ("names", "cgroup"),
    [(["sudo", "slurmstepd"], SESSION), (["bash"], "0::/system.slice/slurmstepd.scope/job_9/step_0/user/task_0\n")],
)
def test_a_process_from_which_sudo_took_the_jobs_variables_is_not_silently_alone(
    leave_traces: Callable[..., None], names: list[str], cgroup: str
) -> None:
    bare = Environment({}, "node01", is_live=True)

    def notes(nnodes: str | None = None) -> str:
        return " ".join(resolve.resolve(bare, LaunchOptions(nnodes=nnodes), ["train", "ddp"]).notes)

    leave_traces(names, cgroup)
    assert "is slurm's" in notes()
    assert notes(nnodes="1") == ""
    # Outside of containers, a mount may belong to any job of the host.
    leave_traces(["bash"], SESSION, MOUNTS + NODE_FILE)
    assert notes() == ""


def test_one_process_that_is_meant_to_be_alone_goes_on(leave_traces: Callable[..., None]) -> None:
    leave_traces(["slurmstepd"])
    env = Environment({}, "node01", is_live=True, engine="docker")
    assert resolve.resolve(env, LaunchOptions(), ["train", "single"], is_single=True).launcher == "local"


def test_a_container_outside_of_any_job_is_a_machine(leave_traces: Callable[..., None]) -> None:
    leave_traces(["starter", "bash", "sshd"], DOCKER)
    assert alone() == "local"


MPIRUN = {
    "OMPI_COMM_WORLD_RANK": "0",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_NODE_RANK": "0",
    "PMIX_RANK": "0",
    "PMIX_NAMESPACE": "prterun-node01-7@1",
}


def test_mpirun_inside_the_container_does_not_hide_the_job_outside(leave_traces: Callable[..., None]) -> None:
    leave_traces(["mpirun"], "0::/system.slice/slurmstepd.scope/job_9/step_0\n")
    with pytest.raises(MusterError, match="a job of slurm"):
        alone(**MPIRUN)


def test_mpirun_beside_its_process_is_no_trace(leave_traces: Callable[..., None]) -> None:
    leave_traces(["mpirun", "bash"])
    assert alone(**MPIRUN) == "openmpi"


def test_the_processes_above_this_one_are_named() -> None:
    parent = Path(f"/proc/{os.getppid()}/comm").read_text().strip()
    assert traces.ancestors()[0] == parent


def test_a_file_that_is_hidden_names_the_option_of_this_container() -> None:
    for engine, option in (
        ("apptainer", "apptainer exec --bind /a/b; or x"),
        ("docker", "docker run --volume /a/b:/a/b:ro; or x"),
        ("podman", "podman run --volume /a/b:/a/b:ro; or x"),
        (None, "in a container: apptainer exec --bind /a/b, docker run --volume /a/b:/a/b:ro; or x"),
    ):
        env = Environment({"PBS_NODEFILE": "/a/b"}, is_live=True, engine=engine)
        with pytest.raises(MusterError) as refusal:
            Reader(env, "x").text_file("PBS_NODEFILE")
        assert refusal.value.fix == option


def test_a_file_that_is_no_list_of_hosts_is_not_read(tmp_path: Path) -> None:
    enormous = tmp_path / "file"
    with enormous.open("wb") as file:
        file.truncate(1 << 40)  # a sparse file
    for path in (enormous, Path("/dev/zero")):
        with pytest.raises(MusterError, match="PBS_NODEFILE"):
            Reader(Environment({"PBS_NODEFILE": str(path)}, is_live=True), "x").text_file("PBS_NODEFILE")


@pytest.mark.parametrize(("engine", "way"), [("docker", "--docker-args"), ("apptainer", "--apptainer-args")])
def test_some_of_the_variables_name_the_option_as_well(engine: str, way: str) -> None:
    task = recording.load(recorded.FOLDERS / "slurm" / "b_srun_N2_1per.node02.1.env")
    less = {name: value for name, value in task.items() if name != "SLURM_STEP_NODELIST"}
    with pytest.raises(MusterError, match="SLURM_STEP_NODELIST is missing") as refusal:
        recorded.detect(replace(task, variables=less, engine=engine))
    assert way in refusal.value.fix
    with pytest.raises(MusterError) as refusal:
        recorded.detect(replace(task, variables=less))
    assert way not in refusal.value.fix


def test_a_process_below_a_scheduler_is_refused_for_real(tmp_path: Path) -> None:
    # In /proc a shell script has its own name: this one stands in for Slurm's program.
    step = tmp_path / "slurmstepd"
    step.write_text('#!/bin/sh\n"$@"\nexit $?\n')
    step.chmod(0o755)
    env = {**clean_environment(), "APPTAINER_CONTAINER": "/image.sif"}

    def train(*words: str) -> subprocess.CompletedProcess[str]:
        argv = [step, sys.executable, COMMANDS / "train", *words]
        return subprocess.run(argv, env=env, capture_output=True, text=True, timeout=240, check=False)

    for words in (["ddp"], ["ddp", "--dry-run"]):
        answer = train(*words)
        assert answer.returncode == 2
        assert "inside a job of slurm" in three_lines(answer.stderr)[0]
    for words in (["ddp", "--dry-run", "--nnodes", "1"], ["single", "--dry-run"]):
        answer = train(*words)
        assert answer.returncode == 0, answer.stderr
