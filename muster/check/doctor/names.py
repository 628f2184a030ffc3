"""Whether names lead to the nodes that bear them, on all nodes, and how long it takes to look them up."""

import ipaddress
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from threading import Thread
from typing import Any, NamedTuple

from muster.check.doctor.findings import Finding, Level, Part
from muster.check.doctor.network import choose, own_addresses, targets
from muster.check.options import DoctorOptions
from muster.check.ranks import gather_nodes, listed, listed_nodes
from muster.train.world import World

HOSTS = Path("/etc/hosts")

LIMIT_S = 10.0
"""A name that has no address by then has none."""

SLOW_S = 3.0
"""Longer than this no lookup should take: by default the resolver asks a second server after 5 s."""

MOST = 4


class Lookup(NamedTuple):
    """What a name led to on one node.

    Attributes:
        source: the rank that asked.
        target: the rank on the node that was meant.
        name: the name; the address where `is_reverse`.
        wrong: why there are no addresses.
        line: the line of /etc/hosts that has the name.
        took_s: seconds.
        is_reverse: whether an address was asked for its name, as torch does for its messages: only the time counts.
    """

    source: int
    target: int
    name: str
    addresses: list[str]
    wrong: str = ""
    line: str = ""
    took_s: float = 0.0
    is_reverse: bool = False


class Node(NamedTuple):
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
    own: Lookup

    def names(self) -> list[str]:
        """Its names, each once."""
        return list(dict.fromkeys(name for name in (self.host, self.listed) if name))


def check(world: World, options: DoctorOptions) -> Part:
    """What the nodes' names lead to on each node."""
    own = _own(world) if world.local_rank == 0 else None
    nodes = [Node(*values[:-1], own=Lookup(*values[-1])) for values in gather_nodes(world, own)]
    if len(nodes) < 2:
        return Part("names", "one node: no name is needed")
    master = os.environ.get("MASTER_ADDR", "")
    if is_loopback(master) or master == "localhost":
        return Part("names", "all ranks are on this machine: no name is needed")
    nodes = with_listed(nodes, listed_nodes())
    lookups = [] if own is None else _look_up_others(nodes, world.rank, options)
    found = [Lookup(*one) for of_one in gather_nodes(world, lookups, to_all=False) for one in of_one]
    if not world.main:
        return Part("names")
    slowest = max(found, key=lambda one: one.took_s, default=None)
    says = f"{len(found)} lookups of {len(nodes)} nodes lead where they should"
    values = {} if slowest is None else {"slowest lookup (s)": slowest.took_s, "of": slowest.name}
    return Part("names", says, findings(nodes, found, master), values)


def _own(world: World) -> Node:
    interfaces = own_addresses()
    ((own, took_s),) = ask_all([lambda: addresses_of(world.host)], LIMIT_S)
    return Node(
        rank=world.rank,
        host=world.host,
        listed="",
        addresses=[one for of_one in interfaces.values() for one in of_one if not is_loopback(one)],
        address=choose(os.environ, interfaces)[1],
        interface=os.environ.get("GLOO_SOCKET_IFNAME", ""),
        own=_lookup(world.rank, world.rank, world.host, own, took_s),
    )


def with_listed(nodes: Sequence[Node], names: Sequence[str]) -> list[Node]:
    """The nodes with the names that the scheduler's list has for them.

    The list is by node_rank, which in an elastic launch need not be the order of ranks.
    """
    if len(names) != len(nodes):
        return list(nodes)
    by_short = {_short(name): name for name in names}
    hosts = {_short(node.host) for node in nodes}
    # A node whose own name is not in the list has the one at its place, unless that is another node's.
    return [
        node._replace(listed=by_short.get(_short(node.host), "" if _short(name) in hosts else name))
        for node, name in zip(nodes, names, strict=True)
    ]


def _short(name: str) -> str:
    return name.partition(".")[0].lower()


