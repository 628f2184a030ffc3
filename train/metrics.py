"""What a run measures, without holding up the device."""

import math
import resource
import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

import torch

from train.models import IGNORED
from train.stopwatch import Mark, Stretches

Item = TypeVar("Item")


class StepTimes:
    """Seconds of each step, of the waits for data in them, and of the first step.

    A step lasts from the end of the one before (or the start of its epoch) to its own end. On a GPU that is the
    device's time, by events that are read once they have come to pass; nothing waits for them.
    The first step of the process is kept apart: it compiles, allocates and starts workers.
    """

    def __init__(self, device: torch.device) -> None:
        self.stretches = Stretches(device, self.note)
        self.seconds: list[float] = []
        self.first_s: float | None = None
        self.data_wait_s = 0.0
        self.first_wait_s = 0.0
        self.last: Mark | None = None

    def start(self) -> None:
        """Begins an epoch: what lies between epochs is no part of a step."""
        self.last = self.stretches.mark()

    def waiting(self, items: Iterable[Item]) -> Iterator[Item]:
        """`items`, with the time it takes to get each counted as waiting for data."""
        source = iter(items)
        while True:
            started = time.perf_counter()
            try:
                item = next(source)
            except StopIteration:
                return
            self.data_wait_s += time.perf_counter() - started
            yield item

    def step(self) -> None:
        """Ends a step."""
        assert self.last is not None
        self.last = self.stretches.end(self.last)

    def note(self, seconds: float) -> None:
        if self.first_s is None:
            self.first_s, self.first_wait_s, self.data_wait_s = seconds, self.data_wait_s, 0.0
        else:
            self.seconds.append(seconds)

    def summary(self, global_batch: int, world_size: int, unit: str = "images") -> dict[str, object]:
        """Rates and times of the steps after the first; of the first where it is the only one.

        Args:
            global_batch: images or tokens of a step, whichever is the `unit`.
        """
        self.stretches.read(wait=True)
        first_s = self.first_s or 0.0
        seconds = self.seconds or [first_s]
        wait_s = self.data_wait_s if self.seconds else self.first_wait_s
        total_s = sum(seconds)
        rate = len(seconds) * global_batch / total_s if total_s else 0.0
        return {
            f"{unit}_per_second": round(rate, 2),
            f"{unit}_per_second_per_rank": round(rate / world_size, 2),
            "step_time_s": {f"p{share}": round(percentile(seconds, share), 6) for share in (50, 95, 99)},
            "first_step_s": round(first_s, 6),
            "num_timed_steps": len(self.seconds),
            "data_wait_share": round(wait_s / total_s, 4) if total_s else 0.0,
        }


def percentile(values: list[float], share: float) -> float:
    """The smallest of `values` that at least `share` percent of them don't exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(len(ordered) * share / 100) - 1)]


class Sums:
    """Loss, hits and targets (images, or tokens to predict), added up on the device.

    Attributes:
        values: [summed loss, hits, targets], float64.
        num_batches: how many were added.
        first_bad: which of them (from 0) was the first whose loss is no number; -1 for none.
    """

    def __init__(self, device: torch.device) -> None:
        self.values = torch.zeros(3, dtype=torch.float64, device=device)
        self.num_batches = 0
        self.first_bad = torch.full((), -1, device=device)

    @torch.no_grad()
    def add(self, loss: torch.Tensor, logits: torch.Tensor, targets: torch.Tensor) -> None:
        """Adds a batch with the mean `loss` over those of its `targets` (N, NT, or NC probabilities) that count."""
        if targets.is_floating_point():
            targets = targets.argmax(-1)  # of a mixed image, the class that it has more of
        num_targets = (targets != IGNORED).sum()
        hits = (logits.argmax(-1) == targets).sum()
        # The mean over no target is no number.
        total = torch.where(num_targets > 0, loss.detach().double() * num_targets, 0.0)
        is_first_bad = ~total.isfinite() & (self.first_bad < 0)
        self.first_bad = torch.where(is_first_bad, self.num_batches, self.first_bad)
        self.num_batches += 1
        self.values += torch.stack((total, hits.double(), num_targets.double()))


class Readout:
    """A look at a tensor on the device that arrives later, so that nobody waits for the device."""

    def __init__(self, values: torch.Tensor) -> None:
        self.event: torch.cuda.Event | None = None
        if values.device.type == "cuda":
            self.host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self.host.copy_(values, non_blocking=True)
            self.event = torch.cuda.Event()
            self.event.record()
        else:
            self.host = values.clone()

    def values(self) -> list[float] | None:
        """The numbers, or None while they are on their way."""
        if self.event is not None and not self.event.query():
            return None
        return self.host.tolist()

    def wait(self) -> list[float]:
        """The numbers, when they are there."""
        if self.event is not None:
            self.event.synchronize()
        return self.host.tolist()


def peak_memory_gib(device: torch.device) -> float:
    """The most memory that this process held: of the GPU where it trains on one, else resident in RAM."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
