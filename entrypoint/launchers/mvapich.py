"""MVAPICH2's mpirun_rsh: which of its processes this one is. Under Hydra MVAPICH looks like MPICH.

    MV2_COMM_WORLD_RANK=3 MV2_COMM_WORLD_SIZE=4 MV2_COMM_WORLD_LOCAL_RANK=1 MV2_COMM_WORLD_LOCAL_SIZE=2

Source: https://mvapich.cse.ohio-state.edu/static/media/mvapich/mvapich2-userguide.html
"""

from entrypoint.allocation import Hosts, Rejected, Task
from entrypoint.environment import Environment
from entrypoint.launchers import by_rank

NAMES = by_rank.Names(
    "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE"
)
FIX = "start the command by mpirun_rsh itself, from a shell without another run's MV2_ variables"


def detect(env: Environment, job: Hosts | None) -> Task | Rejected | None:
    """The process of mpirun_rsh that this one is, or None where it started nothing.

    Raises:
        MusterError: its variables are incomplete or contradict each other.
    """
    # The local size alone is set by users too, as a hint to the library.
    if not any(name in env for name in (NAMES.rank, NAMES.size, NAMES.local_rank)):
        return None
    return by_rank.place("mvapich", NAMES, env, job, FIX)
