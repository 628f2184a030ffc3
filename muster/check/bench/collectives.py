"""The collectives: how each is called, what its message is, and which values have to come out.

The size of a message and the bus bandwidth are those of nccl-tests. The bus bandwidth is what a rank's link to the
others carries at least, whatever the algorithm: it can be compared with what the hardware is sold for.

Messages are integers that float32 holds and adds up exactly, another one at each place: a message that is cut,
shifted, or from another rank or an earlier call is found by its values.

Source: https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md, and sendrecv.cu there for send_recv
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist

from muster.errors import MusterError
from muster.train.distributed.world import World

ROOT = 0

ELEMENT = 4
"""Bytes of a float32, of which all messages consist."""

EXACT = 1 << 24
"""Up to here float32 holds each integer. Source: IEEE 754, binary32 has 24 significant bits."""

WEIGHTS = 61
"""So many ranks in a row add different numbers to a sum."""

STRIDE = 104_729
BLOCK = 1 << 22
"""Elements that are made, or looked at, at a time: what this needs of memory besides the messages is bounded."""

Pattern = Callable[[torch.Tensor], torch.Tensor]
"""From places in a message, as int64, to the values there."""


@dataclass(frozen=True)
class Wrong:
    """The first element of a message that is not what it has to be.

    Attributes:
        count: how many of the message's elements are wrong.
    """

    index: int
    expected: float
    found: str
    count: int


@dataclass(frozen=True)
class WrongValues:
    """Wrong values that one rank got from a collective.

    Attributes:
        size: bytes of the message.
        rank, host: who got them.
        index, expected, found: the first wrong element.
        count: how many elements are wrong.
        source: the rank that they came from; None where they are of several.
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


@lru_cache
def modulus(most: int) -> int:
    """The largest prime below `most`: no size of a part that an algorithm may choose is a multiple of it."""
    return next(
        number for number in range(most - 1, 1, -1) if all(number % part for part in range(2, int(number**0.5) + 1))
    )


def sent_by(rank: int, salt: int) -> Pattern:
    """The values of `rank` where they are passed on as they are. `salt` tells calls apart."""
    period = modulus(EXACT)
    return lambda index: (index + (rank * STRIDE + salt)).remainder_(period)


def addend(world: World, part: int, salt: int) -> Pattern:
    """The values of this rank where those of all ranks are added up."""
    period, weight = _period(world), world.rank % WEIGHTS
    return lambda index: (index + salt).remainder_(period).add_(weight)


def total(world: World, part: int, salt: int) -> Pattern:
    """The sum of what all ranks have by `addend`; each partial sum is exact too, in whatever order."""
    period, weights = _period(world), sum(rank % WEIGHTS for rank in range(world.world_size))
    return lambda index: (index + salt).remainder_(period).mul_(world.world_size).add_(weights)


