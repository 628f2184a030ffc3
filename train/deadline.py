"""When the job ends, as its scheduler says, and whether a checkpoint fits into the time after its warning.

Nothing here runs by itself: the clock is read where the ranks look at each other's warnings.
"""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from train.errors import MusterError

START, END = "MUSTER_JOB_START_TIME", "MUSTER_JOB_END_TIME"
"""Unix seconds: the job scripts export them where the scheduler itself has no such variable; yours win."""

SCHEDULER_START, SCHEDULER_END = "MUSTER_SCHEDULER_START_TIME", "MUSTER_SCHEDULER_END_TIME"
"""The same by the scheduler's own word, which the launcher passes on (entrypoint/launch.py)."""

SCHEDULER = "MUSTER_SCHEDULER"
"""The scheduler's name."""

GRACE = "MUSTER_GRACE_S"
"""Seconds from the first warning to SIGKILL, where the job script knows them."""


@dataclass(frozen=True)
class Deadline:
    """A job's time limit, and when to stop ahead of it.

    Attributes:
        end: the limit, in unix seconds.
        before_s: how long before it a run stops.
        clock: tells the unix seconds.
    """

    end: float
    before_s: float
    clock: Callable[[], float] = time.time

    @property
    def left_s(self) -> float:
        """Seconds to the limit."""
        return self.end - self.clock()

    def is_near(self) -> bool:
        """Whether it is time to stop."""
        return self.left_s <= self.before_s

    def __str__(self) -> str:
        return f"{max(0.0, self.left_s) / 60:.1f} minutes to the job's time limit, --save-before={self.before_s / 60:g}"


class Found(NamedTuple):
    """What is known of the limit: a deadline where one is wanted, and what the user should read about it."""

    deadline: Deadline | None
    notes: tuple[str, ...] = ()


def find(save_before: float | None, environ: Mapping[str, str], clock: Callable[[], float] = time.time) -> Found:
    """The deadline of this job.

    Args:
        save_before: minutes; None takes a tenth of the limit, 5 minutes at most, where a job script of ours tells it.

    Raises:
        MusterError: a variable is no time, or the whole job is no longer than `save_before`.
    """
    end, name = _read(environ, END), END
    if end is None:
        end, name = _schedulers(environ, SCHEDULER_END), SCHEDULER_END
    if save_before == 0:
        return Found(None)
    if end is None:
        fix = f"the job's time limit is not known: export {END}=$(date -d '+1 hour' +%s)"
        return Found(None, () if save_before is None else (f"--save-before={save_before:g} does nothing here: {fix}",))
    start = _read(environ, START) if name == END else _schedulers(environ, SCHEDULER_START)
    limit_s = None if start is None else end - start
    if save_before is None:
        if name != END or limit_s is None:
            return Found(None)  # only our scripts are sure to start the job again
        return _until(end, min(300.0, limit_s / 10), name, clock)
    if limit_s is not None and limit_s <= save_before * 60:
        raise MusterError(
            "--save-before leaves no time to train",
            seen=f"--save-before={save_before:g}, and the job's whole limit is {limit_s / 60:g} minutes",
            fix="a longer time limit, or fewer minutes",
        )
    return _until(end, save_before * 60, name, clock)


def _until(end: float, before_s: float, name: str, clock: Callable[[], float]) -> Found:
    deadline = Deadline(end, before_s, clock)
    if deadline.left_s <= 0:
        return Found(None, (f"{name}={end:.0f} is over, and this job is not: it counts for nothing",))
    if deadline.is_near():
        return Found(deadline, (f"{deadline}: this run will stop after its first steps",))
    return Found(deadline)


def _read(environ: Mapping[str, str], name: str) -> float | None:
    text = environ.get(name, "")
    if text.isascii() and text.isdecimal():
        return float(text) or None
    if text:
        raise MusterError(f"{name} is no time", seen=f"{name}={text}", fix=f"export {name}=$(date -d '+1 hour' +%s)")
    return None


def _schedulers(environ: Mapping[str, str], name: str) -> float | None:
    text = environ.get(name, "")
    return (float(text) or None) if text.isascii() and text.isdecimal() else None


