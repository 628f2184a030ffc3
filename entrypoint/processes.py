"""How many processes an agent starts on its node."""

from dataclasses import dataclass

from entrypoint import resources
from entrypoint.allocation import Hosts
from entrypoint.environment import Environment
from entrypoint.options import LaunchOptions
from train.errors import MusterError


@dataclass(frozen=True)
class Nproc:
    """A number of processes.

    Attributes:
        count: the number, from 1.
        source: what says so.
    """

    count: int
    source: str


def per_node(env: Environment, options: LaunchOptions, job: Hosts | None) -> Nproc:
    """How many processes this node's agent starts: as the user says, else one for each GPU.

    Raises:
        MusterError: what the user said is no number, or asks for GPUs where there are none.
    """
    given, name = options.nproc_per_node, "--nproc-per-node"
    if given is None and job and job.scheduler == "kubernetes" and env.get("PET_NPROC_PER_NODE"):
        # What the job's author wrote as nprocPerNode.
        given, name = env["PET_NPROC_PER_NODE"], "PET_NPROC_PER_NODE"
    gpus, source = resources.gpus(env, job.gpus_on_node if job else None)
    if given is not None and given.isascii() and given.isdigit() and int(given) >= 1:
        return Nproc(int(given), f"{name}={given}")
    if given == "cpu":
        cores = resources.cores(env, job.cpus_on_node if job else None)
        return Nproc(cores or resources.NPROC_WITHOUT_GPU, f"{name}=cpu")
    if given == "gpu" and not gpus:
        raise MusterError(f"{name}=gpu, but there is no GPU", seen=source, fix="--nproc-per-node 2")
    if given not in (None, "gpu", "auto"):
        raise MusterError(
            f"{name} is a number from 1, or gpu, cpu, auto", seen=f"{name}={given}", fix="--nproc-per-node 2"
        )
    if gpus:
        return Nproc(gpus, source)
    return Nproc(resources.NPROC_WITHOUT_GPU, f"no GPU ({source})")