def _look_up_others(nodes: Sequence[Node], rank: int, options: DoctorOptions) -> list[Lookup]:
    own = next(index for index, node in enumerate(nodes) if node.rank == rank)
    asked: list[tuple[str, int, bool]] = []
    for other in targets(own, len(nodes), options):
        asked += [(name, other, False) for name in nodes[other].names()]
        asked += [(nodes[other].address, other, True)] if nodes[other].address else []
    master = os.environ.get("MASTER_ADDR", "")
    if own != 0 and master not in nodes[0].names():
        asked.append((master, 0, False))
    answers = ask_all([_question(name, is_reverse) for name, _, is_reverse in asked], LIMIT_S)
    return [
        _lookup(rank, nodes[other].rank, name, answer, took_s, is_reverse)
        for (name, other, is_reverse), (answer, took_s) in zip(asked, answers, strict=True)
    ]


def _question(name: str, is_reverse: bool) -> Callable[[], Any]:
    return lambda: name_of(name) if is_reverse else addresses_of(name)


def _lookup(source: int, target: int, name: str, answer: Any, took_s: float, is_reverse: bool = False) -> Lookup:
    late: tuple[list[str], str] = ([], f"no answer within {LIMIT_S:.0f} s")
    addresses, wrong = late if answer is None else answer
    try:
        line = "" if is_reverse else line_of(name, HOSTS.read_text(errors="replace"))
    except OSError:
        line = ""
    return Lookup(source, target, name, addresses, wrong, line, round(took_s, 3), is_reverse)


