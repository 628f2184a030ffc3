"""Warnings that stop a run early: a signal of its scheduler, or its job's time limit.

A signal sets a flag. The ranks add up their flags at the end of a step, so that all stop after the same one. Clocks are
read at this point too: nothing here runs in the background.
"""

import math
import os
import signal
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from types import FrameType
from typing import NamedTuple

from muster.errors import ExitCode, MusterError
from muster.train.health.faults import SharedFault
from muster.variables import LaunchVariable

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
"""The signals that count as warnings; the scheduler and the job script choose one: `#SBATCH --signal=USR1@90`."""

START, END = "MUSTER_JOB_START_TIME", "MUSTER_JOB_END_TIME"
"""Start and end of the job in unix seconds, by launch/job.py or the user; END has precedence over the scheduler's."""

GRACE = "MUSTER_GRACE_S"
"""Seconds from the first warning to SIGKILL, where the job script knows them."""


@dataclass(frozen=True)
class TimeLimit:
    """A job's time limit, and how long before that a run stops.

    Attributes:
        end: the limit, in unix seconds.
        before_s: how long before it a run stops.
    """

    end: float
    before_s: float

    @property
    def left_s(self) -> float:
        """Seconds to the limit."""
        return self.end - time.time()

    def is_near(self) -> bool:
        """Whether it is time to stop."""
        return self.left_s <= self.before_s

    def __str__(self) -> str:
        return f"{max(0.0, self.left_s) / 60:.1f} minutes to the job's time limit, --save-before={self.before_s / 60:g}"


class PreemptionNotice:
    """Whether this rank was warned: by a signal, or because the job's time limit is near.

    Args:
        time_limit: given on one rank only, as the clocks of hosts differ.
        ignored_until: until then, in unix seconds, USR1 and USR2 are no warning (`ignored_until` below).
    """

    def __init__(self, time_limit: TimeLimit | None = None, ignored_until: float = 0.0) -> None:
        self.time_limit = time_limit
        self.ignored_until = ignored_until
        self._reason = ""

    @property
    def reason(self) -> str:
        """The signal's name, or how near the limit is; empty until there is a warning."""
        if not self._reason and self.time_limit is not None and self.time_limit.is_near():
            self._reason = str(self.time_limit)
        return self._reason

    def listen(self) -> None:
        """From now on SIGNALS are warnings, and don't end the process; does nothing outside the main thread."""
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                signal.signal(number, self._note_signal)
            # A launcher may have blocked them, and earlier ones may be pending.
            signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)

    def _note_signal(self, number: int, frame: FrameType | None) -> None:
        if number != signal.SIGTERM and time.time() < self.ignored_until:
            return
        self._reason = self._reason or signal.Signals(number).name


class Preempted(SharedFault):
    """The run was warned; its state is in a checkpoint."""

    def __init__(self, step: int, reason: str) -> None:
        super().__init__(
            f"stopped by a warning after step {step}; a checkpoint is written",
            seen=reason or "a warning to another rank",
            fix="the same command with --resume goes on from there",
            code=ExitCode.PREEMPTED,
        )


def leave_signals_to_trainer() -> None:
    """Makes a data worker ignore warnings, which are for the trainer: it needs its workers until it has stopped.

    Some schedulers signal all processes of a job, and so does a terminal's Ctrl-C. The second SIGTERM comes from the
    trainer itself, and ends the worker.
    """

    def ignore_once(number: int, frame: FrameType | None) -> None:
        signal.signal(number, lambda *_: os._exit(0))

    signal.signal(signal.SIGTERM, ignore_once)
    for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)


