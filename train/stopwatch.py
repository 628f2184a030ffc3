"""The device's time in some stretches of a run, without holding it up."""

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Stopwatch:
    """Adds up stretches of time; on a GPU by events that are read once they have come to pass."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.seconds = 0.0
        self.pending: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()

    @contextmanager
    def running(self) -> Iterator[None]:
        """A context whose time is counted."""
        if self.device.type != "cuda":
            started = time.perf_counter()
            yield
            self.seconds += time.perf_counter() - started
            return
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before.record()
        yield
        after.record()
        self.pending.append((before, after))
        self.read(wait=False)

    def read(self, *, wait: bool) -> float:
        """Seconds of the stretches that the GPU is through with; of all of them with `wait`."""
        while self.pending and (wait or self.pending[0][1].query()):
            before, after = self.pending.popleft()
            after.synchronize()
            self.seconds += before.elapsed_time(after) / 1000
        return self.seconds

    def restart(self) -> None:
        """Forgets what was counted."""
        self.seconds = 0.0
        self.pending.clear()
