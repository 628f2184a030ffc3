"""What the messages say: integers that float32 holds and adds up exactly, another one at each place.

A message that is cut, shifted, or from another rank or an earlier call is found by its values.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch

EXACT = 1 << 24
"""Up to here float32 holds each integer. Source: IEEE 754, binary32 has 24 significant bits."""

WEIGHTS = 61
"""So many ranks in a row add different numbers to a sum."""

STRIDE = 104_729
BLOCK = 1 << 22
"""Elements that are made, or looked at, at a time: what this needs of memory besides the messages is bounded."""

Index = torch.Tensor
Pattern = Callable[[Index], torch.Tensor]
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


@lru_cache
def modulus(most: int) -> int:
    """The largest prime below `most`: no size of a part that an algorithm may choose is a multiple of it."""
    return next(
        number for number in range(most - 1, 1, -1) if all(number % part for part in range(2, int(number**0.5) + 1))
    )


def told(rank: int, salt: int) -> Pattern:
    """The values of `rank` where they only travel. `salt` tells calls apart."""
    period = modulus(EXACT)
    return lambda index: (index + (rank * STRIDE + salt)).remainder_(period)


def added(rank: int, world_size: int, salt: int) -> Pattern:
    """The values of `rank` where those of all ranks are added up."""
    period, weight = _period(world_size), rank % WEIGHTS
    return lambda index: (index + salt).remainder_(period).add_(weight)


def total(world_size: int, salt: int) -> Pattern:
    """The sum of what all ranks have by `added`; each partial sum is exact too, in whatever order."""
    period, weights = _period(world_size), sum(rank % WEIGHTS for rank in range(world_size))
    return lambda index: (index + salt).remainder_(period).mul_(world_size).add_(weights)


def _period(world_size: int) -> int:
    return modulus(max(3, EXACT // world_size - WEIGHTS))


def fill(message: torch.Tensor, pattern: Pattern) -> None:
    """Writes `pattern` into `message`."""
    for start in range(0, message.numel(), BLOCK):
        part = message[start : start + BLOCK]
        part.copy_(pattern(torch.arange(start, start + part.numel(), device=message.device)))


def look(message: torch.Tensor, pattern: Pattern) -> Wrong | None:
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
