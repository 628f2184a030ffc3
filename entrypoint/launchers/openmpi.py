"""Open MPI's mpirun: which of its processes this one is.

    OMPI_COMM_WORLD_RANK=3 OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_LOCAL_RANK=1 OMPI_COMM_WORLD_LOCAL_SIZE=2

OMPI_COMM_WORLD_NODE_RANK is no node rank: it counts the processes on this node over all of mpirun's jobs. Inside Slurm
the processes carry the SLURM_ variables of the daemon that started them: not theirs.

Source: https://docs.open-mpi.org/en/v5.0.x/tuning-apps/environment-var.html
Source: https://docs.openpmix.org/en/latest/ (PMIX_RANK and PMIX_NAMESPACE, which every process of mpirun has)
"""

import re

from entrypoint import hostlist, variables
from entrypoint.allocation import Hosts, Rejected, Task
from entrypoint.environment import Environment
from entrypoint.launchers import by_rank
from train.errors import MusterError

NAMES = by_rank.Names(
    "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"
)
FIX = "start the command by mpirun itself, from a shell without another run's OMPI_ and PMIX_ variables"


def detect(env: Environment, job: Hosts | None) -> Task | Rejected | None:
    """The process of mpirun that this one is, or None where mpirun started nothing.

    Raises:
        MusterError: its variables are incomplete or contradict each other.
    """
    if not any(name in env for name in NAMES):
        return None
    if "JSM_NAMESPACE_RANK" in env and all(env.get(jsm) == env[name] for jsm, name in _JSM if name in env):
        if job is None or job.scheduler == "lsf":
            return None
        return Rejected(f"{variables.seen(env, 'JSM_NAMESPACE_RANK')} says the same: jsrun set them, in a job of LSF")
    host = env.get("PMIX_HOSTNAME")
    if host and env.host and hostlist.short(host) != hostlist.short(env.host):
        return Rejected(f"PMIX_HOSTNAME={host}, but this host is {env.host}")
    _cross_check(env)
    _check_daemon(env)
    return by_rank.place("openmpi", NAMES, env, job, FIX, env.get("PMIX_NAMESPACE"))


# jsrun sets Open MPI's names too, for IBM's Spectrum MPI, with the same values as its own.
_JSM = (
    ("JSM_NAMESPACE_RANK", "OMPI_COMM_WORLD_RANK"),
    ("JSM_NAMESPACE_SIZE", "OMPI_COMM_WORLD_SIZE"),
    ("JSM_NAMESPACE_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ("JSM_NAMESPACE_LOCAL_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"),
)


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
    ranks = by_rank.read(NAMES, env, FIX)
    if "PMIX_RANK" not in env or "PMIX_NAMESPACE" not in env:
        raise MusterError(
            "Open MPI's variables are here without PMIX_RANK and PMIX_NAMESPACE, by which its processes find it",
            seen=variables.seen(env, *NAMES),
            fix=f"unset {' '.join(NAMES)} if they are left over from another job; else {FIX}",
        )
    # Each check only where the variable is a number: other versions leave some of them out.
    repeated = {name: int(value) for name in _REPEATED if (value := env.get(name, "")).isdecimal()}
    wrong = [
        name
        for name, fits in (
            ("PMIX_RANK", repeated.get("PMIX_RANK", ranks.rank) == ranks.rank),
            (
                "OMPI_COMM_WORLD_NODE_RANK",
                repeated.get("OMPI_COMM_WORLD_NODE_RANK", ranks.local_rank) >= ranks.local_rank,
            ),
            ("OMPI_MCA_orte_ess_num_procs", repeated.get("OMPI_MCA_orte_ess_num_procs", ranks.size) == ranks.size),
            ("OMPI_MCA_orte_num_nodes", repeated.get("OMPI_MCA_orte_num_nodes", ranks.num_nodes) >= ranks.num_nodes),
        )
        if not fits
    ]
    if wrong:
        raise MusterError(
            "Open MPI's variables contradict each other, or the nodes have different numbers of processes",
            seen=variables.seen(env, *NAMES, *wrong),
            fix=FIX,
        )


_REPEATED = ("PMIX_RANK", "OMPI_COMM_WORLD_NODE_RANK", "OMPI_MCA_orte_ess_num_procs", "OMPI_MCA_orte_num_nodes")
