"""Who owns the nodes, and who started this process: each family is asked, and where several answer, evidence decides.

Of a scheduler it is `job(env) -> Hosts | None`, of a launcher `task(env, job) -> Task | Rejected | None`. `None` means
"not mine"; present but broken raises; `Rejected` means that its variables were made for another process.
To add one: the function in its family's file, its line below, its variables in environment.py and passing.py, a
recording with its test.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from muster.entrypoint import hostlist
from muster.entrypoint.allocation import Hosts, Rejected, Task
from muster.entrypoint.detect import flux, grid_engine, kubernetes, lsf, manual, mpi, pals, pbs, slurm
from muster.entrypoint.environment import Environment
from muster.errors import MusterError

# Flux comes first: it runs inside the others' jobs, and never one of them inside its own. The order of the others
# decides nothing: where two of them are found, evidence does. MUSTER_HOSTS is no rival, it adds to what is found.
SCHEDULERS: tuple[tuple[str, Callable[[Environment], Hosts | None]], ...] = (
    ("flux", flux.job),
    ("slurm", slurm.job),
    ("pbs", pbs.job),
    ("lsf", lsf.job),
    ("grid_engine", grid_engine.job),
    ("kubernetes", kubernetes.job),
)


class _Candidate(NamedTuple):
    name: str
    job: Hosts | None
    error: MusterError | None
    fits: bool | None  # whether this host is one of the job's; None where its hosts, or this host, are not known

    @property
    def described(self) -> str:
        return self.job.sources["scheduler"] if self.job else self.error.seen if self.error else ""


def find_job(env: Environment) -> tuple[Hosts | None, tuple[str, ...]]:
    """The job that this process belongs to, or None without a scheduler; and a line for each that was ruled out.

    Raises:
        MusterError: a scheduler's variables are broken, or two schedulers' are there and nothing decides.
    """
    candidates = [found for name, detector in SCHEDULERS if (found := _try(name, detector, env))]
    listed = manual.job(env)
    job, rejected = _decide(candidates, env) if candidates else (None, ())
    return (manual.override(job, listed) if listed else job), rejected


def _try(name: str, detector: Callable[[Environment], Hosts | None], env: Environment) -> _Candidate | None:
    try:
        job = detector(env)
    except MusterError as error:
        return _Candidate(name, None, error, None)
    if job is None:
        return None
    try:
        fits = hostlist.index_of(job.hosts, env.host) is not None if job.hosts and env.host else None
    except hostlist.HostListError:
        fits = True
    return _Candidate(name, job, None, fits)


def _decide(candidates: list[_Candidate], env: Environment) -> tuple[Hosts | None, tuple[str, ...]]:
    # A shell may point to an instance of Flux elsewhere: that alone makes it no job of Flux.
    is_shell_of_flux = candidates[0].name == "flux" and not {"FLUX_JOB_ID", "FLUX_TASK_RANK"} & env.keys()
    if len(candidates) > 1 and is_shell_of_flux:
        candidates = candidates[1:]
    if len(candidates) == 1:
        only = candidates[0]
        if only.error:
            raise only.error
        if only.job and is_shell_of_flux and _holds_flux(only, env):
            return replace(only.job, launch=flux.launch(only.job.num_nodes)), ()
        return only.job, ()
    flux_job, *others = candidates
    is_flux = flux_job.name == "flux"
    if is_flux and flux_job.job and all(_holds_flux(other, env) for other in others):
        reason = f"{flux_job.described} runs inside it"
        return flux_job.job, tuple(f"{other.name} ({other.described}): {reason}" for other in others)
    # Flux names no hosts: it can't be shown to be left over, and several of its tasks may share this host.
    fitting = [] if is_flux else [candidate for candidate in candidates if candidate.fits]
    if len(fitting) == 1:
        winner = fitting[0]
        return winner.job, tuple(_lost(other, env) for other in candidates if other is not winner)
    names = " and ".join(candidate.name for candidate in candidates)
    raise MusterError(
        f"the variables of {names} are all here, and nothing tells which of them runs this process",
        seen=", ".join(candidate.described for candidate in candidates),
        fix="submit from a shell outside of any job, without -V or --export=ALL, or unset the others' variables",
    )


def _holds_flux(outer: _Candidate, env: Environment) -> bool:
    """Whether an instance of Flux that this process sees was started in the job `outer`."""
    # FLUX_URI=local:///var/tmp/pbs.27.pbshead/flux-37ohsP/local-0: Flux keeps its sockets in the job's own TMPDIR.
    path = env.get("FLUX_URI", "").removeprefix("local://")
    folder = env.get("TMPDIR", "/tmp").rstrip("/") + "/"
    if not path.startswith(folder):
        return False
    job_id = outer.job.job_id if outer.job else None
    if job_id and job_id in folder:
        return True
    # PBS gives each job a TMPDIR of its own, so that another one, such as /tmp, was set in this job, and what was left
    # over from another job does not lie in it. On the node itself the socket tells.
    if outer.name == "pbs" and env.get("TMPDIR"):
        return not env.is_live or Path(path).is_socket()
    # A folder that all jobs share is no evidence by itself; one task a node, as brokers are started, adds to it.
    return set(env.get("SLURM_STEP_TASKS_PER_NODE", "").split(",")) <= {
        "1",
        f"1(x{env.get('SLURM_STEP_NUM_NODES')})",
    }


def _lost(candidate: _Candidate, env: Environment) -> str:
    if candidate.error:
        return f"{candidate.name} ({candidate.described}): {candidate.error.wrong}"
    why = "left over: this host is not in its job" if candidate.fits is False else "nothing shows this host in its job"
    return f"{candidate.name} ({candidate.described}): {why}, {env.host}"


class Launcher(NamedTuple):
    """A launcher, as users call it, and which of its processes an environment belongs to."""

    name: str
    detect: Callable[[Environment, Hosts | None], Task | Rejected | None]
    scheduler: str | None = None  # the one it belongs to; None where it works under any


# The innermost launcher comes first: it is the one that knows this process. Those after it may have started its daemon,
# and their variables then describe that: mpirun starts its daemons by srun, pbs_tmrsh, blaunch or qrsh, and Flux is
# started by any of them. Hydra comes before srun for the same reason; that srun sets PMI_RANK too, mpi.py knows.
LAUNCHERS: tuple[Launcher, ...] = (
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


def find_task(env: Environment, job: Hosts | None) -> tuple[Task | None, tuple[str, ...]]:
    """Which task of which launcher this process is, or None where nothing started it as one of several; and the losers.

    Raises:
        MusterError: a launcher's variables are there, but broken; or two launchers disagree and neither can have
            started the other.
    """
    winner: Task | None = None
    losers: list[tuple[str, Rejected]] = []
    for launcher in LAUNCHERS:
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
