"""Whether the nodes' clocks agree."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median_low

from muster.check.doctor.findings import Finding, Part
from muster.check.options import DoctorOptions
from muster.check.ranks import gather_nodes, listed
from muster.train.world import World

LIMIT_S = 1.0
"""Below it nothing that a training does goes wrong."""

MISLEADS = (
    "the job's time limit is seen too early or too late there, certificates and tokens may not be valid, "
    "and times in logs and files mislead"
)

ROUNDS = 4
MOST_SHOWN = 16
_ONE_BY_ONE_UP_TO = 64


@dataclass(frozen=True)
class Reading:
    """A node's clock as rank 0 saw it.

    Attributes:
        host: its name.
        ahead_s: by how much it is ahead of rank 0's.
        give_or_take_s: half of the way there and back: more than this it can't be wrong by.
    """

    host: str
    ahead_s: float
    give_or_take_s: float


def check(world: World, options: DoctorOptions) -> Part:
    """What the clocks of all nodes say, by short messages through the store."""
    ranks = gather_nodes(world, [world.rank, world.host])
    turn = f"clock/{next(world.turns)}"
    if world.store is None or len(ranks) < 2:
        return Part("clocks", "one node, one clock")
    rounds = ROUNDS if len(ranks) <= _ONE_BY_ONE_UP_TO else 1
    if not world.main:
        if world.local_rank == 0:
            _answer(world, turn, rounds)
        return Part("clocks")
    readings = [Reading(world.host, 0.0, 0.0)]
    readings += [_ask(world, turn, rounds, rank, host) for rank, host in ranks[1:]]
    return findings(readings)


def _ask(world: World, turn: str, rounds: int, rank: int, host: str) -> Reading:
    """One node's clock, by the round trip that took least.

    Source: https://datatracker.ietf.org/doc/html/rfc5905#section-8
    """
    assert world.store is not None
    best = Reading(host, 0.0, float("inf"))
    for number in range(rounds):
        key = f"{turn}/{number}"
        sent, started = time.time(), time.perf_counter()
        world.store.set(f"{key}/ask/{rank}/all", "")
        world.wait([f"{key}/tell/{rank}"])
        there = float(world.store.get(f"{key}/tell/{rank}"))
        took_s = time.perf_counter() - started
        if took_s / 2 < best.give_or_take_s:
            best = Reading(host, there - (sent + took_s / 2), took_s / 2)
    return best


def _answer(world: World, turn: str, rounds: int) -> None:
    assert world.store is not None
    for number in range(rounds):
        key = f"{turn}/{number}"
        world.wait([f"{key}/ask/{world.rank}/all"])
        world.store.set(f"{key}/tell/{world.rank}", repr(time.time()))


def findings(readings: Sequence[Reading]) -> Part:
    """Which clocks are not like most others; of two, the second is held against the first.

    Where no time has a majority nobody can tell which clock is right: there is one finding, of all of them.
    """
    usual_s = median_low([reading.ahead_s for reading in readings]) if len(readings) > 2 else 0.0
    odd = [reading for reading in readings if abs(reading.ahead_s - usual_s) - reading.give_or_take_s > LIMIT_S]
    widest_s = max(reading.ahead_s for reading in readings) - min(reading.ahead_s for reading in readings)
    doubt_s = max(reading.give_or_take_s for reading in readings)
    values = {reading.host: [round(reading.ahead_s, 4), round(reading.give_or_take_s, 4)] for reading in readings}
    says = f"the clocks of {len(readings)} nodes agree to {max(0.001, widest_s + doubt_s):.3f} s"
    reference = "most other nodes" if len(readings) > 2 else readings[0].host
    if len(readings) > 2 and 2 * len(odd) >= len(readings):
        found = [_of_all(readings, widest_s, doubt_s)]
    else:
        found = [_finding(reading, reading.ahead_s - usual_s, reference) for reading in odd]
    return Part("clocks", says, found, {"ahead of rank 0 (s), give or take (s)": values})


def _of_all(readings: Sequence[Reading], widest_s: float, doubt_s: float) -> Finding:
    shown = listed([f"{reading.ahead_s:+.3f} s on {reading.host}" for reading in readings], MOST_SHOWN)
    return Finding(
        "warning",
        "clock",
        listed([reading.host for reading in readings]),
        f"the clocks of {len(readings)} nodes differ by up to {widest_s:.1f} s: {MISLEADS}",
        f"against rank 0, {shown}, give or take {doubt_s:.3f} s, by the nodes' date and time",
        "tell the administrators of these nodes; on each, `chronyc tracking` or `timedatectl` says whether it follows "
        "a time server",
    )


def _finding(reading: Reading, off_s: float, reference: str) -> Finding:
    way = "ahead of" if off_s > 0 else "behind"
    return Finding(
        "warning",
        "clock",
        reading.host,
        f"the clock of {reading.host} is {abs(off_s):.1f} s {way} that of {reference}: {MISLEADS}",
        f"{off_s:+.3f} s, give or take {reading.give_or_take_s:.3f} s, by the node's date and time",
        f"tell the administrators of {reading.host}; there, `chronyc tracking` or `timedatectl` says whether it "
        "follows a time server",
    )