def ask_all(questions: Sequence[Callable[[], Any]], limit_s: float) -> list[tuple[Any, float]]:
    """(answer, seconds) of each question, all asked at once; None for those without an answer in time.

    The resolver has no deadline of its own: what is late is left behind in a thread. What is slow is asked again, and
    the shorter time counts: the machine may have been busy.
    """
    answers: dict[int, tuple[Any, float]] = {}
    started = time.monotonic()

    def ask(index: int) -> None:
        answers[index] = (questions[index](), time.monotonic() - started)
        if answers[index][1] > SLOW_S:
            again = time.monotonic()
            questions[index]()
            answers[index] = (answers[index][0], min(answers[index][1], time.monotonic() - again))

    threads = [Thread(target=ask, args=(index,), daemon=True) for index in range(len(questions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, started + limit_s - time.monotonic()))
    waited_s = time.monotonic() - started
    return [answers.get(index, (None, waited_s)) for index in range(len(questions))]


def addresses_of(name: str) -> tuple[list[str], str]:
    """(addresses, what is wrong) of a name."""
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        return [], str(error.args[-1] if error.args else error)
    return list(dict.fromkeys(str(entry[4][0]).partition("%")[0] for entry in found)), ""


def name_of(address: str) -> tuple[list[str], str]:
    """([name], "") of an address; nothing where it has no name."""
    try:
        return [socket.getnameinfo((address, 0), socket.NI_NAMEREQD)[0]], ""
    except OSError:
        return [], ""


def line_of(name: str, text: str) -> str:
    """The line in which /etc/hosts, whose content is `text`, has `name`; empty without one."""
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.partition("#")[0].split()
        if name.lower() in (word.lower() for word in words[1:]):
            return f"{HOSTS} line {number}: {' '.join(words)}"
    return ""


def is_loopback(address: str) -> bool:
    """Whether this is an address that never leaves its host; False for names."""
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def findings(nodes: Sequence[Node], lookups: Sequence[Lookup], master: str) -> list[Finding]:
    """What is wrong with the names of `nodes`, of which the first is to be at MASTER_ADDR=`master`."""
    by_rank = {node.rank: node for node in nodes}
    found = _own_names(nodes)
    forward = [one for one in lookups if not one.is_reverse]
    astray = [one for one in forward if _is_astray(one, by_rank, forward)]
    for name in dict.fromkeys(one.name for one in astray):
        of_name = [one for one in astray if one.name == name]
        sources = {one.source for one in forward if one.name == name}
        if len(sources) > 1 and len(of_name) == len(sources):
            found.append(_astray_everywhere(of_name, by_rank, master))
            astray = [one for one in astray if one.name != name]
    for source in dict.fromkeys(one.source for one in astray):
        found.append(_astray_on_node([one for one in astray if one.source == source], by_rank, master))
    slow = [one for one in [*lookups, *(node.own for node in nodes)] if one.took_s > SLOW_S]
    return found + _slow(slow, by_rank)


def _own_names(nodes: Sequence[Node]) -> list[Finding]:
    """Own names that lead to no address that others could use, one finding for each kind."""
    kinds: dict[tuple[str, bool], list[Node]] = {}
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


def _own_name(kind: str, is_told: bool, nodes: Sequence[Node], num_nodes: int) -> Finding:
    hosts = listed([node.host for node in nodes], MOST)
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


def _is_astray(one: Lookup, by_rank: Mapping[int, Node], lookups: Sequence[Lookup]) -> bool:
    target = by_rank[one.target]
    if one.addresses:
        return not set(one.addresses) & set(target.addresses)
    # A name that a node has for itself alone, as containers have, is of no use to others, and nobody uses it.
    is_known = any(other.name == one.name and other.addresses for other in lookups)
    return is_known or one.name == target.listed or one.name != target.host


def _astray_everywhere(found: Sequence[Lookup], by_rank: Mapping[int, Node], master: str) -> Finding:
    """One name that leads astray on all nodes that asked."""
    target = by_rank[found[0].target]
    sources = listed([by_rank[one.source].host for one in found], MOST)
    return Finding(
        _level(found, master),
        "name",
        target.host,
        f"the name {found[0].name} does not lead to {target.host} on any other node",
        f"{_seen(found[0])} on {sources}; {target.host} has {_addresses(target.addresses)}",
        f"the name service or the shared /etc/hosts has to have `{target.address} {found[0].name}`",
    )


def _astray_on_node(found: Sequence[Lookup], by_rank: Mapping[int, Node], master: str) -> Finding:
    """The names that lead astray on one node."""
    source = by_rank[found[0].source].host
    lines = [
        f"{_seen(one)}; {by_rank[one.target].host} has {_addresses(by_rank[one.target].addresses)}" for one in found
    ]
    names = ", ".join(dict.fromkeys(one.name for one in found))
    fixes = dict.fromkeys(f"`{by_rank[one.target].address} {one.name}`" for one in found)
    place = "/etc/hosts" if any(one.line for one in found) else "the name service (`getent hosts NAME`)"
    return Finding(
        _level(found, master),
        "name",
        source,
        f"on {source} the name {names} does not lead where it should",
        "; ".join(lines[:MOST]),
        f"on {source}, {place} has to have {', '.join(list(fixes)[:MOST])}, as on the other nodes",
    )


def _level(found: Sequence[Lookup], master: str) -> Level:
    return "fault" if any(one.name == master for one in found) else "warning"


def _slow(slow: Sequence[Lookup], by_rank: Mapping[int, Node]) -> list[Finding]:
    if not slow:
        return []
    hosts = list(dict.fromkeys(by_rank[one.source].host for one in slow))
    worst = max(slow, key=lambda one: one.took_s)
    return [
        Finding(
            "warning",
            "name",
            "" if len(hosts) == len(by_rank) > 2 else ", ".join(hosts),
            f"a name lookup takes more than {SLOW_S:.0f} s: each start of a training waits for such ones",
            f"{worst.name} took {worst.took_s:.1f} s on {by_rank[worst.source].host}",
            f"see which servers /etc/resolv.conf names on {hosts[0]}, and whether they answer: `time getent hosts "
            f"{worst.name}`",
        )
    ]


def _seen(one: Lookup) -> str:
    led = f"leads to {_addresses(one.addresses)}" if one.addresses else f"leads nowhere: {one.wrong}"
    return f"{one.name} {led}, by {one.line or 'the name service'}"


def _addresses(addresses: Sequence[str]) -> str:
    return ", ".join(addresses[:MOST]) or "no address"
