"""Whether the nodes' clocks agree."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median_low

from muster.check.doctor.facts import Finding, Part
from muster.check.ranks import gather_nodes, listed
from muster.train.world import World

LIMIT_S = 1.0
"""Below it nothing that a training does goes wrong."""

MISLEADS = (
    "the job's time limit is seen too early or too late there, certificates and tokens may not be valid, "
    "and times in logs and files mislead"
)

MOST_SHOWN = 16


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


def check(world: World) -> Part:
    """What the clocks of all nodes say.

    No rank leaves a `gather` before the last has come to it. So the times that two nodes spend in it have a moment in
    common, and their clocks differ by as much as the middles of these times do, give or take half of both times.
    """
    gather_nodes(world, None, to_all=False)  # that all come to the next one at about the same time
    came = time.time()
    gather_nodes(world, None, to_all=False)
    times = gather_nodes(world, [world.host, came, time.time()], to_all=False)
    if not world.main:
        return Part("clocks")
    if len(times) < 2:
        return Part("clocks", "one node, one clock")
    (first, first_came, first_left), *others = times
    readings = [Reading(first, 0.0, 0.0)]
    for host, came, left in others:
        ahead_s = (came + left - first_came - first_left) / 2
        readings.append(Reading(host, ahead_s, (left - came + first_left - first_came) / 2))
    return findings(readings)


def findings(readings: Sequence[Reading]) -> Part:
    """Which clocks are not like most others; of two, the second is held against the first.

    Where no time has a majority nobody can tell which clock is right: there is one finding, of all of them.
    """
    usual_s = median_low([reading.ahead_s for reading in readings]) if len(readings) > 2 else 0.0
    outliers = [reading for reading in readings if abs(reading.ahead_s - usual_s) - reading.give_or_take_s > LIMIT_S]
    widest_s = max(reading.ahead_s for reading in readings) - min(reading.ahead_s for reading in readings)
    doubt_s = max(reading.give_or_take_s for reading in readings)
    values = {reading.host: [round(reading.ahead_s, 4), round(reading.give_or_take_s, 4)] for reading in readings}
    says = f"the clocks of {len(readings)} nodes agree to {max(0.001, widest_s + doubt_s):.3f} s"
    found: list[Finding] = []
    if len(readings) > 2 and 2 * len(outliers) >= len(readings):
        shown = listed([f"{reading.ahead_s:+.3f} s on {reading.host}" for reading in readings], MOST_SHOWN)
        hosts = listed([reading.host for reading in readings])
        wrong = f"the clocks of {len(readings)} nodes differ by up to {widest_s:.1f} s"
        found.append(_finding(hosts, wrong, f"against rank 0, {shown}, give or take {doubt_s:.3f} s"))
        outliers = []
    reference = "most other nodes" if len(readings) > 2 else readings[0].host
    for reading in outliers:
        off_s = reading.ahead_s - usual_s
        way = "ahead of" if off_s > 0 else "behind"
        wrong = f"the clock of {reading.host} is {abs(off_s):.1f} s {way} that of {reference}"
        found.append(_finding(reading.host, wrong, f"{off_s:+.3f} s, give or take {reading.give_or_take_s:.3f} s"))
    return Part("clocks", says, found, {"ahead of rank 0 (s), give or take (s)": values})


def _finding(hosts: str, wrong: str, seen: str) -> Finding:
    fix = (
        f"tell the administrators of {hosts}; there, `chronyc tracking` or `timedatectl` says whether a node follows a "
        "time server"
    )
    return Finding("warning", "clock", hosts, f"{wrong}: {MISLEADS}", f"{seen}, by the date and time there", fix)
