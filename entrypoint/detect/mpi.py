"""The launchers of MPI: which process of Open MPI's mpirun, of Hydra's mpiexec or of mpirun_rsh this one is.

Open MPI. OMPI_COMM_WORLD_NODE_RANK is no node rank: it counts the processes on this node over all of mpirun's jobs.
Inside Slurm the processes carry the SLURM_ variables of the daemon that started them: not theirs.

    OMPI_COMM_WORLD_RANK=3 OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_LOCAL_RANK=1 OMPI_COMM_WORLD_LOCAL_SIZE=2

Hydra, of MPICH and of Intel MPI. PMI_RANK and PMI_SIZE alone are not Hydra's: srun --mpi=pmi2, Flux and PALS set them
too. On the other nodes Hydra's processes see the first node's environment, the scheduler's variables included.

    PMI_RANK=3 PMI_SIZE=4 MPI_LOCALRANKID=1 MPI_LOCALNRANKS=2

MVAPICH2's mpirun_rsh; under Hydra MVAPICH looks like MPICH.

    MV2_COMM_WORLD_RANK=3 MV2_COMM_WORLD_SIZE=4 MV2_COMM_WORLD_LOCAL_RANK=1 MV2_COMM_WORLD_LOCAL_SIZE=2

Source: https://docs.open-mpi.org/en/v5.0.x/tuning-apps/environment-var.html
Source: https://docs.openpmix.org/en/latest/ (PMIX_RANK and PMIX_NAMESPACE, which every process of mpirun has)
Source: https://github.com/pmodels/mpich/blob/main/doc/wiki/how_to/Using_the_Hydra_Process_Manager.md
Source: https://www.intel.com/content/www/us/en/docs/mpi-library/developer-reference-linux/current/environment-variable-reference.html
Source: https://mvapich.cse.ohio-state.edu/static/media/mvapich/mvapich2-userguide.html
"""

import operator
import re

from muster.entrypoint import hostlist, variables
from muster.entrypoint.allocation import Hosts, Rejected, Task
from muster.entrypoint.detect import placing
from muster.entrypoint.detect.lsf import JSRUN_NAMES
from muster.entrypoint.environment import Environment
from muster.errors import MusterError
from muster.units import whole_number

OPENMPI_NAMES = placing.Names(
    "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"
)
FIX_OPENMPI = "start the command by mpirun itself, from a shell without another run's OMPI_ and PMIX_ variables"


def openmpi_task(env: Environment, job: Hosts | None) -> Task | Rejected | None:
    """The process of mpirun that this one is, or None where mpirun started nothing.

    Raises:
        MusterError: its variables are incomplete or contradict each other.
    """
    if not any(name in env for name in OPENMPI_NAMES):
        return None
    # jsrun sets Open MPI's names too, for IBM's Spectrum MPI, with the same values as its own.
    pairs = zip(JSRUN_NAMES, OPENMPI_NAMES, strict=True)
    if JSRUN_NAMES.rank in env and all(env.get(jsm) == env[name] for jsm, name in pairs if name in env):
        if job is None or job.scheduler == "lsf":
            return None
        return Rejected(f"{variables.seen(env, JSRUN_NAMES.rank)} says the same: jsrun set them, in a job of LSF")
    host = env.get("PMIX_HOSTNAME")
    if host and env.host and hostlist.short(host) != hostlist.short(env.host):
        return Rejected(f"PMIX_HOSTNAME={host}, but this host is {env.host}")
    _cross_check(env)
    _check_daemon(env)
    return placing.by_rank("openmpi", OPENMPI_NAMES, env, job, FIX_OPENMPI, env.get("PMIX_NAMESPACE"))


def _check_daemon(env: Environment) -> None:
    """Returns if nothing shows that another task of Slurm than this one started the daemon."""
    # Where srun started the daemon, the daemon is Slurm's task, and its PID is in the names of its folders:
    # OMPI_FILE_LOCATION=/tmp/ompi.node01.0/jf.1134/0/1 (pid.33 in place of jf.1134 is mpirun itself, no daemon)
    # PMIX_DSTORE_21_BASE_PATH=/tmp/ompi.node01.0/jf.1134/pmix_dstor_ds21_582
    match = re.search(r"/jf\.[0-9]+/pmix_dstor_ds21_([0-9]+)$", env.get("PMIX_DSTORE_21_BASE_PATH", ""))
    if match and "SLURM_STEP_ID" in env and env.get("SLURM_TASK_PID", match[1]) != match[1]:
        raise MusterError(
            "the variables of Open MPI are left over from another job: this task of Slurm did not start its daemon",
            seen=variables.seen(env, "PMIX_DSTORE_21_BASE_PATH", "SLURM_TASK_PID"),
            fix="submit from a shell outside of mpirun, or unset the OMPI_ and PMIX_ variables",
        )


