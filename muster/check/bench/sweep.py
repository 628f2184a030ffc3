"""Goes through the collectives and sizes: checks values, takes the time, and puts the ranks' answers together."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import count
from typing import Any

import torch
import torch.distributed as dist

from muster.check.bench import collectives, timing
from muster.check.bench.collectives import ALL, BARRIER, Collective
from muster.check.bench.sizes import ELEMENT, MEBI, shown
from muster.check.bench.table import Row
from muster.check.bench.timing import Broken
from muster.check.options import BenchOptions
from muster.train.world import World

AROUND = tuple(MEBI + ELEMENT * more for more in (-1021, -3, -1, 1, 3, 127, 1021, 4099))
"""Bytes at which values are checked once more: near 1 MiB algorithms switch, and no number of ranks divides all."""

NO_PEER = "needs two ranks"


@dataclass(frozen=True)
class Fault:
    """A wrong value, and where.

    Attributes:
        count: how many elements of that rank's message are wrong.
    """

    collective: str
    size: int
    rank: int
    host: str
    index: int
    expected: float
    found: str
    count: int


@dataclass
class Sweep:
    """The state of a run on this rank.

    Attributes:
        doing: what this rank is at, for what is said if it can't go on.
        faults: the wrong values of all ranks.
        num_checks: how often a message was looked at.
    """

    world: World
    options: BenchOptions
    sizes: Sequence[int]
    names: Sequence[str]

    def __post_init__(self) -> None:
        self.doing = "the first collective"
        self.faults: list[Fault] = []
        self.salts = count(1)
        self.num_checks = 0

    def rows(self) -> list[Row]:
        """Every collective at every size, each measured once."""
        found: list[Row] = []
        for collective in ALL:
            if collective.name in self.names:
                found += self.of(collective)
        if BARRIER in self.names:
            found.append(self.barrier())
        return found

    def of(self, collective: Collective) -> list[Row]:
        """The rows of one collective, after its values around 1 MiB were checked."""
        whole = Row(collective.name, 0, self.world.world_size)
        note = self.lacks(collective)
        if note:
            return [replace(whole, note=note)]
        sizes = dict.fromkeys(collective.size(self.world, size) for size in self.sizes)
        rows = [self.row(collective, size) for size in sizes]
        self.doing = f"{collective.name} around 1M"
        self.check(collective, AROUND)
        return rows

    def row(self, collective: Collective, size: int) -> Row:
        """Its row at `size`: values first, which warms up too, then time."""
        self.doing = f"{collective.name} of {shown(size)}"
        if self.world.main and sys.stderr.isatty():
            print(f"\r{self.doing:<40}", end="\r", file=sys.stderr, flush=True)
        row = Row(collective.name, size, self.world.world_size)
        num_wrong = self.check(collective, [size])
        return replace(row, num_checks=1 - num_wrong, num_wrong=num_wrong, passes=(self.time(row),))

    def again(self, row: Row) -> Row:
        """`row` with another pass."""
        return replace(row, passes=(*row.passes, self.time(row)))

    def time(self, row: Row) -> timing.Timing:
        """How long the collective of `row` takes at its size, over all ranks."""
        self.doing = f"{row.collective} of {shown(row.size)}"
        call = self.call_of(row)
        seconds = self.safe(lambda: timing.measure(self.world, call, self.options.iters, self.options.warmup))
        return timing.of_ranks(self.world.gather(seconds))

    def call_of(self, row: Row) -> timing.Call:
        """One call of the collective of `row`, always with the same buffers."""
        if not row.size:
            return lambda: dist.barrier() and None
        collective = next(one for one in ALL if one.name == row.collective)
        message = collective.message(self.world, row.size)
        # Zeros stay as they are, however often they are added up.
        message.sent.zero_()
        message.got.zero_()
        return lambda: collective.call(self.world, message, None)

    def check(self, collective: Collective, sizes: Sequence[int]) -> int:
        """At how many of `sizes` a rank has wrong values; each is kept in `faults`."""
        salt = next(self.salts)
        self.num_checks += len(sizes)
        own: list[dict[str, Any]] = []
        for turn, size in enumerate(sizes):
            bytes_ = collective.size(self.world, size)
            wrong = self.safe(lambda bytes_=bytes_, turn=turn: collective.check(self.world, bytes_, salt + 31 * turn))
            if wrong is not None:
                place = (collective.name, bytes_, self.world.rank, self.world.host)
                own.append(asdict(Fault(*place, wrong.index, wrong.expected, wrong.found, wrong.count)))
        faults = [Fault(**each) for of_rank in self.world.gather(own) for each in of_rank]
        self.faults += faults
        return len({fault.size for fault in faults})

    def barrier(self) -> Row:
        """The row of the barrier: none may leave it before all have come."""
        world, row = self.world, Row(BARRIER, 0, self.world.world_size)
        self.doing = BARRIER
        assert world.store is not None
        self.num_checks += 1
        world.store.add("bench/barrier", 1)
        self.safe(lambda: (dist.barrier(), timing.wait_for_device(world)))
        there = world.store.add("bench/barrier", 0)
        own = [] if there == world.world_size else [(world.rank, world.host, there)]
        for rank, host, found in (each for of_rank in world.gather(own) for each in of_rank):
            self.faults.append(Fault(BARRIER, 0, rank, host, 0, world.world_size, str(found), 1))
            row = replace(row, num_wrong=1)
        return replace(row, num_checks=1 - row.num_wrong, passes=(self.time(row),))

    def lacks(self, collective: Collective) -> str:
        """Why the backend does not have it; empty where it does. All ranks ask together."""
        if collective.name == "send_recv" and self.world.world_size == 1:
            return NO_PEER
        try:
            collective.call(self.world, collective.message(self.world, ELEMENT), None)
            timing.wait_for_device(self.world)
            own = ""
        except (NotImplementedError, RuntimeError) as error:
            own = str(error).strip().partition("\n")[0] or type(error).__name__
        errors = [each for each in self.world.gather(own) if each]
        if len(errors) == self.world.world_size and all(map(collectives.is_lacking, errors)):
            return f"not by {self.world.backend}"
        if errors:
            raise Broken(errors[0])
        return ""

    def safe(self, function: Callable[[], Any]) -> Any:
        """What `function`, which speaks to the other ranks, returns.

        Raises:
            Broken: it can't reach them.
        """
        try:
            return function()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise Broken(str(error)) from error
