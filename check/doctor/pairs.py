"""From failed knocks to the node, or the pair of nodes, that is to blame."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from check.doctor.findings import Finding
from check.doctor.probe import FIRST_PORT, NUM_PORTS, REFUSED, STALLED, TIMED_OUT, UNREACHABLE

EPHEMERAL, MEETING = "ephemeral", "rendezvous"
MOST_LINES = 6


@dataclass(frozen=True)
class Node:
    """A node, and where it listens."""

    host: str
    interface: str
    address: str


@dataclass(frozen=True)
class Knock:
    """One node's knock at another's port, and what was wrong; nothing where all was well."""

    source: int
    target: int
    kind: str
    port: int
    wrong: str
    ms: float


def judge(nodes: Sequence[Node], knocks: Sequence[Knock], ephemeral: str) -> list[Finding]:
    """What the failed knocks come from: all nodes, single nodes, single pairs.

    Args:
        nodes: those that the knocks speak of by number.
        knocks: failed ones and others.
        ephemeral: the range of the ports that the kernel gives out.
    """
    found: list[Finding] = []
    for stalled in (False, True):
        about = _About(nodes, knocks, ephemeral, stalled)
        bad = [knock for knock in knocks if knock.wrong and (knock.wrong == STALLED) == stalled]
        everywhere = [kind for kind in (EPHEMERAL, MEETING) if _is_everywhere(kind, knocks, bad, len(nodes))]
        if everywhere:
            of_all = [knock for knock in bad if knock.kind in everywhere]
            found.append(about.all_nodes(of_all))
            bad = [knock for knock in bad if knock not in of_all]
        named: set[int] = set()
        while (node := odd_one(knocks, bad)) is not None:
            of_node = [knock for knock in bad if node in (knock.source, knock.target)]
            found.append(about.one_node(node, of_node, named))
            named.add(node)
            bad = [knock for knock in bad if knock not in of_node]
        for pair in sorted({_pair(knock) for knock in bad}):
            found.append(about.one_pair([knock for knock in bad if _pair(knock) == pair]))
    return found


def odd_one(knocks: Sequence[Knock], bad: Sequence[Knock]) -> int | None:
    """The node that failures with two others at least, and with half of those it had to do with, have in common."""
    partners = _partners(bad)
    ranked = sorted(partners, key=lambda node: len(partners[node]), reverse=True)
    if not ranked or len(partners[ranked[0]]) < 2:
        return None
    first = len(partners[ranked[0]])
    # Nodes that are cut off fail equally often; but where as many fail only among themselves, none is the odd one.
    tied = sum(len(others) == first for others in partners.values())
    if tied > 1 and tied >= first:
        return None
    return ranked[0] if 2 * first >= len(_partners(knocks)[ranked[0]]) else None


def _partners(knocks: Sequence[Knock]) -> dict[int, set[int]]:
    partners: dict[int, set[int]] = {}
    for knock in knocks:
        partners.setdefault(knock.source, set()).add(knock.target)
        partners.setdefault(knock.target, set()).add(knock.source)
    return partners


def _pair(knock: Knock) -> tuple[int, int]:
    return min(knock.source, knock.target), max(knock.source, knock.target)


def _is_everywhere(kind: str, knocks: Sequence[Knock], bad: Sequence[Knock], num_nodes: int) -> bool:
    of_kind = [knock for knock in knocks if knock.kind == kind]
    return num_nodes > 2 and bool(of_kind) and len(of_kind) == sum(knock.kind == kind for knock in bad)


@dataclass(frozen=True)
class _About:
    """Words for failed knocks."""

    nodes: Sequence[Node]
    knocks: Sequence[Knock]
    ephemeral: str
    stalled: bool

    def all_nodes(self, bad: Sequence[Knock]) -> Finding:
        return self._finding("", "no node reaches any other", bad)

    def one_node(self, node: int, bad: Sequence[Knock], named: Collection[int]) -> Finding:
        """What is wrong with a node, but for the knocks of those that were `named` before."""
        host = self.nodes[node].host
        incoming = [knock.source for knock in bad if knock.target == node]
        outgoing = [knock.target for knock in bad if knock.source == node]
        if incoming and outgoing:
            wrong = (
                f"{host} and {self._who(node, incoming + outgoing, named, 'the other nodes')} do not reach each other"
            )
        elif incoming:
            wrong = f"{host} can't be reached from {self._who(node, incoming, named)}"
        else:
            wrong = f"{host} does not reach {self._who(node, outgoing, named)}"
        return self._finding(host, wrong, bad)

    def one_pair(self, bad: Sequence[Knock]) -> Finding:
        ways = sorted({(knock.source, knock.target) for knock in bad})
        source, target = (self.nodes[node].host for node in ways[0])
        if len(ways) > 1:
            return self._finding(f"{source} <-> {target}", f"{source} and {target} do not reach each other", bad)
        return self._finding(f"{source} -> {target}", f"{source} does not reach {target}", bad)

    def _who(self, node: int, others: Sequence[int], named: Collection[int], all_others: str = "any other node") -> str:
        """The others, in these words where they are all that it had to do with, but for those `named` before."""
        if set(others) >= _partners(self.knocks)[node].difference(named):
            return all_others
        return ", ".join(self.nodes[other].host for other in sorted(set(others)))

    def _finding(self, host: str, wrong: str, bad: Sequence[Knock]) -> Finding:
        kinds = {knock.kind for knock in bad}
        where = " and ".join(self._range(kind) for kind in sorted(kinds))
        lines = [self._line(knock) for knock in bad[:MOST_LINES]]
        more = [f"and {len(bad) - MOST_LINES} more"] if len(bad) > MOST_LINES else []
        # Only node 0 listens on a port of the range at which ranks meet; the next job may have another node there.
        is_fatal = EPHEMERAL in kinds or any(knock.target == 0 for knock in bad)
        name = "port"
        if self.stalled:
            wrong, name = f"{wrong} with more than small messages", "mtu"
        elif len(kinds) < len({knock.kind for knock in self.knocks}):
            wrong += f" on {where}"
        return Finding(
            "fault" if is_fatal else "warning", name, host, wrong, "; ".join([*lines, *more]), self._fix(bad, where)
        )

    def _range(self, kind: str) -> str:
        if kind == EPHEMERAL:
            return f"ports {self.ephemeral}, on which gloo and NCCL listen"
        return f"ports {FIRST_PORT}-{FIRST_PORT + NUM_PORTS - 1}, at which ranks meet"

    def _line(self, knock: Knock) -> str:
        source, target = self.nodes[knock.source], self.nodes[knock.target]
        return f"{source.host} -> {target.host} {target.address} port {knock.port} ({knock.kind}): {knock.wrong}"

    def _fix(self, bad: Sequence[Knock], where: str) -> str:
        target = self.nodes[bad[0].target]
        source = self.nodes[bad[0].source]
        wrong = {knock.wrong for knock in bad}
        if self.stalled:
            return (
                f"`ip link show {source.interface}` on both: the MTU has to be the same on all nodes and switches; "
                f"`ping -M do -s 8972 {target.address}` on {source.host} shows what gets through"
            )
        if wrong <= {TIMED_OUT, REFUSED}:
            return f"let TCP through between the nodes of a job on {where} (`nft list ruleset`, `iptables -S` on both)"
        if UNREACHABLE in wrong:
            return f"`ip route get {target.address}` on {source.host}; or another network for all: --interface NAME"
        return f"see what stands between them at {target.address} (a proxy, a second host with that address)"