class Scheduler(NamedTuple):
    """How long a scheduler waits after its first warning until it kills.

    Attributes:
        grace_s: by default; sites have others.
        setting: what says so.
        fix: what to type for a warning `{seconds}` or `{minutes}` ahead of the limit.
    """

    grace_s: float
    setting: str
    fix: str


SCHEDULERS = {
    # https://flux-framework.readthedocs.io/projects/flux-core/en/latest/man5/flux-config-exec.html
    "flux": Scheduler(5, "Flux's kill-timeout", "flux run --signal=USR1@{seconds}s"),
    # https://slurm.schedmd.com/slurm.conf.html#OPT_KillWait
    "slurm": Scheduler(30, "Slurm's KillWait", "#SBATCH --signal=USR1@{seconds}"),
    # https://github.com/openpbs/openpbs/blob/master/doc/man1/pbs_queue_attributes.7B
    "pbs": Scheduler(10, "PBS's kill_delay", "--save-before={minutes}"),
    # https://www.ibm.com/docs/en/spectrum-lsf/10.1.0?topic=lsbparams-job-terminate-interval
    "lsf": Scheduler(10, "LSF's JOB_TERMINATE_INTERVAL", "#BSUB -wa USR1 -wt {minutes}"),
    # https://manpages.ubuntu.com/manpages/noble/man5/sge_queue_conf.5.html (notify)
    "grid_engine": Scheduler(60, "Grid Engine's notify, with qsub -notify", "--save-before={minutes}"),
    # https://kubernetes.io/docs/concepts/workloads/pods/pod-lifecycle/#pod-termination
    "kubernetes": Scheduler(30, "Kubernetes", "terminationGracePeriodSeconds: {seconds}"),
}


@dataclass(frozen=True)
class Grace:
    """The time between the first warning and SIGKILL."""

    seconds: float
    setting: str
    fix: str

    def note(self, save_s: float, step_s: float) -> str | None:
        """What to tell of a checkpoint that takes `save_s`, where it does not fit; None where it does."""
        need_s = save_s + step_s
        if need_s <= self.seconds:
            return None
        minutes = math.ceil(2 * need_s / 60)
        fixes = {self.fix.format(seconds=60 * minutes, minutes=minutes): None, f"--save-before={minutes}": None}
        return (
            f"a checkpoint took {save_s:.1f} s and a step takes {step_s:.1f} s, but {self.seconds:g} s after a warning "
            f"the job is killed ({self.setting}): {', or '.join(fixes)}"
        )


def grace(environ: Mapping[str, str], deadline: Deadline | None) -> Grace | None:
    """The time there is for a checkpoint, by the job script or the scheduler's default; None without a scheduler.

    Raises:
        MusterError: MUSTER_GRACE_S is no number of seconds.
    """
    found = SCHEDULERS.get(environ.get(SCHEDULER, ""))
    text = environ.get(GRACE, "")
    if text and not (text.isascii() and text.isdecimal()):
        raise MusterError(f"{GRACE} is no number of seconds", seen=f"{GRACE}={text}", fix=f"export {GRACE}=300")
    if not text and found is None:
        return None
    seconds, setting = (float(text), GRACE) if text else (found.grace_s, f"{found.setting}, by default")  # type: ignore[union-attr]
    if deadline is not None and deadline.before_s > seconds:
        seconds, setting = deadline.before_s, "--save-before, ahead of the time limit"
    return Grace(seconds, setting, "--save-before={minutes}" if found is None else found.fix)


class GraceCheck:
    """Compares the time that checkpoints take with the grace; says so once.

    Args:
        grace: None where nothing is known.
        note: shows a line.
    """

    def __init__(self, grace: Grace | None, note: Callable[[str], None]) -> None:
        self.grace = grace
        self.note = note

    def __call__(self, save_s: float, step_s: float = 0.0) -> None:
        """Shows a note where a checkpoint that takes `save_s` does not fit."""
        text = None if self.grace is None else self.grace.note(save_s, step_s)
        if text is not None:
            self.grace = None
            self.note(text)
