"""Who started this process. A launcher is a function `(env, job) -> Task | Rejected | None`.

`None` means "not mine"; present but broken raises; `Rejected` means that its variables were made for another process.
To add one: the function beside its family's, its line below, a recording with its test.
"""

from collections.abc import Callable
from dataclasses import dataclass

from muster.entrypoint.allocation import Hosts, Rejected, Task
from muster.entrypoint.detect import flux, grid_engine, kubernetes, lsf, manual, mpi, pals, pbs, slurm
from muster.entrypoint.environment import Environment
from muster.errors import MusterError


@dataclass(frozen=True)
class Launcher:
    """A launcher.

    Attributes:
        name: as users say it.
        detect: which of its processes an environment belongs to.
        scheduler: the one it belongs to; None where it works under any.
    """

    name: str
    detect: Callable[[Environment, Hosts | None], Task | Rejected | None]
    scheduler: str | None = None


# The innermost launcher comes first: it is the one that knows this process. Those after it may have started its daemon,
# and their variables then describe that: mpirun starts its daemons by srun, pbs_tmrsh, blaunch or qrsh, and Flux is
# started by any of them. Hydra comes before srun for the same reason; that srun sets PMI_RANK too, mpi.py knows.
DETECTORS: tuple[Launcher, ...] = (
    Launcher("pals", pals.task),
    Launcher("flux", flux.task, "flux"),
    Launcher("openmpi", mpi.openmpi_task),
    Launcher("jsrun", lsf.jsrun_task, "lsf"),
    Launcher("hydra", mpi.hydra_task),
    Launcher("mvapich", mpi.mvapich_task),
    Launcher("srun", slurm.task, "slurm"),
    Launcher("blaunch", lsf.blaunch_task, "lsf"),
    Launcher("pbsdsh", pbs.task, "pbs"),
    Launcher("qrsh", grid_engine.task, "grid_engine"),
    # A pod is a machine: what was started inside it knows more.
    Launcher("kubernetes", kubernetes.task, "kubernetes"),
    Launcher("manual", manual.task),
)


def detect(env: Environment, job: Hosts | None) -> tuple[Task | None, tuple[str, ...]]:
    """Which task of which launcher this process is, or None where nothing started it as one of several; and the losers.

    Raises:
        MusterError: a launcher's variables are there, but broken; or two launchers disagree and neither can have
            started the other.
    """
    winner: Task | None = None
    losers: list[tuple[str, Rejected]] = []
    for launcher in DETECTORS:
        if winner is None and (job is None or launcher.scheduler in (None, job.scheduler)):
            found = launcher.detect(env, job)
            winner = found if isinstance(found, Task) else None
        else:
            found = _loser(launcher, env, job)
            if isinstance(found, Task):
                found = _beside(winner, found) if winner else None
            if isinstance(found, MusterError):
                found = Rejected(found.wrong, is_certain=True)
        if isinstance(found, Rejected):
            losers.append((launcher.name, found))
    _check_losers(losers, winner)
    return winner, tuple(f"{name}: {found.reason}" for name, found in losers)


def _loser(launcher: Launcher, env: Environment, job: Hosts | None) -> Task | Rejected | MusterError | None:
    """What a launcher says that comes after the one that was found, or that another scheduler's job can't have."""
    foreign = job is not None and launcher.scheduler not in (None, job.scheduler)
    try:
        found = launcher.detect(env, None if foreign else job)
    except MusterError as error:
        found = error
    if foreign and isinstance(found, (Task, MusterError)):
        return Rejected(
            f"belongs to {launcher.scheduler}, and this is a job of {job.scheduler if job else 'none'}", True
        )
    return found


def _beside(winner: Task, outer: Task) -> Rejected | None:
    """Why `outer` is not this process's launcher, though its variables are whole.

    Raises:
        MusterError: it started several tasks on this node, so it can't have started the winner's daemon here.
    """
    place = (outer.node_rank, outer.local_rank, outer.rank, outer.tasks_per_node)
    if place == (winner.node_rank, winner.local_rank, winner.rank, winner.tasks_per_node):
        return Rejected("it says the same", is_certain=True)
    if max(outer.tasks_per_node) == 1:
        reason = f"{outer.sources['launcher']} is that of the daemon that started this process"
        return Rejected(reason, is_certain=True)
    raise MusterError(
        f"two launchers disagree on which process this is: {winner.launcher} says {winner.rank} of "
        f"{sum(winner.tasks_per_node)}, {outer.launcher} says {outer.rank} of {sum(outer.tasks_per_node)}",
        seen=f"{winner.sources['launcher']}, {outer.sources['launcher']}",
        fix="start the command by one of them; if the other's variables are left over from the shell that submitted "
        "the job, submit without -V or --export=ALL, or unset them",
    )


def _check_losers(losers: list[tuple[str, Rejected]], winner: Task | None) -> None:
    """Returns if this can't be a process of a launcher that was rejected.

    Raises:
        MusterError: it can: nothing else started it, or what did may have started that launcher's daemon.
    """
    if winner and max(winner.tasks_per_node) > 1:
        return
    for name, found in losers:
        if not found.is_certain:
            raise MusterError(
                f"the variables of {name} are here, but seem to be made for another process",
                seen=found.reason,
                fix=f"start the command by {name} itself, or unset its variables if they are left over",
            )
