"""This node's GPUs and cores that the job may use, and the note for a job that has none of the GPUs."""

from dataclasses import replace
from pathlib import Path

import pytest

from muster.entrypoint import recording, resources
from muster.entrypoint.detect import families
from muster.entrypoint.environment import Environment
from muster.entrypoint.launch import start
from muster.entrypoint.launch.program import Program
from muster.entrypoint.options import LaunchOptions
from tests.entrypoint.recorded import FOLDERS

SLURM = recording.load(FOLDERS / "slurm_own" / "het_srun_default.node01.0.env")
PBS = recording.load(FOLDERS / "pbs" / "pbs_batch_1node.env")


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty folder in place of /dev, on a machine without a GPU driver."""
    monkeypatch.setattr(resources, "DEVICES", tmp_path)
    monkeypatch.setattr(resources, "GPUS_OF_DRIVER", tmp_path / "gpus")
    return tmp_path


def notes(env: Environment, options: LaunchOptions | None = None, typed: str = "train ddp") -> str:
    # As a live process; `pbs` leaves out the variable that names a file of the recorded machine.
    here = replace(env, is_live=True)
    options = options or LaunchOptions(master_addr="127.0.0.1", nnodes="1")
    return "\n".join(start.find(here, options, typed.split()).of_site.notes)


def pbs(**changes: str) -> Environment:
    without = {name: value for name, value in PBS.items() if name != "PBS_NODEFILE"}
    return Environment({**without, "MUSTER_HOSTS": "pbsn1", **changes}, "pbsn1")


@pytest.mark.parametrize("hidden", [{"CUDA_VISIBLE_DEVICES": ""}, {"CUDA_VISIBLE_DEVICES": "-1"}])
def test_a_job_without_gpus_on_a_node_that_has_them_is_told(devices: Path, hidden: dict[str, str]) -> None:
    for name in ("nvidia0", "nvidia1", "nvidiactl"):
        (devices / name).touch()
    assert "ngpus=2" in notes(pbs(**hidden))
    assert "this machine has 2 GPUs, and pbs gave this job none" in notes(pbs(**hidden))
    for typed in ("train ddp --device=cpu", "train ddp --device cpu"):
        assert "GPU" not in notes(pbs(**hidden), typed=typed)
    assert "GPU" not in notes(pbs(**hidden), LaunchOptions(nproc_per_node="cpu", nnodes="1"))
    (devices / "nvidia1").unlink()
    assert "this machine has 1 GPU, and" in notes(pbs(**hidden))
    # No note without a scheduler, or where the job has some of the GPUs.
    assert "GPU" not in notes(Environment(hidden, "laptop"))
    assert "GPU" not in notes(pbs(CUDA_VISIBLE_DEVICES="0"))


@pytest.mark.parametrize(("visible", "count"), [("10000", 0), ("0,10000", 1), ("0,12", 2), ("GPU-6a96bd13", 1)])
def test_the_number_by_which_htcondor_hides_gpus_is_none(visible: str, count: int) -> None:
    assert resources.gpus(Environment({"CUDA_VISIBLE_DEVICES": visible}, "c1"), None)[0] == count


@pytest.mark.parametrize(
    "visible",
    [
        "MIG-c7384736-a75d-5afc-978f-d2f1294409fd,MIG-a28ad590-3fda-56dd-84fc-0a0b96edc58d",
        "MIG-GPU-8a56a4bc/3/0,MIG-GPU-8a56a4bc/4/0",
    ],
)
def test_of_several_parts_of_gpus_a_process_takes_the_first(visible: str) -> None:
    """CUDA and torch show a process only the first (https://github.com/pytorch/pytorch/pull/92315): two ranks would
    share it, and are refused."""
    assert resources.gpus(Environment({"CUDA_VISIBLE_DEVICES": visible}, "c1"), None)[0] == 1


def test_a_job_of_grid_engine_takes_the_gpus_that_were_granted(devices: Path) -> None:
    """Grid Engine names the job's GPUs, and hides those of other jobs only if the site has configured it to."""
    script = recording.load(FOLDERS / "grid_engine_own" / "serial_gpu_script.node01.x.env")

    def visible(**variables: str) -> str | None:
        env = Environment({**script, **variables}, script.host, script.files, is_live=True)
        context = start.find(env, LaunchOptions(), ["train", "ddp"])
        launch = start.plan(context, Program("script", ("mine.py",)), ["train", "ddp"])
        return launch.additions.variables.get("CUDA_VISIBLE_DEVICES")

    for number in "0123":
        (devices / f"nvidia{number}").touch()
    assert visible(SGE_HGR_gpu="2 3") == "2,3"
    # As the man page sge_complex.5 of Open Cluster Scheduler names them.
    assert visible(SGE_HGR_GPU="gpu2 gpu3") == "2,3"
    assert visible(SGE_HGR_gpu="2 3", CUDA_VISIBLE_DEVICES="1") is None
    # Nothing is set for all GPUs of the node, for ids that are names, and for no GPU.
    assert visible(SGE_HGR_gpu="0 1 2 3") is None
    assert visible(SGE_HGR_gpu="a b") is None
    assert visible() is None
    # Where control groups deny access to the other devices, CUDA counts the job's from 0.
    (devices / "nvidia0").unlink()
    (devices / "nvidia1").unlink()
    assert visible(SGE_HGR_gpu="2 3") is None
    assert visible(SGE_HGR_NVIDIA_GPUS="GPU-6a96bd13 GPU-0c71") == "GPU-6a96bd13,GPU-0c71"


def test_a_job_on_a_cluster_without_gpus_is_told_nothing(devices: Path) -> None:
    assert "GPU" not in notes(pbs())
    assert "GPU" not in notes(pbs(CUDA_VISIBLE_DEVICES=""))


def test_devices_that_a_job_may_not_open_are_not_its_own(devices: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a Slurm job that asked for no GPU, where control groups deny access to the devices."""
    for name in ("nvidia0", "nvidia1"):
        (devices / name).touch()
    env = Environment({}, "node01", is_live=True)
    assert resources.gpus(env, None)[0] == 2
    assert "GPU" not in notes(pbs())

    def refused(*_: object) -> int:
        raise PermissionError

    # Patched only here, as pytest opens folders too when it removes them.
    with monkeypatch.context() as patched:
        patched.setattr(resources.os, "open", refused)
        assert resources.gpus(env, None)[0] == 0
        assert "ngpus=2" in notes(pbs())


def test_a_job_without_gpus_at_a_site_whose_nodes_have_them_is_told(devices: Path) -> None:
    here = start.find(SLURM, LaunchOptions(site="juwels-booster"), ["train", "ddp"])
    assert "sbatch --gpus-per-node=4" in "\n".join(here.of_site.notes)


OF_SLURM = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node01", "SLURM_JOB_NUM_NODES": "1", "SLURM_CPUS_ON_NODE": "4"}
OF_LSF = {"LSB_JOBID": "7", "LSB_MCPU_HOSTS": "node01 4 node02 8", "LSB_HOSTS": ""}
OF_GRID_ENGINE = {"JOB_ID": "7", "SGE_TASK_ID": "undefined", "PE_HOSTFILE": "file"}


@pytest.mark.parametrize(
    ("variables", "hostfile", "num_cores"),
    [
        (OF_SLURM, "", 4),
        (OF_LSF, "", 4),
        (OF_GRID_ENGINE, "node01.cluster 3 all.q UNDEFINED\nnode01.cluster 1 fast.q UNDEFINED\n", 4),
        ({**OF_LSF, "LSB_MCPU_HOSTS": "node01 1 node02 1"}, "", 64),  # a slot may stand for a node
        (OF_GRID_ENGINE, "node01 1 all.q UNDEFINED\nnode02 1 all.q UNDEFINED\n", 64),
        ({}, "", 64),
    ],
)
def test_where_nothing_binds_a_job_its_cores_are_those_that_the_scheduler_gave_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, variables: dict[str, str], hostfile: str, num_cores: int
) -> None:
    (tmp_path / "hosts").write_text(hostfile)
    files = {"PE_HOSTFILE": str(tmp_path / "hosts")} if hostfile else {}
    env = Environment({**variables, **files}, "node01", is_live=True)
    job, _ = families.find_job(env)
    monkeypatch.setattr("psutil.cpu_count", lambda: 64)
    monkeypatch.setattr("muster.control_groups.usable", lambda number: number)
    for bound, wanted in ((64, num_cores), (16, 16)):
        monkeypatch.setattr("os.sched_getaffinity", lambda pid, bound=bound: set(range(bound)))
        assert resources.cores(env, job) == wanted