def find(save_before: float | None, environ: Mapping[str, str]) -> tuple[TimeLimit | None, list[str]]:
    """The time limit of this job, None where none is known or wanted; and notes on it for the user.

    Args:
        save_before: minutes; None takes a tenth of the limit, 5 minutes at most, where START and END are set.

    Raises:
        MusterError: a variable is no time, or the whole job is no longer than `save_before`.
    """
    end = _seconds(environ, END)
    is_ours = end > 0
    start = _seconds(environ, START if is_ours else LaunchVariable.SCHEDULER_START_TIME)
    end = end or _seconds(environ, LaunchVariable.SCHEDULER_END_TIME)
    if save_before == 0:
        return None, []
    if not end:
        fix = f"the job's time limit is not known: export {END}=$(date -d '+1 hour' +%s)"
        return None, [] if save_before is None else [f"--save-before={save_before:g} has no effect: {fix}"]
    if save_before is None:
        if not is_ours or not start:
            return None, []  # only our scripts are sure to start the job again
        save_before = min(300.0, (end - start) / 10) / 60
    elif start and end - start <= save_before * 60:
        raise MusterError(
            "--save-before leaves no time to train",
            seen=f"--save-before={save_before:g}, and the job's whole limit is {(end - start) / 60:g} minutes",
            fix="a longer time limit, or fewer minutes",
        )
    time_limit = TimeLimit(end, save_before * 60)
    if ignored_until(environ) > time.time():
        why = "this job is hardly longer than its warning time: SIGUSR1 and SIGUSR2 in its first minute are ignored"
        return time_limit, [f"{why}: {time_limit}"]
    if time_limit.left_s <= 0:
        name = END if is_ours else LaunchVariable.SCHEDULER_END_TIME
        return None, [f"{name}={end:.0f} is in the past, but this job still runs: it is ignored"]
    if time_limit.is_near():
        return time_limit, [f"{time_limit}: this run will stop after its first steps"]
    return time_limit, []


def ignored_until(environ: Mapping[str, str]) -> float:
    """The unix seconds until which USR1 and USR2 are no warnings; 0 where each one is.

    A job that is shorter than the time from the warning to its limit is warned when it starts, and would stop at once,
    again and again. Slurm warns up to a minute early; in such a job the warning comes in the first minute.

    Source: https://slurm.schedmd.com/sbatch.html#OPT_signal
    """
    start, end, warning_s = (_seconds(environ, name) for name in (START, END, GRACE))
    if not start or not end or end - start > warning_s + min(60.0, warning_s):
        return 0.0
    return start + 60


def _seconds(environ: Mapping[str, str], name: str) -> float:
    """The seconds in a variable; 0 where it is not set, or where a scheduler's variable is no number of seconds."""
    text = environ.get(name, "")
    if text.isascii() and text.isdecimal():
        return float(text)
    if text and name in (START, END, GRACE):
        example = "300" if name == GRACE else "$(date -d '+1 hour' +%s)"
        raise MusterError(f"{name} is not a time in seconds", seen=f"{name}={text}", fix=f"export {name}={example}")
    return 0.0


DEFAULT_GRACE_S = {
    "flux": 5,
    "slurm": 30,
    "pbs": 10,
    "lsf": 10,
    "grid_engine": 60,
    "kubernetes": 30,
}
"""By scheduler: the default seconds from the first warning to SIGKILL (docs/surviving.md); sites may change them."""


class GracePeriod(NamedTuple):
    """The time between the first warning and SIGKILL: whether a checkpoint fits into it.

    Attributes:
        seconds: its length; infinite where it is not known.
        setting: the variable, option or default that it comes from.
    """

    seconds: float
    setting: str

    def note(self, save_s: float, step_s: float) -> str | None:
        """A note where a step of `step_s` and a checkpoint of `save_s` don't fit into this time; None where they do."""
        if save_s + step_s <= self.seconds:
            return None
        minutes = math.ceil(2 * (save_s + step_s) / 60)
        return (
            f"a checkpoint took {save_s:.1f} s and a step takes {step_s:.1f} s, but {self.seconds:g} s after a warning "
            f"the job is killed ({self.setting}): --save-before={minutes}, or an earlier warning (docs/surviving.md)"
        )


def grace_period(environ: Mapping[str, str], time_limit: TimeLimit | None) -> GracePeriod:
    """The time for a checkpoint after a warning: from --save-before, the job script or the scheduler's default.

    Raises:
        MusterError: MUSTER_GRACE_S is no number of seconds.
    """
    if environ.get(GRACE):
        found = GracePeriod(_seconds(environ, GRACE), GRACE)
    else:
        scheduler = environ.get(LaunchVariable.SCHEDULER, "")
        found = GracePeriod(DEFAULT_GRACE_S.get(scheduler, math.inf), f"{scheduler}'s default")
    if time_limit is not None and (ignored_until(environ) or time_limit.before_s > found.seconds):
        return GracePeriod(time_limit.before_s, "--save-before, ahead of the time limit")
    return found
