"""From lookups to the host on which a name leads somewhere else."""

import ipaddress
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from check.doctor.findings import Finding

SLOW_S = 3.0
"""Longer than this no lookup should take: by default the resolver asks a second server after 5 s."""

MOST = 4


class Found(NamedTuple):
    """What a name led to on one node, or an address.

    Attributes:
        looker: the rank that asked.
        target: the rank on the node that was meant.
        name: the name, or the address where `is_back`.
        addresses: what it led to; where `is_back`, the name and then the addresses of that.
        wrong: why there are none.
        line: the line of /etc/hosts that has the name.
        took_s: seconds.
        is_back: whether an address was asked for its name.
    """

    looker: int
    target: int
    name: str
    addresses: list[str]
    wrong: str
    line: str
    took_s: float
    is_back: bool


class Named(NamedTuple):
    """A node, with its names and addresses.

    Attributes:
        rank: of its first process.
        host: the name that it has for itself.
        listed: the scheduler's name for it; empty where it is not known.
        addresses: of its interfaces, without loopback.
        address: the one by which the others find it.
        interface: which gloo takes; empty where it goes by the host's own name.
        own: what its own name leads to there.
    """

    rank: int
    host: str
    listed: str
    addresses: list[str]
    address: str
    interface: str
    own: Found

    def names(self) -> list[str]:
        """Its names, each once."""
        return list(dict.fromkeys(name for name in (self.host, self.listed) if name))


def named(told: Mapping[str, Any]) -> Named:
    """The node in what came through the store."""
    fields: dict[str, Any] = {**told, "own": Found(**told["own"])}
    return Named(**fields)


def is_loopback(address: str) -> bool:
    """Whether this is an address that never leaves its host; False for names."""
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def judge(nodes: Sequence[Named], found: Sequence[Found], master: str) -> list[Finding]:
    """What is wrong with the names of `nodes`, of which the first is to be at MASTER_ADDR=`master`."""
    by_rank = {node.rank: node for node in nodes}
    findings = _own_names(nodes)
    astray = [one for one in found if not one.is_back and _is_astray(one, by_rank, found)]
    for name in dict.fromkeys(one.name for one in astray):
        of_name = [one for one in astray if one.name == name]
        others = {one.looker for one in found if one.name == name}
        if len(others) > 1 and len(of_name) == len(others):
            findings.append(_everywhere(of_name, by_rank, master))
            astray = [one for one in astray if one.name != name]
    for looker in dict.fromkeys(one.looker for one in astray):
        findings.append(_astray([one for one in astray if one.looker == looker], by_rank, master))
    backwards = [one for one in found if one.is_back and _is_other_node(one, nodes)]
    for looker in dict.fromkeys(one.looker for one in backwards):
        findings.append(_backwards([one for one in backwards if one.looker == looker], by_rank))
    slow = [one for one in [*found, *(node.own for node in nodes)] if one.took_s > SLOW_S]
    return findings + _slow(slow, by_rank)


def _own_names(nodes: Sequence[Named]) -> list[Finding]:
    """Own names that lead to no address that others could use, one finding for each kind."""
    kinds: dict[tuple[str, bool], list[Named]] = {}
    for node in nodes:
        first = node.own.addresses[0] if node.own.addresses else ""
        if not first:
            kind = "does not resolve"
        elif is_loopback(first):
            kind = "leads to a loopback address"
        elif first not in node.addresses:
            kind = "leads to an address that is not its own"
        else:
            continue
        kinds.setdefault((kind, bool(node.interface)), []).append(node)
    return [_own_name(kind, is_told, of_kind, len(nodes)) for (kind, is_told), of_kind in kinds.items()]


def _own_name(kind: str, is_told: bool, nodes: Sequence[Named], num_nodes: int) -> Finding:
    hosts = ", ".join(node.host for node in nodes[:MOST]) + (", ..." if len(nodes) > MOST else "")
    so = "gloo is told the interface, what is not told would listen there" if is_told else "gloo listens there"
    first = nodes[0]
    return Finding(
        "warning" if is_told else "fault",
        "name",
        "" if len(nodes) == num_nodes > 2 else ", ".join(node.host for node in nodes),
        f"the own name of {hosts} {kind} there: {so}, and other nodes can't come",
        "; ".join(f"{node.host}: {_seen(node.own)}" for node in nodes[:MOST]),
        f"in /etc/hosts of {hosts}: `{first.address or 'ADDRESS'} {first.host}`, with its address on the network of "
        "the job; or export GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME, as muster does",
    )


