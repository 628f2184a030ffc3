"""The collectives: how each is called, what its message is, and what has to come out.

The size of a message and the bus bandwidth are those of nccl-tests. The bus bandwidth is what a rank's link to the
others carries at least, whatever the algorithm: it can be compared with what the hardware is sold for.

Source: https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md, and sendrecv.cu there for send_recv
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from difflib import get_close_matches

import torch
import torch.distributed as dist

from check.bench import values
from check.bench.sizes import ELEMENT, counts_of
from check.bench.values import Pattern, Wrong
from train.errors import MusterError
from train.world import World

ROOT = 0


@dataclass(frozen=True)
class Message:
    """The buffers of a rank: what it sends, and where it receives. Where a collective works in place they are one."""

    sent: torch.Tensor
    got: torch.Tensor


@dataclass(frozen=True)
class Collective:
    """One of them.

    Attributes:
        bus: the factor from algorithm to bus bandwidth, of the number of ranks.
        call: does it once.
        sends: what a rank sends, of the world, the elements of a part, and the salt.
        gets: what it has to receive, of the same; None where it receives nothing that counts.
        is_split: its message has as many parts as there are ranks; without it, a part is the whole message.
        sends_all, gets_all: a rank sends, receives, the whole message, not a part.
        is_in_place: it receives where it sends from.
    """

    name: str
    bus: Callable[[int], float]
    call: Callable[[World, Message], None]
    sends: Callable[[World, int, int], Pattern]
    gets: Callable[[World, int, int], Pattern | None]
    is_split: bool = False
    sends_all: bool = True
    gets_all: bool = True
    is_in_place: bool = False

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

    def check(self, world: World, size: int, salt: int) -> Wrong | None:
        """What is wrong in what this rank receives by one call, in buffers of its own."""
        message = self.message(world, size)
        part = counts_of(size, world.world_size) if self.is_split else message.got.numel()
        message.got.fill_(float("nan"))
        values.fill(message.sent, self.sends(world, part, salt))
        self.call(world, message)
        expected = self.gets(world, part, salt)
        return None if expected is None else values.look(message.got, expected)


def _all_reduce(world: World, message: Message) -> None:
    dist.all_reduce(message.got)


def _all_gather(world: World, message: Message) -> None:
    dist.all_gather_into_tensor(message.got, message.sent)


def _reduce_scatter(world: World, message: Message) -> None:
    dist.reduce_scatter_tensor(message.got, message.sent)


def _broadcast(world: World, message: Message) -> None:
    dist.broadcast(message.got, ROOT)


def _reduce(world: World, message: Message) -> None:
    dist.reduce(message.got, ROOT)


def _all_to_all(world: World, message: Message) -> None:
    dist.all_to_all_single(message.got, message.sent)


def _send_recv(world: World, message: Message) -> None:
    """Each rank sends to the next one and receives from the one before, at once."""
    after, before = (world.rank + 1) % world.world_size, (world.rank - 1) % world.world_size
    both = [dist.P2POp(dist.isend, message.sent, after), dist.P2POp(dist.irecv, message.got, before)]
    for work in dist.batch_isend_irecv(both):
        work.wait()


def _adds(world: World, part: int, salt: int) -> Pattern:
    return values.added(world.rank, world.world_size, salt)


def _sum(world: World, part: int, salt: int) -> Pattern:
    return values.total(world.world_size, salt)


def _sum_at_root(world: World, part: int, salt: int) -> Pattern | None:
    return _sum(world, part, salt) if world.rank == ROOT else None


def _own_part_of_sum(world: World, part: int, salt: int) -> Pattern:
    whole = values.total(world.world_size, salt)
    return lambda index: whole(index + world.rank * part)


def _tells(world: World, part: int, salt: int) -> Pattern:
    return values.told(world.rank, salt)


def _root_tells(world: World, part: int, salt: int) -> Pattern:
    root = values.told(ROOT, salt)
    return root if world.rank == ROOT else lambda index: torch.full_like(index, -1)


def _hears_root(world: World, part: int, salt: int) -> Pattern:
    return values.told(ROOT, salt)


def _hears_the_one_before(world: World, part: int, salt: int) -> Pattern:
    return values.told((world.rank - 1) % world.world_size, salt)


def _hears_all(world: World, part: int, salt: int) -> Pattern:
    """Part q is what rank q sends; `told` of rank q is that of rank 0, further on."""
    first = values.told(0, salt)
    return lambda index: first(index % part + index // part * values.STRIDE)


def _hears_a_part_of_all(world: World, part: int, salt: int) -> Pattern:
    """Part q is the part that rank q has for this rank."""
    first = values.told(0, salt)
    return lambda index: first(index % part + (world.rank * part) + index // part * values.STRIDE)


def _one(num_ranks: int) -> float:
    return 1.0


def _others(num_ranks: int) -> float:
    return (num_ranks - 1) / num_ranks


def _there_and_back(num_ranks: int) -> float:
    return 2 * (num_ranks - 1) / num_ranks


ALL = (
    Collective("all_reduce", _there_and_back, _all_reduce, _adds, _sum, is_in_place=True),
    Collective("all_gather", _others, _all_gather, _tells, _hears_all, is_split=True, sends_all=False),
    Collective("reduce_scatter", _others, _reduce_scatter, _adds, _own_part_of_sum, is_split=True, gets_all=False),
    Collective("broadcast", _one, _broadcast, _root_tells, _hears_root, is_in_place=True),
    Collective("reduce", _one, _reduce, _adds, _sum_at_root, is_in_place=True),
    Collective("all_to_all", _others, _all_to_all, _tells, _hears_a_part_of_all, is_split=True),
    Collective("send_recv", _one, _send_recv, _tells, _hears_the_one_before),
)

BARRIER = "barrier"
"""It has no message, and so no size and no bandwidth."""

NAMES = (*(one.name for one in ALL), BARRIER)


def chosen(text: str) -> tuple[str, ...]:
    """The names that `--collectives` stands for, each once, in the order of NAMES.

    Raises:
        MusterError: one of them is none.
    """
    words = [word.strip().lower().replace("-", "_") for word in text.split(",") if word.strip()]
    for word in words:
        if word not in (*NAMES, "all"):
            near = get_close_matches(word, NAMES, 1, 0.5)
            raise MusterError(
                f"there is no collective '{word}'" + (f"; '{near[0]}' is one" if near else ""),
                seen=f"--collectives={text}",
                fix=f"--collectives={','.join(near[0] if each == word else each for each in words)}"
                if near
                else f"some of {', '.join(NAMES)}, by commas; or all",
            )
    if not words:
        fix = f"some of {', '.join(NAMES)}, by commas; or all"
        raise MusterError("no collective is chosen", seen=f"--collectives={text}", fix=fix)
    return NAMES if "all" in words else tuple(name for name in NAMES if name in words)


def keys(world: World, names: Collection[str], sizes: Sequence[int]) -> list[tuple[str, int]]:
    """The collectives of these `names` with the sizes at which they are measured; the barrier has none."""
    found = [(one.name, one.size(world, size)) for one in ALL if one.name in names for size in sizes]
    return [*found, *([(BARRIER, 0)] if BARRIER in names else [])]