def _cross_check(env: Environment) -> None:
    """Returns if the values that mpirun repeats elsewhere are the same there."""
    ranks = placing.read(OPENMPI_NAMES, env, FIX_OPENMPI)
    if "PMIX_RANK" not in env or "PMIX_NAMESPACE" not in env:
        raise MusterError(
            "Open MPI's variables are here without PMIX_RANK and PMIX_NAMESPACE, by which its processes find it",
            seen=variables.seen(env, *OPENMPI_NAMES),
            fix=f"unset {' '.join(OPENMPI_NAMES)} if they are left over from another job; else {FIX_OPENMPI}",
        )
    repeated = (
        ("PMIX_RANK", operator.eq, ranks.rank),
        ("OMPI_COMM_WORLD_NODE_RANK", operator.ge, ranks.local_rank),
        ("OMPI_MCA_orte_ess_num_procs", operator.eq, ranks.size),
        ("OMPI_MCA_orte_num_nodes", operator.ge, ranks.num_nodes),
    )
    # Each check only where the variable is a number: other versions leave some of them out.
    numbers = {name: whole_number(env[name]) for name, _, _ in repeated if env.get(name, "").isdecimal()}
    # One that is too large to be read fits nothing.
    fitting = {name for name, fits, own in repeated if (n := numbers.get(name)) is not None and fits(n, own)}
    wrong = sorted(numbers.keys() - fitting)
    if wrong:
        raise MusterError(
            "Open MPI's variables contradict each other, or the nodes have different numbers of processes",
            seen=variables.seen(env, *OPENMPI_NAMES, *wrong),
            fix=FIX_OPENMPI,
        )


HYDRA_NAMES = placing.Names("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
FIX_HYDRA = "start the command by mpiexec itself, from a shell without another run's PMI_ and MPI_ variables"

# Launchers that set PMI_RANK and PMI_SIZE for their own tasks: their variables of the same meaning.
_OWNERS = (
    ("srun", "SLURM_STEP_ID", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
    ("flux", "FLUX_TASK_RANK", "FLUX_TASK_RANK", "FLUX_JOB_SIZE"),
)


def hydra_task(env: Environment, job: Hosts | None) -> Task | Rejected | None:
    """The process of mpiexec that this one is, or None where mpiexec started nothing.

    Raises:
        MusterError: its variables are incomplete or contradict each other.
    """
    present = [name for name in HYDRA_NAMES if name in env]
    if not present:
        return None
    of_pmi = [name for name in (HYDRA_NAMES.rank, HYDRA_NAMES.size) if name in env]
    for owner, mark, rank, size in _OWNERS:
        if mark in env and all(env[name] == env.get(other) for name, other in zip(of_pmi, (rank, size), strict=False)):
            if owner == "flux":
                return Rejected(f"{variables.seen(env, *of_pmi)} is Flux's own", is_certain=True)
            if len(present) == len(of_pmi):
                return None
    if not of_pmi and "FLUX_URI" in env:
        # The rest of what Hydra gave a broker of Flux, which takes these two for itself and away from its shells.
        reason = f"{variables.seen(env, *present)} without PMI_RANK: Hydra started Flux, which started this process"
        return Rejected(reason, is_certain=True)
    if "PALS_APID" in env and env.get("PALS_RANKID") == env.get("PMI_RANK"):
        return None
    if len(present) == len(of_pmi):
        raise MusterError(
            "PMI_RANK or PMI_SIZE is here without its companions: no launcher set it for this process",
            seen=variables.seen(env, *present),
            fix=f"unset {' '.join(present)} if it is left over from another job; else {FIX_HYDRA}",
        )
    host = env.get("MPIR_CVAR_CH3_INTERFACE_HOSTNAME")
    if host and env.host and hostlist.is_name(host) and hostlist.short(host) != hostlist.short(env.host):
        return Rejected(f"MPIR_CVAR_CH3_INTERFACE_HOSTNAME={host}, but this host is {env.host}")
    return placing.by_rank("hydra", HYDRA_NAMES, env, job, FIX_HYDRA)


MVAPICH_NAMES = placing.Names(
    "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE"
)
FIX_MVAPICH = "start the command by mpirun_rsh itself, from a shell without another run's MV2_ variables"


def mvapich_task(env: Environment, job: Hosts | None) -> Task | Rejected | None:
    """The process of mpirun_rsh that this one is, or None where it started nothing.

    Raises:
        MusterError: its variables are incomplete or contradict each other.
    """
    # The local size alone is set by users too, as a hint to the library.
    if not any(name in env for name in (MVAPICH_NAMES.rank, MVAPICH_NAMES.size, MVAPICH_NAMES.local_rank)):
        return None
    return placing.by_rank("mvapich", MVAPICH_NAMES, env, job, FIX_MVAPICH)
