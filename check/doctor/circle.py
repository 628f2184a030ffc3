"""One call of each collective, with values from which every rank's share is known."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed

WIDTH = 64
"""Numbers of a rank's share."""

UNKNOWN = -1
"""The source of a value that several ranks have made."""

# Looked up at each call: what stands in its place is what the trainings would call too.
dist: Any = torch.distributed

Wrong = tuple[int, str]
"""(the rank that the value came from, what was seen)."""


@dataclass(frozen=True)
class Circle:
    """Ranks that speak to each other.

    Attributes:
        ranks: their numbers, in order.
        own: this rank's.
        group: their process group; None where it is that of all.
    """

    ranks: Sequence[int]
    own: int
    device: torch.device
    group: Any = None

    @property
    def place(self) -> int:
        """Where this rank stands among them."""
        return self.ranks.index(self.own)

    def share(self, source: int, target: int = 0) -> torch.Tensor:
        """What rank `source` has for `target`: whole numbers from 1 to 251, other ones for each of its neighbours."""
        numbers = torch.arange(WIDTH, dtype=torch.float32, device=self.device)
        return (numbers + 17 * source + 31 * target) % 251 + 1

    def shares(self, target: int = 0) -> torch.Tensor:
        """What all ranks have for `target`, a row each."""
        return torch.stack([self.share(rank, target) for rank in self.ranks])


def all_reduce(circle: Circle) -> list[Wrong]:
    """Each rank fills a slot, the others leave it zero: the sum has all of them."""
    slots = torch.zeros(len(circle.ranks), WIDTH, device=circle.device)
    slots[circle.place] = circle.share(circle.own)
    dist.all_reduce(slots, group=circle.group)
    return _by_row(circle, slots, circle.shares())


def all_gather(circle: Circle) -> list[Wrong]:
    """Everybody's share, from themselves."""
    got = torch.zeros(len(circle.ranks) * WIDTH, device=circle.device)
    dist.all_gather_into_tensor(got, circle.share(circle.own), group=circle.group)
    return _by_row(circle, got.view(-1, WIDTH), circle.shares())


def reduce_scatter(circle: Circle) -> list[Wrong]:
    """The sum of what all ranks have for this one."""
    given = torch.cat([circle.share(circle.own, target) for target in circle.ranks])
    got = torch.zeros(WIDTH, device=circle.device)
    dist.reduce_scatter_tensor(got, given, group=circle.group)
    return _differs(UNKNOWN, got, circle.shares(circle.own).sum(0))


def broadcast(circle: Circle) -> list[Wrong]:
    """The shares of the first and the last rank."""
    wrong: list[Wrong] = []
    for source in (circle.ranks[0], circle.ranks[-1]):
        got = circle.share(source) if source == circle.own else torch.zeros(WIDTH, device=circle.device)
        dist.broadcast(got, source, group=circle.group)
        wrong += _differs(source, got, circle.share(source))
    return wrong


def reduce(circle: Circle) -> list[Wrong]:
    """The sum of all shares, which only the first rank gets."""
    got = circle.share(circle.own)
    dist.reduce(got, circle.ranks[0], group=circle.group)
    return _differs(UNKNOWN, got, circle.shares().sum(0)) if circle.place == 0 else []


def all_to_all(circle: Circle) -> list[Wrong]:
    """What each rank has for this one, from themselves."""
    given = torch.cat([circle.share(circle.own, target) for target in circle.ranks])
    got = torch.zeros_like(given)
    dist.all_to_all_single(got, given, group=circle.group)
    return _by_row(circle, got.view(-1, WIDTH), circle.shares(circle.own))


def send_recv(circle: Circle) -> list[Wrong]:
    """The share of the rank before, while the next one gets this one's."""
    to, source = (circle.ranks[(circle.place + step) % len(circle.ranks)] for step in (1, -1))
    given, got = circle.share(circle.own), torch.zeros(WIDTH, device=circle.device)
    pair = [dist.P2POp(dist.isend, given, to, circle.group), dist.P2POp(dist.irecv, got, source, circle.group)]
    for work in dist.batch_isend_irecv(pair):
        work.wait()
    return _differs(source, got, circle.share(source))


def barrier(circle: Circle) -> list[Wrong]:
    """Nothing: all have come."""
    dist.barrier(group=circle.group)
    return []


COLLECTIVES: dict[str, Callable[[Circle], list[Wrong]]] = {
    function.__name__: function
    for function in (all_reduce, all_gather, reduce_scatter, broadcast, reduce, all_to_all, send_recv, barrier)
}

SUMS = ("all_reduce", "reduce_scatter", "reduce")
"""Whose results are made by several ranks."""


def _by_row(circle: Circle, got: torch.Tensor, expected: torch.Tensor) -> list[Wrong]:
    return [wrong for row, rank in enumerate(circle.ranks) for wrong in _differs(rank, got[row], expected[row])]


def _differs(source: int, got: torch.Tensor, expected: torch.Tensor) -> list[Wrong]:
    # NaN is equal to nothing: it is found too.
    places = (got != expected).nonzero()
    if not len(places):
        return []
    first = int(places[0])
    return [(source, f"{float(got[first]):g} in place of {float(expected[first]):g}, {len(places)} of {WIDTH} numbers")]
