"""How long calls take: each by itself, back to back, on every rank.

Ranks meet in a barrier, then call without a pause. A call of a rank lasts from the end of the one before it to its
own end: on GPUs by events on the stream, on CPUs by the clock. From this, over ranks:

- the time of a size is the mean call of the slowest rank: what nccl-tests reports with `-a 3`;
- p50 and p99 are of the slowest rank in each call.

Source: https://github.com/NVIDIA/nccl-tests (README: -n, -w, -a)
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.distributed as dist

from muster.train.world import World

Call = Callable[[], None]


class Broken(Exception):
    """This rank can't go on, because of another rank or its GPU: what the backend said."""


@dataclass(frozen=True)
class Timing:
    """How long a call takes, over all ranks, in seconds.

    Attributes:
        mean_s: the mean call of the slowest rank.
        p50_s, p99_s: of the slowest rank in each call.
    """

    mean_s: float
    p50_s: float
    p99_s: float


def of_ranks(calls_of_ranks: Sequence[Sequence[float]]) -> Timing:
    """The timing of the seconds of each call, by rank."""
    slowest = sorted(max(calls) for calls in zip(*calls_of_ranks, strict=True))
    mean_s = max(sum(calls) / len(calls) for calls in calls_of_ranks)
    return Timing(mean_s, percentile(slowest, 50), percentile(slowest, 99))


def percentile(figures: Sequence[float], share: float) -> float:
    """The least of the sorted `figures` that so many per cent of them don't exceed (nearest rank)."""
    return figures[max(1, math.ceil(len(figures) * share / 100)) - 1]


def measure(world: World, call: Call, iters: int, warmup: int) -> list[float]:
    """The seconds of each of `iters` calls on this rank, after `warmup` calls that are not counted.

    Raises:
        Broken: a GPU took longer than the ranks wait for each other.
    """
    for _ in range(warmup):
        call()
    dist.barrier()
    if world.device.type == "cuda":
        return _by_events(world, call, iters)
    return _by_clock(call, iters)


def _by_clock(call: Call, iters: int) -> list[float]:
    stamps = [time.perf_counter()]
    for _ in range(iters):
        call()
        stamps.append(time.perf_counter())
    return [after - before for before, after in pairwise(stamps)]


def _by_events(world: World, call: Call, iters: int) -> list[float]:
    """By a GPU's own clock: the host only launches the calls, and must not wait between them."""
    wait_for_device(world)
    events = [torch.cuda.Event(enable_timing=True) for _ in range(iters + 1)]
    events[0].record()
    for event in events[1:]:
        call()
        event.record()
    wait_for_device(world)
    return [before.elapsed_time(after) / 1000 for before, after in pairwise(events)]


def wait_for_device(world: World) -> None:
    """Returns when the device has done what it was given; at once on a CPU.

    Raises:
        Broken: it has not, nearly as long as the ranks wait for each other; then the backend would end the process.
    """
    if world.device.type != "cuda":
        return
    event = torch.cuda.Event()
    event.record()
    deadline = time.monotonic() + 0.9 * world.timeout_s
    while not event.query():
        if time.monotonic() > deadline:
            raise Broken(f"the GPU was not done after {0.9 * world.timeout_s:.0f} s")
        time.sleep(0.0002)
