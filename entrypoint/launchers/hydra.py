"""Hydra, the mpiexec of MPICH and of Intel MPI: which of its processes this one is.

    PMI_RANK=3 PMI_SIZE=4 MPI_LOCALRANKID=1 MPI_LOCALNRANKS=2

PMI_RANK and PMI_SIZE alone are not Hydra's: srun --mpi=pmi2, Flux and PALS set them too. On the other nodes Hydra's
processes see the first node's environment, the scheduler's variables included.

Source: https://github.com/pmodels/mpich/blob/main/doc/wiki/how_to/Using_the_Hydra_Process_Manager.md
Source: https://www.intel.com/content/www/us/en/docs/mpi-library/developer-reference-linux/current/environment-variable-reference.html
"""

from entrypoint import hostlist, variables
from entrypoint.allocation import Hosts, Rejected, Task
from entrypoint.environment import Environment
from entrypoint.launchers import by_rank
from train.errors import MusterError

NAMES = by_rank.Names("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
FIX = "start the command by mpiexec itself, from a shell without another run's PMI_ and MPI_ variables"

# Launchers that set PMI_RANK and PMI_SIZE for their own tasks: their variables of the same meaning.
_OWNERS = (
    ("srun", "SLURM_STEP_ID", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
    ("flux", "FLUX_TASK_RANK", "FLUX_TASK_RANK", "FLUX_JOB_SIZE"),
)


def detect(env: Environment, job: Hosts | None) -> Task | Rejected | None:
    """The process of mpiexec that this one is, or None where mpiexec started nothing.

    Raises:
        MusterError: its variables are incomplete or contradict each other.
    """
    present = [name for name in NAMES if name in env]
    if not present:
        return None
    of_pmi = [name for name in (NAMES.rank, NAMES.size) if name in env]
    for owner, mark, rank, size in _OWNERS:
        if mark in env and all(env[name] == env.get(other) for name, other in zip(of_pmi, (rank, size), strict=False)):
            if owner == "flux":
                return Rejected(f"{variables.seen(env, *of_pmi)} is Flux's own", is_certain=True)
            if len(present) == len(of_pmi):
                return None
    if "PALS_APID" in env and env.get("PALS_RANKID") == env.get("PMI_RANK"):
        return None
    if len(present) == len(of_pmi):
        raise MusterError(
            "PMI_RANK or PMI_SIZE is here without its companions: no launcher set it for this process",
            seen=variables.seen(env, *present),
            fix=f"unset {' '.join(present)} if it is left over from another job; else {FIX}",
        )
    host = env.get("MPIR_CVAR_CH3_INTERFACE_HOSTNAME")
    if host and env.host and hostlist.is_name(host) and hostlist.short(host) != hostlist.short(env.host):
        return Rejected(f"MPIR_CVAR_CH3_INTERFACE_HOSTNAME={host}, but this host is {env.host}")
    return by_rank.place("hydra", NAMES, env, job, FIX)
