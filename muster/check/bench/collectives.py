"""The collectives: the call, the message and the expected values of each.

The size of a message and the bus bandwidth are defined as in nccl-tests. The bus bandwidth is the least that a rank's
link to the others carries, whatever the algorithm: it can be compared with the hardware's nominal bandwidth.

Messages are integers that float32 holds and adds up exactly, a different one at each index: a message that is cut,
shifted, or from another rank or an earlier call is recognised by its values.

Source: https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md, and sendrecv.cu there for send_recv
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from muster.errors import MusterError
from muster.train.distributed.world import World
from muster.units import plural

ROOT = 0

ELEMENT = 4
"""Bytes of a float32, of which all messages consist."""

EXACT = 1 << 24
"""The integer up to which float32 holds every integer. Source: IEEE 754, binary32 has 24 significant bits."""

PRIME = 16_777_213
"""The largest prime below EXACT: values repeat after so many elements, and no chunk size is a multiple of it."""

WEIGHTS = 61
"""The number of consecutive ranks that add different numbers to a sum."""

STRIDE = 104_729
BLOCK = 1 << 22
"""Elements that are generated or compared at a time, to bound the memory that this needs besides the messages."""

UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40, "P": 1 << 50, "E": 1 << 60}

Pattern = Callable[[torch.Tensor], torch.Tensor]
"""A function of indices in a message, as int64, that returns the values there, in the same shape."""


@dataclass(frozen=True)
class WrongValues:
    """Wrong values that one rank got from a collective.

    Attributes:
        size: bytes of the message.
        rank, host: the receiver.
        index, expected, found: the first wrong element.
        count: how many elements are wrong.
        source: the rank that sent them; None where several ranks may have.
    """

    collective: str
    size: int
    rank: int
    host: str
    index: int
    expected: float
    found: str
    count: int
    source: int | None = None

    def __str__(self) -> str:
        source = "" if self.source is None else f", from rank {self.source}"
        where = f"element {self.index} of {shown(self.size)} was {self.found}, not {self.expected:.0f}"
        wrong = f"{plural(self.count, 'element')} {'is' if self.count == 1 else 'are'} wrong"
        return f"{where}; {wrong}{source}"


def shown(size: int) -> str:
    """`size` bytes, in the largest unit that fits: 4K, 1.5M, 20."""
    for unit, factor in reversed(UNITS.items()):
        if size >= factor:
            return f"{size / factor:.4g}{unit}"
    return "0"


def sent_by(rank: int | torch.Tensor, index: torch.Tensor, salt: int) -> torch.Tensor:
    """The values of `rank` at `index`, for collectives that do not sum. `salt` makes those of each call different."""
    return (index + (rank * STRIDE + salt)).remainder_(PRIME)


def addend(world: World, index: torch.Tensor, salt: int) -> torch.Tensor:
    """The values of this rank at `index`, for collectives that sum over all ranks."""
    return (index + salt).remainder_(period(world)).add_(world.rank % WEIGHTS)


def total(world: World, index: torch.Tensor, salt: int) -> torch.Tensor:
    """The sum of the `addend` of all ranks; each partial sum is exact too, in any order."""
    weights = sum(rank % WEIGHTS for rank in range(world.world_size))
    return (index + salt).remainder_(period(world)).mul_(world.world_size).add_(weights)


def period(world: World) -> int:
    """The odd number of elements after which addends repeat, so small that the sum of the largest is below EXACT."""
    return (max(3, EXACT // world.world_size - WEIGHTS) - 1) | 1


def fill(message: torch.Tensor, pattern: Pattern) -> None:
    for start in range(0, message.numel(), BLOCK):
        part = message[start : start + BLOCK]
        part.copy_(pattern(torch.arange(start, start + part.numel(), device=message.device)))


def compare(message: torch.Tensor, pattern: Pattern) -> tuple[int, float, str, int] | None:
    """Compares `message` with `pattern` on its device; returns None if they are equal.

    Returns:
        The index of the first wrong element, its expected value, its value as text, and the number of wrong elements.
    """
    first: tuple[int, float, str] | None = None
    count = 0
    for start in range(0, message.numel(), BLOCK):
        part = message[start : start + BLOCK]
        expected = pattern(torch.arange(start, start + part.numel(), device=message.device)).to(part.dtype)
        if torch.equal(part, expected):
            continue
        wrong = part != expected
        count += int(wrong.sum())
        if first is None:
            place = int(wrong.to(torch.uint8).argmax())
            # Nine digits distinguish all numbers of float32.
            first = (start + place, float(expected[place]), f"{float(part[place]):.9g}")
    return None if first is None else (*first, count)


@dataclass(frozen=True)
class Collective:
    """A collective operation.

    Attributes:
        passes: how often a rank's link carries the parts of all other ranks; 0 where it carries the message once.
        call: runs the operation once, on the send buffer and the receive buffer.
        giver: returns, for a world and the number of a received part, the rank that sent the part; None where the
            values of all ranks are summed.
        is_split: whether the message has one part for each rank; if not, the whole message is one part.
        sends_all, gets_all: whether a rank sends, or receives, the whole message and not one part.
        is_in_place: whether the send buffer is the receive buffer.
        root: the only rank that sends, or receives; -1 without one.
    """

    name: str
    passes: int
    call: Callable[[torch.Tensor, torch.Tensor], Any]
    giver: Callable[[World, Any], Any] | None = None
    is_split: bool = False
    sends_all: bool = True
    gets_all: bool = True
    is_in_place: bool = False
    root: int = -1

    def bus_factor(self, num_ranks: int) -> float:
        """The bus bandwidth divided by the algorithm bandwidth."""
        return self.passes * (num_ranks - 1) / num_ranks if self.passes else 1.0

    def num_parts(self, num_ranks: int) -> int:
        return num_ranks if self.is_split else 1

    def part(self, world: World, size: int) -> int:
        """The number of elements in a part of a message of at most `size` bytes; one at least."""
        return max(1, size // ELEMENT // self.num_parts(world.world_size))

    def size(self, world: World, size: int) -> int:
        """The bytes of the largest message in equal parts, of at most `size` bytes; one element a part at least."""
        return self.part(world, size) * self.num_parts(world.world_size) * ELEMENT

    def buffers(self, world: World, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The send and the receive buffer, one-dimensional, for a message of `size` bytes; the same one if in place."""
        part, whole = self.part(world, size), self.size(world, size) // ELEMENT
        got = torch.empty(whole if self.gets_all else part, device=world.device)
        if self.is_in_place:
            return got, got
        return torch.empty(whole if self.sends_all else part, device=world.device), got

    def sends(self, world: World, salt: int) -> Pattern | None:
        """The values that this rank sends; None where it sends nothing."""
        if self.giver is None:
            return lambda index: addend(world, index, salt)
        is_silent = self.root >= 0 and world.rank != self.root
        return None if is_silent else lambda index: sent_by(world.rank, index, salt)

    def gets(self, world: World, part: int, salt: int) -> Pattern | None:
        """The values that this rank has to receive, in parts of `part` elements; None where its buffer is undefined."""
        giver = self.giver
        # If each rank sends a part to every rank, this rank receives the parts with its own number.
        own = world.rank * part if self.is_split and self.sends_all else 0
        if giver is not None:
            return lambda index: sent_by(giver(world, index // part), own + index % part, salt)
        gets_nothing = self.root >= 0 and world.rank != self.root
        return None if gets_nothing else lambda index: total(world, own + index, salt)

    def check(self, world: World, size: int, salt: int) -> WrongValues | None:
        """Makes one call with new buffers; returns the wrong values that this rank received, or None."""
        (sent, got), part = self.buffers(world, size), self.part(world, size)
        got.fill_(float("nan"))
        sends, gets = self.sends(world, salt), self.gets(world, part, salt)
        if sends is not None:
            fill(sent, sends)
        self.call(sent, got)
        wrong = None if gets is None else compare(got, gets)
        if wrong is None:
            return None
        index, *_, count = wrong
        # More wrong elements than fit into one part come from several ranks.
        source = None if self.giver is None or count > part else self.giver(world, index // part)
        return WrongValues(self.name, self.size(world, size), world.rank, world.host, *wrong, source)


def _send_recv(sent: torch.Tensor, got: torch.Tensor) -> None:
    """Each rank sends to the next one and receives from the one before, at once."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    sending = dist.P2POp(dist.isend, sent, (rank + 1) % num_ranks)
    receiving = dist.P2POp(dist.irecv, got, (rank - 1) % num_ranks)
    for work in dist.batch_isend_irecv([sending, receiving]):
        work.wait()


ALL = (
    Collective("all_reduce", 2, lambda sent, got: dist.all_reduce(got), is_in_place=True),
    Collective(
        "all_gather",
        1,
        lambda sent, got: dist.all_gather_into_tensor(got, sent),
        giver=lambda world, part: part,
        is_split=True,
        sends_all=False,
    ),
    Collective(
        "reduce_scatter", 1, lambda sent, got: dist.reduce_scatter_tensor(got, sent), is_split=True, gets_all=False
    ),
    Collective(
        "broadcast",
        0,
        lambda sent, got: dist.broadcast(got, src=ROOT),
        giver=lambda world, part: ROOT,
        is_in_place=True,
        root=ROOT,
    ),
    Collective("reduce", 0, lambda sent, got: dist.reduce(got, dst=ROOT), is_in_place=True, root=ROOT),
    Collective(
        "all_to_all",
        1,
        lambda sent, got: dist.all_to_all_single(got, sent),
        giver=lambda world, part: part,
        is_split=True,
    ),
    Collective("send_recv", 0, _send_recv, giver=lambda world, part: (world.rank - 1) % world.world_size),
)

BARRIER = "barrier"
"""The collective without a message, and so without a size and a bandwidth."""

BY_NAME = {one.name: one for one in ALL}
NAMES = (*BY_NAME, BARRIER)


def chosen(text: str) -> tuple[str, ...]:
    """The names of the collectives in `--collectives=text`, each once, in the order of NAMES.

    Raises:
        MusterError: a name is unknown, or there is none.
    """
    words = [word.strip().lower().replace("-", "_") for word in text.split(",") if word.strip()]
    unknown = [word for word in words if word not in (*NAMES, "all")]
    if unknown or not words:
        raise MusterError(
            f"there is no collective '{unknown[0]}'" if unknown else "no collective is chosen",
            seen=f"--collectives={text}",
            fix=f"--collectives with some of {', '.join(NAMES)}, separated by commas; or all",
        )
    return NAMES if "all" in words else tuple(name for name in NAMES if name in words)
