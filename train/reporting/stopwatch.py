"""How long stretches of a training last, on the clock of its device."""

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

Mark = float | torch.cuda.Event


class Stopwatch:
    """Adds up stretches of time; on a GPU by events, once they have come to pass.

    Args:
        note: takes the seconds of each stretch, in their order, in place of `add`.

    Attributes:
        counts: False where the stretches that begin now are none of what is measured.
    """

    def __init__(
        self, device: torch.device, note: Callable[[float], None] | None = None, *, counts: bool = True
    ) -> None:
        self.device = device
        self.note = note or self.add
        self.pending: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()
        self.seconds = 0.0
        self.counts = counts

    def add(self, seconds: float) -> None:
        """Counts a stretch."""
        self.seconds += seconds

    def now(self) -> Mark:
        """Now, on the device's clock."""
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def begin(self) -> Mark | None:
        """The begin of a stretch that `end` ends; None where it does not count."""
        return self.now() if self.counts else None

    def end(self, before: Mark | None) -> Mark | None:
        """Ends the stretch since `before`, where that counts; returns now, where the next may begin."""
        if before is None:
            return None
        now = self.now()
        if isinstance(before, torch.cuda.Event) and isinstance(now, torch.cuda.Event):
            self.pending.append((before, now))
            self.read(wait=False)
        elif isinstance(before, float) and isinstance(now, float):
            self.note(now - before)
        return now

    @contextmanager
    def running(self) -> Iterator[None]:
        """A context whose time is counted."""
        before = self.begin()
        yield
        self.end(before)

    def read(self, *, wait: bool) -> None:
        """Notes the stretches that the GPU is through with; all of them with `wait`."""
        while self.pending and (wait or self.pending[0][1].query()):
            before, after = self.pending.popleft()
            after.synchronize()
            self.note(before.elapsed_time(after) / 1000)

    def total(self) -> float:
        """Seconds of all stretches, when the device is through with them."""
        self.read(wait=True)
        return self.seconds
