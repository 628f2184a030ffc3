"""What a rank says of itself every few seconds, and who is dead or stands still by what was heard."""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, TypeVar

Item = TypeVar("Item")

SET_UP, COMPUTING, DATA, LEFT = "set-up", "computing", "waiting for data", "left"
VALIDATION, CHECKPOINT, ENDING = "validation", "checkpoint", "ending"

STAGING = "copying data"
"""A place that watches itself (train/data/stage.py): it may take hours, in which most ranks only wait."""

PATIENT = 5
"""How many times as long a rank may stand still until its first step is complete, at a checkpoint and at the end.

There kernels are compiled, and files written of any size: nothing can count on the way.
"""


@dataclass
class Vitals:
    """How far this rank is. The trainer writes these attributes, a thread reads them: neither waits for the other.

    Attributes:
        ticks: how often it went on; the same on all ranks that are at the same place.
        step: how many steps are complete.
        has_stepped: whether one is complete in this process.
        doubts: whether a connection of this rank broke, so that another rank may be dead.
        folder: where this rank's stacks go; None until the run's folder is known.
    """

    ticks: int = 0
    step: int = 0
    place: str = SET_UP
    has_stepped: bool = False
    doubts: bool = False
    folder: Path | None = None

    def at(self, place: str) -> None:
        """Tells that this rank went on, to `place`."""
        self.place = place
        self.ticks += 1

    def stepped(self, step: int) -> None:
        """Tells that a step is complete."""
        self.step, self.has_stepped = step, True
        self.ticks += 1

    def over(self, items: Iterable[Item], waiting: str, having: str) -> Iterator[Item]:
        """`items`; this rank is at `waiting` for each, then at `having`."""
        source = iter(items)
        while True:
            self.at(waiting)
            try:
                item = next(source)
            except StopIteration:
                return
            self.at(having)
            yield item

    @property
    def is_patient(self) -> bool:
        return not self.has_stepped or self.place in (CHECKPOINT, ENDING)


class Beat(NamedTuple):
    """What a rank says of itself at a time.

    Attributes:
        number: counts the beats.
        asks: of rank 0: that all write their stacks.
    """

    number: int
    ticks: int
    step: int
    place: str
    is_patient: bool
    doubts: bool
    asks: bool
    host: str

    def text(self) -> str:
        """It, as it goes through the store."""
        return json.dumps(self)

    @classmethod
    def read(cls, text: bytes) -> "Beat | None":
        """What was written by `text`; None of a rank that has not come yet."""
        return cls(*json.loads(text)) if text else None


@dataclass
class Ear:
    """What a rank has heard of others.

    Time is counted in its own turns of listening: a job that is suspended as a whole, for an hour or a night, has not
    missed any.
    """

    last: dict[int, Beat] = field(default_factory=dict)
    silent: dict[int, int] = field(default_factory=dict)
    still: dict[int, int] = field(default_factory=dict)

    def hear(self, beats: Mapping[int, Beat | None]) -> None:
        """Takes a turn's beats, by rank; those that have not come yet are None."""
        for rank, beat in beats.items():
            if beat is None:
                continue
            last = self.last.get(rank)
            is_new = last is None
            self.silent[rank] = 0 if is_new or beat.number != last.number else self.silent[rank] + 1
            has_moved = is_new or (beat.ticks, beat.place) != (last.ticks, last.place)
            self.still[rank] = 0 if has_moved else self.still[rank] + 1
            self.last[rank] = beat

    def dead(self, turns: int) -> list[int]:
        """The ranks that have said nothing for so many turns, once one has; a turn less counts for its neighbours."""
        there = [rank for rank, beat in self.last.items() if beat.place != LEFT]
        if not any(self.silent[rank] >= turns for rank in there):
            return []
        return sorted(rank for rank in there if self.silent[rank] >= max(1, turns - 1))

    def is_hung(self, turns: float) -> bool:
        """Whether a rank has stood still for so many turns; for more while any has a reason to take its time."""
        if any(beat.place == STAGING for beat in self.last.values()):
            return False
        there = [rank for rank, beat in self.last.items() if beat.place != LEFT]
        limit = turns * (PATIENT if any(self.last[rank].is_patient for rank in there) else 1)
        return any(self.still[rank] >= limit for rank in there)

    @property
    def doubts(self) -> bool:
        """Whether a rank has lost a connection to another."""
        return any(beat.doubts for beat in self.last.values())

    @property
    def hosts(self) -> dict[int, str]:
        """Where each rank is that was heard."""
        return {rank: beat.host for rank, beat in self.last.items()}

    def lagging(self, collectives: Mapping[int, int]) -> list[int]:
        """The ranks that are behind all others: by their ticks, then by how many collectives they have begun.

        Args:
            collectives: of each rank for which that is known.
        """
        there = [rank for rank, beat in self.last.items() if beat.place != LEFT]
        fewest = min(self.last[rank].ticks for rank in there)
        behind = [rank for rank in there if self.last[rank].ticks == fewest]
        if len(behind) > 1 and all(rank in collectives for rank in behind):
            least = min(collectives[rank] for rank in behind)
            behind = [rank for rank in behind if collectives[rank] == least]
        return sorted(behind)


def named(ranks: list[int], hosts: Mapping[int, str]) -> str:
    """`ranks` with their hosts, in words: "ranks 8 to 15 on node02"."""
    if len(ranks) == 1:
        return f"rank {ranks[0]} on {hosts[ranks[0]]}"
    is_row = ranks == list(range(ranks[0], ranks[-1] + 1)) and len(ranks) > 2
    shown = ", ".join(map(str, ranks[:8])) + (" ..." if len(ranks) > 8 else "")
    places = list(dict.fromkeys(hosts[rank] for rank in ranks))
    on = ", ".join(places[:4]) + (f" and {len(places) - 4} more" if len(places) > 4 else "")
    return f"ranks {f'{ranks[0]} to {ranks[-1]}' if is_row else shown} on {on}"
