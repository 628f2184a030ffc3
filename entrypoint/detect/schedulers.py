"""Who owns the nodes. A scheduler is a module with `job(env) -> Hosts | None`.

`None` means "not mine"; present but broken raises. To add one: a module, its line below, its variables in recording.py
and passing.py, a recording with its test.
"""

from collections.abc import Callable
from dataclasses import dataclass

from muster.entrypoint import hostlist
from muster.entrypoint.allocation import Hosts
from muster.entrypoint.detect import flux, grid_engine, kubernetes, lsf, manual, pbs, slurm
from muster.entrypoint.environment import Environment
from muster.errors import MusterError

Detector = Callable[[Environment], Hosts | None]

# Flux comes first: it runs inside the others' jobs, and never one of them inside its own. The order of the others
# decides nothing: where two of them are found, evidence does. MUSTER_HOSTS is no rival, it adds to what is found.
DETECTORS: tuple[tuple[str, Detector], ...] = (
    ("flux", flux.job),
    ("slurm", slurm.job),
    ("pbs", pbs.job),
    ("lsf", lsf.job),
    ("grid_engine", grid_engine.job),
    ("kubernetes", kubernetes.job),
)


@dataclass(frozen=True)
class _Candidate:
    name: str
    job: Hosts | None
    error: MusterError | None
    fits: bool | None  # whether this host is one of the job's; None where its hosts, or this host, are not known

    @property
    def described(self) -> str:
        return self.job.sources["scheduler"] if self.job else self.error.seen if self.error else ""


def detect(env: Environment) -> tuple[Hosts | None, tuple[str, ...]]:
    """The job that this process belongs to, or None without a scheduler; and a line for each that was ruled out.

    Raises:
        MusterError: a scheduler's variables are broken, or two schedulers' are there and nothing decides.
    """
    candidates = [found for name, detector in DETECTORS if (found := _try(name, detector, env))]
    listed = manual.job(env)
    job, rejected = _decide(candidates, env) if candidates else (None, ())
    return (manual.override(job, listed) if listed else job), rejected


def _try(name: str, detector: Detector, env: Environment) -> _Candidate | None:
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
    if len(candidates) > 1 and not {"FLUX_JOB_ID", "FLUX_TASK_RANK"} & env.keys():
        candidates = [candidate for candidate in candidates if candidate.name != "flux"]
    if len(candidates) == 1:
        only = candidates[0]
        if only.error:
            raise only.error
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
    # A folder that all jobs share is no evidence by itself; one task a node, as brokers are started, adds to it.
    job_id = outer.job.job_id if outer.job else None
    return bool(job_id and job_id in folder) or set(env.get("SLURM_STEP_TASKS_PER_NODE", "").split(",")) <= {
        "1",
        f"1(x{env.get('SLURM_STEP_NUM_NODES')})",
    }


def _lost(candidate: _Candidate, env: Environment) -> str:
    if candidate.error:
        return f"{candidate.name} ({candidate.described}): {candidate.error.wrong}"
    why = "left over: this host is not in its job" if candidate.fits is False else "nothing shows this host in its job"
    return f"{candidate.name} ({candidate.described}): {why}, {env.host}"
