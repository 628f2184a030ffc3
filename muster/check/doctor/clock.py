"""Whether the nodes' clocks agree."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

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
    gather_hosts(world, None, to_all=False)  # that all come to the next one at about the same time
    came_s = time.time()
    gather_hosts(world, None, to_all=False)
    return Facts(came_s, time.time()) if leads_host(world) else None


def findings(by_host: Mapping[str, Sequence[Facts]]) -> list[Finding]:
    """Which clocks are not like most others; of two, the second is held against the first.

    Where no time has a majority nobody can tell which clock is right: there is one finding, of all of them.
    """
    nodes = {host: facts[0] for host, facts in by_host.items()}
    first, *others = nodes
    usual = _usual(nodes) if len(others) > 1 else nodes[first]
    off = {
        host: node.ahead_s(usual)
        for host, node in nodes.items()
        if abs(node.ahead_s(usual)) - node.doubt_s(usual) > LIMIT_S
    }
    if len(others) > 1 and 2 * len(off) >= len(nodes):
        ahead = {host: node.ahead_s(nodes[first]) for host, node in nodes.items()}
        shown = listed([f"{ahead_s:+.3f} s on {host}" for host, ahead_s in ahead.items()], MOST_SHOWN)
        wrong = f"the clocks of {len(nodes)} nodes differ by up to {max(ahead.values()) - min(ahead.values()):.1f} s"
        doubt_s = max(nodes[host].doubt_s(nodes[first]) for host in others)
        return [_finding(listed(nodes), wrong, f"against rank 0, {shown}", doubt_s)]
    reference = "most other nodes" if len(others) > 1 else first
    found: list[Finding] = []
    for host, off_s in off.items():
        wrong = f"the clock of {host} is {abs(off_s):.1f} s {'ahead of' if off_s > 0 else 'behind'} that of {reference}"
        found.append(_finding(host, wrong, f"{off_s:+.3f} s", nodes[host].doubt_s(usual)))
    return found


def summary(by_host: Mapping[str, Sequence[Facts]]) -> str:
    """How well the clocks agree."""
    first, *others = (facts[0] for facts in by_host.values())
    if not others:
        return "one node, one clock"
    ahead_s = [0.0, *(other.ahead_s(first) for other in others)]
    widest_s = max(ahead_s) - min(ahead_s) + max(other.doubt_s(first) for other in others)
    return f"the clocks of {len(by_host)} nodes agree to {max(0.001, widest_s):.3f} s"


def _usual(nodes: Mapping[str, Facts]) -> Facts:
    """The facts of the node whose clock is the middle one."""
    ordered = sorted(nodes.values(), key=lambda node: node.came_s + node.left_s)
    return ordered[(len(ordered) - 1) // 2]


def _finding(hosts: str, wrong: str, seen: str, doubt_s: float) -> Finding:
    fix = (
        f"tell the administrators of {hosts}; there, `chronyc tracking` or `timedatectl` says whether a node follows a "
        "time server"
    )
    return Finding(
        "warning",
        "clock",
        hosts,
        f"{wrong}: {MISLEADS}",
        f"{seen}, give or take {doubt_s:.3f} s, by the date and time there",
        fix,
    )
