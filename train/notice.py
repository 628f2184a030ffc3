"""A scheduler's warning: a signal that says that this process will be stopped.

It becomes a flag, which the ranks bring together at the end of a step, so that all stop after the same one.
"""

import os
import signal
import threading
from types import FrameType

from train.deadline import Deadline
from train.errors import PREEMPTED
from train.faults import SharedFault

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
"""Which of them warns is the scheduler's choice, and the job script's: `#SBATCH --signal=USR1@90`."""

WAIT_S = 2.0
"""About how long a warning may wait for the next look; long steps are looked at one by one."""


class Notice:
    """Whether this rank was warned: by a signal, or because the job's time limit is near.

    Args:
        deadline: on the one rank whose clock counts: those of hosts differ.
    """

    def __init__(self, deadline: Deadline | None = None) -> None:
        self.deadline = deadline
        self.first = ""

    @property
    def heard(self) -> str:
        """The signal's name, or how near the limit is; empty until there is either."""
        if not self.first and self.deadline is not None and self.deadline.is_near():
            self.first = str(self.deadline)
        return self.first

    def listen(self) -> None:
        """From now on the signals are heard, and end nothing. Other threads can't do this: there nothing changes."""
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                signal.signal(number, self._hear)
            # A launcher may have held those that came earlier.
            signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        self.first = self.first or signal.Signals(number).name


class Preempted(SharedFault):
    """The run was warned; its state is in a checkpoint."""

    def __init__(self, step: int, heard: str) -> None:
        super().__init__(
            f"stopped by a warning after step {step}; a checkpoint is written",
            seen=heard or "a warning to another rank",
            fix="the same command with --resume goes on from there",
            code=PREEMPTED,
        )


def between(step_s: float, most: int) -> int:
    """Steps between two looks where each takes `step_s`: a warning shall not wait long, and looks cost a little."""
    wanted = WAIT_S / max(step_s, 1e-9)
    # Divisors of ten, so that the steps of which metrics.jsonl has a line are among them.
    return min(most, max((steps for steps in (10, 5, 2) if steps <= wanted), default=1))


def deafen() -> None:
    """A data worker's part: warnings are the trainer's, which needs its workers until it has stopped.

    Some schedulers signal all processes of a job. The second SIGTERM is the trainer's own, and ends the worker.
    """
    signal.signal(signal.SIGTERM, _hear_once)
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)


def _hear_once(number: int, frame: FrameType | None) -> None:
    signal.signal(number, lambda *_: os._exit(0))