def _is_astray(one: Found, by_rank: Mapping[int, Named], found: Sequence[Found]) -> bool:
    target = by_rank[one.target]
    if one.addresses:
        return not set(one.addresses) & set(target.addresses)
    # A name that a node has for itself alone, as containers have, is of no use to others, and nobody uses it.
    is_known = any(other.name == one.name and other.addresses for other in found if not other.is_back)
    return is_known or one.name == target.listed or one.name != target.host


def _everywhere(found: Sequence[Found], by_rank: Mapping[int, Named], master: str) -> Finding:
    target = by_rank[found[0].target]
    lookers = ", ".join(by_rank[one.looker].host for one in found[:MOST]) + (", ..." if len(found) > MOST else "")
    return Finding(
        _level(found, master),
        "name",
        target.host,
        f"the name {found[0].name} does not lead to {target.host} on any other node",
        f"{_seen(found[0])} on {lookers}; {target.host} has {_listing(target.addresses)}",
        f"the name service or the shared /etc/hosts has to have `{target.address} {found[0].name}`",
    )


def _astray(found: Sequence[Found], by_rank: Mapping[int, Named], master: str) -> Finding:
    """What one node has wrong."""
    looker = by_rank[found[0].looker].host
    lines = [f"{_seen(one)}; {by_rank[one.target].host} has {_listing(by_rank[one.target].addresses)}" for one in found]
    names = ", ".join(dict.fromkeys(one.name for one in found))
    fixes = dict.fromkeys(f"`{by_rank[one.target].address} {one.name}`" for one in found)
    place = "/etc/hosts" if any(one.line for one in found) else "the name service (`getent hosts NAME`)"
    return Finding(
        _level(found, master),
        "name",
        looker,
        f"on {looker} the name {names} does not lead where it should",
        "; ".join(lines[:MOST]),
        f"on {looker}, {place} has to have {', '.join(list(fixes)[:MOST])}, as on the other nodes",
    )


def _level(found: Sequence[Found], master: str) -> Any:
    return "fault" if any(one.name == master for one in found) else "warning"


def _is_other_node(one: Found, nodes: Sequence[Named]) -> bool:
    """Whether an address led back to the name of another node than the one that has it."""
    if not one.addresses:
        return False
    name, *addresses = one.addresses
    short = name.partition(".")[0].lower()
    target = next(node for node in nodes if node.rank == one.target)
    if set(addresses) & set(target.addresses) or any(short == own.partition(".")[0].lower() for own in target.names()):
        return False
    others = [node for node in nodes if node.rank != one.target]
    return any(
        short in (own.partition(".")[0].lower() for own in node.names()) or set(addresses) & set(node.addresses)
        for node in others
    )


def _backwards(found: Sequence[Found], by_rank: Mapping[int, Named]) -> Finding:
    looker = by_rank[found[0].looker].host
    lines = [f"{one.name}, of {by_rank[one.target].host}, is {one.addresses[0]} there" for one in found[:MOST]]
    return Finding(
        "warning",
        "name",
        looker,
        f"on {looker} an address leads back to the name of another node",
        "; ".join(lines),
        f"`getent hosts {found[0].name}` on {looker}: mend the reverse entry of the name service, or /etc/hosts there",
    )


def _slow(slow: Sequence[Found], by_rank: Mapping[int, Named]) -> list[Finding]:
    if not slow:
        return []
    hosts = list(dict.fromkeys(by_rank[one.looker].host for one in slow))
    worst = max(slow, key=lambda one: one.took_s)
    return [
        Finding(
            "warning",
            "name",
            "" if len(hosts) == len(by_rank) > 2 else ", ".join(hosts),
            f"a name lookup takes more than {SLOW_S:.0f} s: each start of a training waits for such ones",
            f"{worst.name} took {worst.took_s:.1f} s on {by_rank[worst.looker].host}",
            f"see which servers /etc/resolv.conf names on {hosts[0]}, and whether they answer: `time getent hosts "
            f"{worst.name}`",
        )
    ]


def _seen(one: Found) -> str:
    led = f"leads to {_listing(one.addresses)}" if one.addresses else f"leads nowhere: {one.wrong}"
    return f"{one.name} {led}, by {one.line or 'the name service'}"


def _listing(addresses: Sequence[str]) -> str:
    return ", ".join(addresses[:MOST]) or "no address"
