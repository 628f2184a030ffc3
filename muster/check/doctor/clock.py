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
"""Seconds by which clocks may differ without harm to a training."""


@dataclass(frozen=True)
class Facts:
    """The times at which a node entered and left an exchange between all nodes, by its own clock."""

    came_s: float
    left_s: float

    def ahead_s(self, other: "Facts") -> float:
        """The estimated seconds by which this clock is ahead of another one."""
        return (self.came_s + self.left_s - other.came_s - other.left_s) / 2

    def doubt_s(self, other: "Facts") -> float:
        """The largest possible error of `ahead_s`, in seconds."""
        return (self.left_s - self.came_s + other.left_s - other.came_s) / 2


def gather(world: World, options: DoctorOptions) -> Facts | None:
    """The times at which this host's first rank entered and left an exchange with those of all other hosts.

    No rank leaves an exchange before the last one has entered it. So the intervals that two nodes spend in it overlap,
    and their clocks differ by as much as the midpoints of the intervals, give or take half the sum of their lengths.
    """
    gather_hosts(world, None)  # so that all enter the next one at about the same time
    came_s = time.time()
    gather_hosts(world, None)
    return Facts(came_s, time.time()) if leads_host(world) else None


def findings(by_host: Mapping[str, Sequence[Facts]]) -> list[Finding]:
    """One finding if any clock certainly differs from the median one by more than LIMIT_S; none otherwise."""
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
            # Unless most nodes agree, it is unknown which clocks are right.
            listed(off if 2 * len(off) < len(nodes) else nodes),
            f"the clocks of the nodes differ by up to {widest_s:.1f} s: time limits are noticed too early or too "
            "late, certificates and tokens may not be valid, and times in logs and files are misleading",
            f"relative to {middle}: {shown}, with an error of at most {max(doubt_s[host] for host in off):.3f} s",
            "tell the administrators; on a node, `chronyc tracking` or `timedatectl` shows whether it follows a time "
            "server",
        )
    ]


def summary(by_host: Mapping[str, Sequence[Facts]]) -> str:
    nodes = [facts[0] for facts in by_host.values()]
    if len(nodes) == 1:
        return "one node, one clock"
    # When all nodes were in the exchange, all clocks showed times between these two.
    widest_s = max(node.left_s for node in nodes) - min(node.came_s for node in nodes)
    return f"the clocks of {len(by_host)} nodes agree to {max(0.001, widest_s):.3f} s"
