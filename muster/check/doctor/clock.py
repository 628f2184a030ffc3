"""Whether the nodes' clocks agree."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median_low

from muster.check.doctor.finding import Finding
from muster.check.options import DoctorOptions
from muster.check.ranks import gather_hosts, leads_host, listed
from muster.train.distributed.world import World

NAME = "clocks"

LIMIT_S = 1.0
"""Below it nothing that a training does goes wrong."""

MISLEADS = (
    "the job's time limit is seen too early or too late there, certificates and tokens may not be valid, "
    "and times in logs and files mislead"
)

MOST_SHOWN = 16


@dataclass(frozen=True)
class Facts:
    """When a node came to an exchange between all nodes, and when it left it, by its own clock."""

    came_s: float
    left_s: float


@dataclass(frozen=True)
class Reading:
    """A node's clock, held against rank 0's.

    Attributes:
        host: its name.
        ahead_s: by how much it is ahead.
        give_or_take_s: more than this `ahead_s` can't be wrong by.
    """

    host: str
    ahead_s: float
    give_or_take_s: float


def gather(world: World, options: DoctorOptions) -> Facts | None:
    """The times between which this host's first rank and those of all others waited for each other.

    No rank leaves an exchange before the last has come to it. So the times that two nodes spend in it have a moment in
    common, and their clocks differ by as much as the middles of these times do, give or take half of both times.
    """
    gather_hosts(world, None, to_all=False)  # that all come to the next one at about the same time
    came_s = time.time()
    gather_hosts(world, None, to_all=False)
    return Facts(came_s, time.time()) if leads_host(world) else None


def findings(by_host: Mapping[str, Sequence[Facts]]) -> list[Finding]:
    """Which clocks are not like most others; of two, the second is held against the first.

    Where no time has a majority nobody can tell which clock is right: there is one finding, of all of them.
    """
    readings = _readings(by_host)
    usual_s = median_low([reading.ahead_s for reading in readings]) if len(readings) > 2 else 0.0
    outliers = [reading for reading in readings if abs(reading.ahead_s - usual_s) - reading.give_or_take_s > LIMIT_S]
    found: list[Finding] = []
    if len(readings) > 2 and 2 * len(outliers) >= len(readings):
        shown = listed([f"{reading.ahead_s:+.3f} s on {reading.host}" for reading in readings], MOST_SHOWN)
        hosts = listed([reading.host for reading in readings])
        widest_s, doubt_s = _spread(readings)
        wrong = f"the clocks of {len(readings)} nodes differ by up to {widest_s:.1f} s"
        return [_finding(hosts, wrong, f"against rank 0, {shown}, give or take {doubt_s:.3f} s")]
    reference = "most other nodes" if len(readings) > 2 else readings[0].host
    for reading in outliers:
        off_s = reading.ahead_s - usual_s
        way = "ahead of" if off_s > 0 else "behind"
        wrong = f"the clock of {reading.host} is {abs(off_s):.1f} s {way} that of {reference}"
        found.append(_finding(reading.host, wrong, f"{off_s:+.3f} s, give or take {reading.give_or_take_s:.3f} s"))
    return found


def summary(by_host: Mapping[str, Sequence[Facts]]) -> str:
    """How well the clocks agree."""
    if len(by_host) < 2:
        return "one node, one clock"
    return f"the clocks of {len(by_host)} nodes agree to {max(0.001, sum(_spread(_readings(by_host)))):.3f} s"


def _readings(by_host: Mapping[str, Sequence[Facts]]) -> list[Reading]:
    (first, (reference, *_)), *others = by_host.items()
    readings = [Reading(first, 0.0, 0.0)]
    for host, (facts, *_) in others:
        ahead_s = (facts.came_s + facts.left_s - reference.came_s - reference.left_s) / 2
        give_or_take_s = (facts.left_s - facts.came_s + reference.left_s - reference.came_s) / 2
        readings.append(Reading(host, ahead_s, give_or_take_s))
    return readings


def _spread(readings: Sequence[Reading]) -> tuple[float, float]:
    """Seconds between the first and the last clock, and by which this may be wrong."""
    ahead_s = [reading.ahead_s for reading in readings]
    return max(ahead_s) - min(ahead_s), max(reading.give_or_take_s for reading in readings)


def _finding(hosts: str, wrong: str, seen: str) -> Finding:
    fix = (
        f"tell the administrators of {hosts}; there, `chronyc tracking` or `timedatectl` says whether a node follows a "
        "time server"
    )
    return Finding("warning", "clock", hosts, f"{wrong}: {MISLEADS}", f"{seen}, by the date and time there", fix)