def _period(world: World) -> int:
    return modulus(max(3, EXACT // world.world_size - WEIGHTS))


def fill(message: torch.Tensor, pattern: Pattern) -> None:
    """Writes `pattern` into `message`."""
    for start in range(0, message.numel(), BLOCK):
        part = message[start : start + BLOCK]
        part.copy_(pattern(torch.arange(start, start + part.numel(), device=message.device)))


def compare(message: torch.Tensor, pattern: Pattern) -> Wrong | None:
    """What is wrong in `message`, which has to be `pattern`; it stays on its device."""
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
            first = (start + place, float(expected[place]), f"{float(part[place]):g}")
    return None if first is None else Wrong(*first, count)


def counts_of(size: int, num_parts: int) -> int:
    """How many elements each of `num_parts` equal parts of a message of about `size` bytes has; one at least."""
    return max(1, size // ELEMENT // num_parts)


@dataclass(frozen=True)
class Message:
    """The buffers of a rank: what it sends, and where it receives. Where a collective works in place they are one."""

    sent: torch.Tensor
    got: torch.Tensor


@dataclass(frozen=True)
class Collective:
    """One of them.

    Attributes:
        passes: how often a rank's link carries the share of all other ranks; 0 where it carries the message once.
        call: does it once, among the ranks of a group; None is that of all.
        sends: what a rank sends, of the world, the elements of a part, and the salt.
        gets: what it has to receive, of the same; None where it receives nothing that counts.
        is_split: its message has as many parts as there are ranks; without it, a part is the whole message.
        sends_all, gets_all: a rank sends, receives, the whole message, not a part.
        is_in_place: it receives where it sends from.
        source: the rank that wrong values came from, of the world, the elements of a part and what is wrong; None where
            they are of several.
        redop: the operation by which values are put together.
        root: the rank that sends or receives alone; -1 without one.
    """

    name: str
    passes: int
    call: Callable[[World, Message, Any], None]
    sends: Callable[[World, int, int], Pattern]
    gets: Callable[[World, int, int], Pattern | None]
    is_split: bool = False
    sends_all: bool = True
    gets_all: bool = True
    is_in_place: bool = False
    source: Callable[[World, int, Wrong], int | None] = lambda world, part, wrong: None
    redop: str = "none"
    root: int = -1

    def bus_factor(self, num_ranks: int) -> float:
        """The bus bandwidth by the algorithm bandwidth."""
        return self.passes * (num_ranks - 1) / num_ranks if self.passes else 1.0

    def size(self, world: World, size: int) -> int:
        """The bytes of its message that comes next to `size`: one of parts has equal ones."""
        parts = world.world_size if self.is_split else 1
        return counts_of(size, parts) * parts * ELEMENT

    def message(self, world: World, size: int) -> Message:
        """Buffers, of nothing yet, for a message of `size` bytes."""
        whole = self.size(world, size) // ELEMENT
        part = whole // world.world_size if self.is_split else whole
        got = torch.empty(whole if self.gets_all else part, device=world.device)
        if self.is_in_place:
            return Message(got, got)
        return Message(torch.empty(whole if self.sends_all else part, device=world.device), got)

    def check(self, world: World, size: int, salt: int, group: Any = None) -> WrongValues | None:
        """What is wrong in what this rank receives by one call, in buffers of its own.

        Args:
            group: the process group that `world` is of; None for that of all ranks.
        """
        message = self.message(world, size)
        part = counts_of(size, world.world_size) if self.is_split else message.got.numel()
        message.got.fill_(float("nan"))
        fill(message.sent, self.sends(world, part, salt))
        self.call(world, message, group)
        expected = self.gets(world, part, salt)
        wrong = None if expected is None else compare(message.got, expected)
        if wrong is None:
            return None
        source = self.source(world, part, wrong)
        place = (self.name, self.size(world, size), world.rank, world.host)
        return WrongValues(*place, wrong.index, wrong.expected, wrong.found, wrong.count, source)


def _all_reduce(world: World, message: Message, group: Any) -> None:
    dist.all_reduce(message.got, group=group)


def _all_gather(world: World, message: Message, group: Any) -> None:
    dist.all_gather_into_tensor(message.got, message.sent, group=group)


def _reduce_scatter(world: World, message: Message, group: Any) -> None:
    dist.reduce_scatter_tensor(message.got, message.sent, group=group)


def _broadcast(world: World, message: Message, group: Any) -> None:
    dist.broadcast(message.got, group=group, group_src=ROOT)


def _reduce(world: World, message: Message, group: Any) -> None:
    dist.reduce(message.got, group=group, group_dst=ROOT)


def _all_to_all(world: World, message: Message, group: Any) -> None:
    dist.all_to_all_single(message.got, message.sent, group=group)


def _send_recv(world: World, message: Message, group: Any) -> None:
    """Each rank sends to the next one and receives from the one before, at once."""
    after, before = (world.rank + 1) % world.world_size, (world.rank - 1) % world.world_size
    both = [
        dist.P2POp(dist.isend, message.sent, group=group, group_peer=after),
        dist.P2POp(dist.irecv, message.got, group=group, group_peer=before),
    ]
    for work in dist.batch_isend_irecv(both):
        work.wait()


def _giver_of_part(world: World, part: int, wrong: Wrong) -> int | None:
    # More than fits into the part of one rank is wrong: it is of several.
    return wrong.index // part if wrong.count <= part else None


def _root(world: World, part: int, wrong: Wrong) -> int:
    return ROOT


def _one_before(world: World, part: int, wrong: Wrong) -> int:
    return (world.rank - 1) % world.world_size


def _total_at_root(world: World, part: int, salt: int) -> Pattern | None:
    return total(world, part, salt) if world.rank == ROOT else None


def _own_part_of_total(world: World, part: int, salt: int) -> Pattern:
    whole = total(world, part, salt)
    return lambda index: whole(index + world.rank * part)


def _own(world: World, part: int, salt: int) -> Pattern:
    return sent_by(world.rank, salt)


def _own_at_root(world: World, part: int, salt: int) -> Pattern:
    root = sent_by(ROOT, salt)
    return root if world.rank == ROOT else lambda index: torch.full_like(index, -1)


def _roots(world: World, part: int, salt: int) -> Pattern:
    return sent_by(ROOT, salt)


def _of_the_one_before(world: World, part: int, salt: int) -> Pattern:
    return sent_by((world.rank - 1) % world.world_size, salt)


def _of_all(world: World, part: int, salt: int) -> Pattern:
    """Part q is what rank q sends; what rank q sends is that of rank 0, further on."""
    first = sent_by(0, salt)
    return lambda index: first(index % part + index // part * STRIDE)


def _a_part_of_all(world: World, part: int, salt: int) -> Pattern:
    """Part q is the part that rank q has for this rank."""
    first = sent_by(0, salt)
    return lambda index: first(index % part + (world.rank * part) + index // part * STRIDE)


ALL = (
    Collective("all_reduce", 2, _all_reduce, addend, total, is_in_place=True, redop="sum"),
    Collective("all_gather", 1, _all_gather, _own, _of_all, is_split=True, sends_all=False, source=_giver_of_part),
    Collective(
        "reduce_scatter", 1, _reduce_scatter, addend, _own_part_of_total, is_split=True, gets_all=False, redop="sum"
    ),
    Collective("broadcast", 0, _broadcast, _own_at_root, _roots, is_in_place=True, source=_root, root=ROOT),
    Collective("reduce", 0, _reduce, addend, _total_at_root, is_in_place=True, redop="sum", root=ROOT),
    Collective("all_to_all", 1, _all_to_all, _own, _a_part_of_all, is_split=True, source=_giver_of_part),
    Collective("send_recv", 0, _send_recv, _own, _of_the_one_before, source=_one_before),
)

BARRIER = "barrier"
"""It has no message, and so no size and no bandwidth."""

NAMES = (*(one.name for one in ALL), BARRIER)


def by_name(name: str) -> Collective:
    """The collective of this name."""
    return next(one for one in ALL if one.name == name)


def chosen(text: str) -> tuple[str, ...]:
    """The names that `--collectives` stands for, each once, in the order of NAMES.

    Raises:
        MusterError: one of them is none.
    """
    words = [word.strip().lower().replace("-", "_") for word in text.split(",") if word.strip()]
    unknown = [word for word in words if word not in (*NAMES, "all")]
    if unknown or not words:
        raise MusterError(
            f"there is no collective '{unknown[0]}'" if unknown else "no collective is chosen",
            seen=f"--collectives={text}",
            fix=f"--collectives with some of {', '.join(NAMES)}, by commas; or all",
        )
    return NAMES if "all" in words else tuple(name for name in NAMES if name in words)
