"""Whether the nodes' clocks agree."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from muster.check.doctor.finding import Finding
from muster.check.options import DoctorOptions
from muster.check.ranks import gather_hosts, leads_host
from muster.train.distributed.world import World
from muster.units import listed

NAME = "clocks"

LIMIT_S = 1.0
"""Below it nothing that a training does goes wrong."""


@dataclass(frozen=True)
class Facts:
    """When a node came to an exchange between all nodes, and when it left it, by its own clock."""

    came_s: float
    left_s: float

    def ahead_s(self, other: "Facts") -> float:
        """By how much this clock is ahead of another one."""
        return (self.came_s + self.left_s - other.came_s - other.left_s) / 2

    def doubt_s(self, other: "Facts") -> float:
        """More than this `ahead_s` can't be wrong by."""
        return (self.left_s - self.came_s + other.left_s - other.came_s) / 2


def gather(world: World, options: DoctorOptions) -> Facts | None:
    """The times between which this host's first rank and those of all others waited for each other.

    No rank leaves an exchange before the last has come to it. So the times that two nodes spend in it have a moment in
    common, and their clocks differ by as much as the middles of these times do, give or take half of both times.
    """
    gather_hosts(world, None)  # that all come to the next one at about the same time
    came_s = time.time()
    gather_hosts(world, None)
    return Facts(came_s, time.time()) if leads_host(world) else None


def findings(by_host: Mapping[str, Sequence[Facts]]) -> list[Finding]:
    """Which clocks are not like the middle one: one finding."""
    nodes = {host: facts[0] for host, facts in by_host.items()}
    ordered = sorted(nodes, key=lambda host: nodes[host].came_s + nodes[host].left_s)
    middle = ordered[(len(ordered) - 1) // 2]
    ahead_s = {host: node.ahead_s(nodes[middle]) for host, node in nodes.items()}
    doubt_s = {host: node.doubt_s(nodes[middle]) for host, node in nodes.items()}
    off = [host for host in nodes if abs(ahead_s[host]) - doubt_s[host] > LIMIT_S]
    if not off:
        return []
    shown = listed([f"{ahead_s[host]:+.3f} s on {host}" for host in off])
    widest_s = max(ahead_s.values()) - min(ahead_s.values())
    return [
        Finding(
            "warning",
            "clock",
            # Where no time has a majority nobody can tell which clock is right.
            listed(off if 2 * len(off) < len(nodes) else nodes),
            f"the clocks of the nodes differ by up to {widest_s:.1f} s: time limits are seen too early or too late, "
            "certificates and tokens may not be valid, and times in logs and files mislead",
            f"against {middle}, {shown}, give or take {max(doubt_s[host] for host in off):.3f} s",
            "tell the administrators; there, `chronyc tracking` or `timedatectl` says whether a node follows a time "
            "server",
        )
    ]


def summary(by_host: Mapping[str, Sequence[Facts]]) -> str:
    nodes = [facts[0] for facts in by_host.values()]
    if len(nodes) == 1:
        return "one node, one clock"
    # What their clocks showed at the moment that they have in common lies between these two.
    widest_s = max(node.left_s for node in nodes) - min(node.came_s for node in nodes)
    return f"the clocks of {len(by_host)} nodes agree to {max(0.001, widest_s):.3f} s"
