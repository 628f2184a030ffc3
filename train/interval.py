"""When a checkpoint is due within an epoch."""

import time
from collections.abc import Callable


class Interval:
    """The time from one checkpoint to the next, on the one rank whose clock counts.

    Args:
        seconds: 0 on all other ranks, and where none is wanted.
        clock: tells seconds.
    """

    def __init__(self, seconds: float = 0.0, clock: Callable[[], float] = time.monotonic) -> None:
        self.seconds = seconds
        self.clock = clock
        self.begin()

    def begin(self) -> None:
        """A checkpoint was begun, or the run."""
        self.since = self.clock()

    def is_over(self) -> bool:
        """Whether the next one is due."""
        return self.seconds > 0 and self.clock() - self.since >= self.seconds
