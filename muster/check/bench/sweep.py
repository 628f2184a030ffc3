"""Measures the collectives at all sizes: checks their values, times their calls, and combines the ranks' results.

Ranks start from a barrier, then make calls without a pause. A rank's call lasts from the end of the call before it to
its own end: on GPUs by events on the stream, on CPUs by the clock. From this, over ranks:

- the time of a size is the mean call of the slowest rank, as nccl-tests reports it with `-a 3`;
- p50 and p99 are percentiles over calls, each timed on its slowest rank.

Source: https://github.com/NVIDIA/nccl-tests (README: -n, -w, -a)
"""

import re
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import Annotated, Any

import msgspec
import numpy as np
import torch
import torch.distributed as dist

from muster.check.bench.collectives import BARRIER, BY_NAME, ELEMENT, UNITS, Collective, WrongValues, shown
from muster.check.options import BenchOptions
from muster.errors import MusterError
from muster.train.distributed.world import World

LARGEST = {"gloo": "64M", "nccl": "1G"}
"""The largest message, where `--max-size` is not given: on CPUs larger ones take long and show nothing new."""

AROUND = tuple((1 << 20) + ELEMENT * more for more in (-1021, -3, -1, 1, 3, 127, 1021, 4099))
"""Sizes in bytes at which values are checked too: algorithms change near 1 MiB, and no number of ranks divides all."""

SPIN_S = 0.05
"""Seconds for which a GPU is polled without a pause, as a pause takes longer than a short message."""

NONE = "N/A"
"""The text for a figure that does not exist."""

Call = Callable[[], object]
Seconds = Annotated[float, msgspec.Meta(gt=0)]


def parse_size(text: str, name: str) -> int:
    """The number of bytes in `text` (`1K`, `4M`, `4MiB`, `1048576`), the value of the option `name`.

    Raises:
        MusterError: it is no size, less than one element, or larger than any memory.
    """
    found = re.fullmatch(r"(\d{1,15})([KMG]?)(?:i?B)?", text.strip(), re.IGNORECASE | re.ASCII)
    size = int(found[1]) * UNITS[found[2].upper()] if found else 0
    if not ELEMENT <= size < 2**60:
        fix = f"{name}=1M; K, M and G are powers of 1024, a plain number is bytes, {ELEMENT} at least"
        raise MusterError(f"{name} is not a size", seen=f"{name}={text}", fix=fix)
    return size


def chosen_sizes(options: BenchOptions, backend: str) -> tuple[int, ...]:
    """The sizes in bytes from `--min-size` to `--max-size`, each `--factor` times the one before.

    Raises:
        MusterError: one of them is no size, or the smallest is more than the largest.
    """
    least, most = options.min_size, options.max_size
    end = parse_size(most or LARGEST[backend], "--max-size")
    size = min(UNITS["K"], end) if least is None else parse_size(least, "--min-size")
    if most is None:
        end = max(end, size)
    if size > end:
        seen, fix = f"--min-size={least} --max-size={most}", f"--min-size={most}, or less"
        raise MusterError("the smallest message is larger than the largest", seen=seen, fix=fix)
    sizes = [size]
    while (size := size * options.factor) <= end:
        sizes.append(size)
    return tuple(sizes)


def bandwidth(value: float | None) -> str:
    """A bandwidth in GB/s as nccl-tests prints it."""
    return NONE if value is None else f"{value:.2f}" if value >= 1 else f"{value:.4f}"


@dataclass(frozen=True)
class Timing:
    """The time of a call over all ranks, in seconds.

    Attributes:
        mean_s: the mean call of the slowest rank.
        p50_s, p99_s: percentiles over calls, each timed on its slowest rank.
    """

    mean_s: Seconds
    p50_s: Seconds
    p99_s: Seconds


