"""GPUs and cores of this node, as far as this process may use them, and how many processes an agent starts for them.

No driver and no torch is loaded.
"""

import os
import re
from collections.abc import Sequence
from pathlib import Path

import psutil

from muster import control_groups
from muster.devices import visible_gpus
from muster.entrypoint.detect.allocation import Allocation, Job
from muster.entrypoint.detect.hostlist import whole_number
from muster.entrypoint.environment import Environment
from muster.entrypoint.options import LaunchOptions
from muster.errors import MusterError
from muster.units import plural

# Without a GPU two processes: the fewest that make a training distributed.
NPROC_WITHOUT_GPU = 2

DEVICES = Path("/dev")
# It lists the GPUs in a container too, and where a scheduler does not let the job open them.
GPUS_OF_DRIVER = Path("/proc/driver/nvidia/gpus")

_ASK_ENGINE = {"docker": "docker run --gpus all", "podman": "podman run --device nvidia.com/gpu=all"}
"""How GPUs are asked for, by container engine."""


def gpus(env: Environment, gpus_on_node: int | None) -> tuple[int, str]:
    """The number of GPUs that this process sees, and its source.

    Args:
        env: the process's environment.
        gpus_on_node: the scheduler's number, used without CUDA_VISIBLE_DEVICES; None where it is unknown.
    """
    if (visible := env.get("CUDA_VISIBLE_DEVICES")) is not None:
        return len(visible_gpus(visible)), f"CUDA_VISIBLE_DEVICES={visible}"
    if gpus_on_node is not None:
        return gpus_on_node, "the scheduler's GPUs on this node"
    if env.is_live:
        return len([node for node in device_nodes() if _may_open(node)]), "/dev/nvidia*"
    return 0, "no CUDA_VISIBLE_DEVICES"


def granted_gpus(env: Environment, job: Job) -> dict[str, str]:
    """CUDA_VISIBLE_DEVICES, where the scheduler only names the job's GPUs, and the job may open those of others too."""
    if "CUDA_VISIBLE_DEVICES" in env or not env.is_live or not job.gpu_ids:
        return {}
    openable = {node.name.removeprefix("nvidia") for node in device_nodes() if _may_open(node)}
    # Where only the granted devices can be opened, CUDA counts them from 0. A UUID is the same in both cases.
    is_known = openable > set(job.gpu_ids) or all(name.startswith(("GPU-", "MIG-")) for name in job.gpu_ids)
    return {"CUDA_VISIBLE_DEVICES": ",".join(job.gpu_ids)} if is_known else {}


def without_gpus(
    env: Environment, allocation: Allocation, options: LaunchOptions, words: Sequence[str], gpus_of_site: int
) -> str | None:
    """A note on a launch that has no GPU although there are some, and on how to ask for them; else None.

    There is none on a machine without a scheduler whose user hides its GPUs, nor on a cluster without GPUs.

    Args:
        words: the command, in which `--device=cpu` says that none is wanted.
        gpus_of_site: the number of GPUs on a node of the site, by its profile; 0 without one.
    """
    is_job = allocation.scheduler not in ("local", "manual")
    giver = allocation.scheduler if is_job else env.engine
    ask = allocation.job.gpu_request if is_job else _ASK_ENGINE.get(env.engine or "")
    on_cpu = options.nproc_per_node == "cpu" or "--device=cpu" in words or "--device cpu" in " ".join(words)
    if allocation.gpus_seen or on_cpu or not ask:
        return None
    here = max(len(device_nodes()), len(list(GPUS_OF_DRIVER.glob("*")))) if env.is_live else 0
    number = here or (gpus_of_site if is_job else 0)
    if not number:
        return None
    has = ("this machine has " if here else "this site's nodes have ") + plural(number, "GPU")
    whom = "job" if is_job else "container"
    ask = ask.format(gpus=number)
    return f"{has}, and {giver} gave this {whom} none: it runs on the CPUs. To ask for GPUs: {ask}"


def device_nodes() -> list[Path]:
    """The device file of each GPU that is in this container or machine."""
    return [node for node in DEVICES.glob("nvidia*") if re.fullmatch(r"nvidia[0-9]+", node.name)]


def _may_open(node: Path) -> bool:
    """Whether this job may use the device: Slurm and PBS leave other jobs' in /dev, but control groups deny access."""
    try:
        os.close(os.open(node, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK))
    except PermissionError:
        return False
    except OSError:
        pass  # the driver will say what is wrong with it
    return True


def cores(env: Environment, job: Job) -> int | None:
    """The number of cores that this process may use; in a recorded environment, the scheduler's number or None."""
    if not env.is_live:
        return job.cpus_on_node
    own, here = len(os.sched_getaffinity(0)), psutil.cpu_count() or 1
    # Where a scheduler binds no process, the other cores belong to other jobs. PBS's number may be that of a part of
    # the job; it gives the number of threads by OMP_NUM_THREADS.
    if own >= here and job.cpus_on_node and job.default_threads is None:
        own = min(own, job.cpus_on_node)
    return control_groups.usable(own)


def threads_per_rank(num_cores: int, cpus_on_node: int | None, ranks_on_node: int, tasks_on_node: int) -> int:
    """OMP_NUM_THREADS for each rank, so that the ranks of a node share its cores without crowding.

    Args:
        num_cores: the cores that this process may run on.
        cpus_on_node: the cores that the job has on this node; None where unknown.
        tasks_on_node: processes that the launcher started on it.
    """
    # A launcher that bound each task to cores of its own already divided them: fewer than the job has here.
    bound = tasks_on_node > 1 and cpus_on_node is not None and num_cores < cpus_on_node
    return max(1, num_cores if bound else num_cores // ranks_on_node)


def processes_per_node(env: Environment, options: LaunchOptions, job: Job) -> tuple[int, str]:
    """The number of processes that this node's agent starts: the user's, else one for each GPU; and its source.

    Raises:
        MusterError: the user's value is no number, or asks for GPUs where there are none.
    """
    given, name = options.nproc_per_node, options.nproc_name
    if given is None and job.scheduler == "kubernetes" and env.get("PET_NPROC_PER_NODE"):
        # What the job's author wrote as nprocPerNode.
        given, name = env["PET_NPROC_PER_NODE"], "PET_NPROC_PER_NODE"
    num_gpus, source = gpus(env, job.gpus_on_node)
    if number := whole_number(given or ""):
        return number, f"{name}={given}"
    if given == "cpu":
        return cores(env, job) or NPROC_WITHOUT_GPU, f"{name}=cpu"
    if given == "gpu" and not num_gpus:
        raise MusterError(f"{name}=gpu, but there is no GPU", seen=source, fix="--nproc-per-node 2")
    if given not in (None, "gpu", "auto"):
        wrong = f"{name} is a number from 1, or gpu, cpu, auto"
        raise MusterError(wrong, seen=f"{name}={given}", fix="--nproc-per-node 2")
    return (num_gpus, source) if num_gpus else (NPROC_WITHOUT_GPU, f"no GPU ({source})")