@dataclass(frozen=True)
class Row:
    """A collective at a size.

    Attributes:
        size: bytes of the message; 0 where there is none.
        passes: the timing of each measurement; empty where there was none.
        num_wrong: the elements that were wrong, on all ranks; None where none were checked.
        note: why it was not measured.
    """

    collective: str
    size: int
    num_ranks: int
    passes: tuple[Timing, ...] = ()
    num_wrong: int | None = None
    note: str = ""

    @property
    def middle(self) -> Timing | None:
        """The timing of the pass with the median `mean_s`, which represents the row; None without passes."""
        ordered = sorted(self.passes, key=lambda one: one.mean_s)
        return ordered[(len(ordered) - 1) // 2] if ordered else None

    @property
    def algbw(self) -> float | None:
        """The algorithm bandwidth: size divided by time, in 10^9 bytes a second, as in nccl-tests."""
        return self.size / self.middle.mean_s / 1e9 if self.size and self.middle else None

    @property
    def busbw(self) -> float | None:
        """The bus bandwidth in 10^9 bytes a second; None for one rank, and without an algorithm bandwidth."""
        if self.algbw is None or self.num_ranks == 1:
            return None
        return self.algbw * BY_NAME[self.collective].bus_factor(self.num_ranks)

    def figures(self) -> dict[str, Any]:
        """The row as an object for JSON; figures that do not apply are None."""
        middle = self.middle
        return {
            "collective": self.collective,
            "size": self.size,
            "ranks": self.num_ranks,
            "time_us": middle and _micro(middle.mean_s),
            "p50_us": middle and _micro(middle.p50_s),
            "p99_us": middle and _micro(middle.p99_s),
            "algbw": self.algbw and float(f"{self.algbw:.6g}"),
            "busbw": self.busbw and float(f"{self.busbw:.6g}"),
            "values_ok": None if self.num_wrong is None else self.num_wrong == 0,
            "passes_us": [_micro(one.mean_s) for one in self.passes],
            "note": self.note,
        }


def _micro(seconds: float) -> float:
    return round(seconds * 1e6, 3)


@dataclass
class Sweep:
    """The state of a run on this rank.

    Attributes:
        doing: the current operation, for the error message if it fails.
        faults: the wrong values of all ranks.
        num_checks: how many calls had their values checked.
    """

    world: World
    options: BenchOptions
    sizes: Sequence[int]
    names: Sequence[str]
    doing: str = "the first collective"
    faults: list[WrongValues] = field(default_factory=list[WrongValues])
    num_checks: int = 0

    def rows(self) -> list[Row]:
        """Every collective at every size, each measured once."""
        found: list[Row] = []
        for name in self.names:
            found += [self.again(Row(BARRIER, 0, self.world.world_size))] if name == BARRIER else self.of(BY_NAME[name])
        return found

    def of(self, collective: Collective) -> list[Row]:
        """The rows of one collective; at each size its values are checked first, which also warms up."""
        world, note = self.world, ""
        if collective.name == "send_recv" and world.world_size == 1:
            note = "needs two ranks"
        elif collective.name == "send_recv" and world.backend == "gloo" and world.device.type == "cuda":
            # Source: https://docs.pytorch.org/docs/main/distributed.html#backends
            note = "gloo supports it between CPUs only"
        if note:
            return [Row(collective.name, 0, world.world_size, note=note)]
        rows: list[Row] = []
        for size in dict.fromkeys(collective.size(world, size) for size in self.sizes):
            self.doing = f"{collective.name} of {shown(size)}"
            if world.main and sys.stderr.isatty():
                print(f"\r{self.doing:<40}", end="\r", file=sys.stderr, flush=True)
            num_wrong = self.check(collective, [size])
            rows.append(self.again(Row(collective.name, size, world.world_size, num_wrong=num_wrong)))
        self.doing = f"{collective.name} around 1M"
        self.check(collective, AROUND)
        return rows

    def again(self, row: Row) -> Row:
        """`row` with another pass."""
        return replace(row, passes=(*row.passes, self.time(row)))

    def time(self, row: Row) -> Timing:
        """The timing of the collective of `row` at its size, over all ranks; all calls use the same buffers."""
        self.doing = f"{row.collective} of {shown(row.size)}" if row.size else row.collective
        call: Call = dist.barrier
        if row.size:
            collective = BY_NAME[row.collective]
            sent, got = collective.buffers(self.world, row.size)
            # Zeros stay as they are, however often they are added up.
            call = partial(collective.call, sent.zero_(), got.zero_())
        return of_ranks(self.world.gather(measure(self.world, call, self.options)))

    def check(self, collective: Collective, sizes: Sequence[int]) -> int:
        """The number of values that are wrong at these `sizes`, on all ranks; adds them to `faults`."""
        own: list[dict[str, Any]] = []
        for size in sizes:
            self.num_checks += 1
            if (wrong := collective.check(self.world, size, self.num_checks)) is not None:
                own.append(asdict(wrong))
        faults = [WrongValues(**each) for of_rank in self.world.gather(own) for each in of_rank]
        self.faults += faults
        return sum(fault.count for fault in faults)


def of_ranks(calls_of_ranks: Sequence[Sequence[float]]) -> Timing:
    """The timing over all ranks, from the seconds of their calls: one sequence for each rank, all of equal length."""
    slowest = [max(calls) for calls in zip(*calls_of_ranks, strict=True)]
    mean_s = max(sum(calls) / len(calls) for calls in calls_of_ranks)
    # Each percentile is the time of one call, not a mean of two.
    return Timing(mean_s, *np.percentile(slowest, (50, 99), method="inverted_cdf").tolist())


def measure(world: World, call: Call, options: BenchOptions) -> list[float]:
    """The seconds of each of `--iters` calls on this rank, after `--warmup` calls that are not counted.

    Raises:
        RuntimeError: the other ranks can't be reached, or a GPU took longer than the ranks wait for each other.
    """
    for _ in range(options.warmup):
        call()
    dist.barrier()
    if world.device.type == "cuda":
        # By the GPU's own clock: the host only launches the calls, and must not wait between them.
        wait_for_device(world)
        events = [torch.cuda.Event(enable_timing=True) for _ in range(options.iters + 1)]
        events[0].record()
        for event in events[1:]:
            call()
            event.record()
        wait_for_device(world)
        return [before.elapsed_time(after) / 1000 for before, after in pairwise(events)]
    stamps = [time.perf_counter()]
    for _ in range(options.iters):
        call()
        stamps.append(time.perf_counter())
    return [after - before for before, after in pairwise(stamps)]


def wait_for_device(world: World) -> None:
    """Waits until the device has finished its work; returns at once on a CPU.

    Raises:
        RuntimeError: it has not after 90 % of the ranks' time-out, at the end of which the backend ends the process.
    """
    if world.device.type != "cuda":
        return
    event, started = torch.cuda.Event(), time.monotonic()
    event.record()
    while not event.query():
        if (waited_s := time.monotonic() - started) > 0.9 * world.timeout_s:
            raise RuntimeError(f"the GPU had not finished after {0.9 * world.timeout_s:.0f} s")
        if waited_s > SPIN_S:
            time.sleep(0.0002)
