"""Whether names lead to the nodes that bear them, on all nodes, and how long it takes to look them up."""

import os
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import NamedTuple

from muster.check.doctor.finding import Finding, Level, attempt
from muster.check.doctor.network import Place, gather_places, is_loopback, targets
from muster.check.options import DoctorOptions
from muster.check.ranks import leads_host, listed
from muster.train.distributed.world import World

NAME = "names"

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


@dataclass(frozen=True)
class Facts:
    """What a node knows of names.

    Attributes:
        place: where it is found.
        lookups: of its own name and of others.
        master: MASTER_ADDR, which is to lead to the first node.
        is_told: whether gloo is told the interface, and does not go by a host's own name.
    """

    place: Place
    lookups: tuple[Lookup, ...] = ()
    master: str = ""
    is_told: bool = False


def gather(world: World, options: DoctorOptions) -> Facts | None:
    """What names lead to here, by the first rank of each host."""
    places = gather_places(world)
    if not leads_host(world):
        return None
    master = os.environ.get("MASTER_ADDR", "")
    asked: list[tuple[int, str, bool]] = []
    is_here = is_loopback(master) or master == "localhost"
    for other in () if is_here else (places[number] for number in targets(world, places, options)):
        asked.append((other.rank, other.host, False))
        if other.address:
            asked.append((other.rank, other.address, True))
    if asked:
        asked.append((world.rank, world.host, False))
        if not world.main and master != places[0].host:
            asked.append((places[0].rank, master, False))
    own = next(place for place in places if place.host == world.host)
    return Facts(own, tuple(look_up(world.rank, asked)), master, bool(os.environ.get("GLOO_SOCKET_IFNAME")))


def look_up(source: int, asked: Sequence[tuple[int, str, bool]], limit_s: float = LIMIT_S) -> list[Lookup]:
    """What comes of each question (target, name, is_reverse), all asked at once.

    The resolver has no deadline of its own: what is late is left behind in a thread. What is slow is asked again, and
    the shorter time counts: the machine may have been busy.
    """
    hosts_file = attempt(lambda: HOSTS.read_text(errors="replace")) or ""
    late = f"no answer within {limit_s:.0f} s"
    found = [Lookup(source, target, name, [], late, "", limit_s, is_reverse) for target, name, is_reverse in asked]

    def ask(index: int) -> None:
        target, name, is_reverse = asked[index]
        resolve = name_of if is_reverse else addresses_of
        line = "" if is_reverse else line_of(name, hosts_file)
        for _ in range(2):
            started = time.monotonic()
            addresses, wrong = resolve(name)
            took_s = min(found[index].took_s, round(time.monotonic() - started, 3))
            found[index] = Lookup(source, target, name, addresses, wrong, line, took_s, is_reverse)
            if took_s <= SLOW_S:
                break

    threads = [Thread(target=ask, args=(index,), daemon=True) for index in range(len(asked))]
    for thread in threads:
        thread.start()
    ends = time.monotonic() + limit_s
    for thread in threads:
        thread.join(max(0.0, ends - time.monotonic()))
    return list(found)


def addresses_of(name: str) -> tuple[list[str], str]:
    """(addresses, what is wrong) of a name."""
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        return [], str(error.args[-1] if error.args else error)
    return list(dict.fromkeys(str(entry[4][0]).partition("%")[0] for entry in found)), ""


def name_of(address: str) -> tuple[list[str], str]:
    """Asks for the name of an address, and tells nothing of it: how long it takes is what counts."""
    with suppress(OSError):
        socket.getnameinfo((address, 0), socket.NI_NAMEREQD)
    return [], ""


def line_of(name: str, text: str) -> str:
    """The line in which /etc/hosts, whose content is `text`, has `name`; empty without one."""
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.partition("#")[0].split()
        if name.lower() in (word.lower() for word in words[1:]):
            return f"{HOSTS} line {number}: {' '.join(words)}"
    return ""


def findings(by_host: Mapping[str, Sequence[Facts]]) -> list[Finding]:
    """What is wrong with the names of nodes, of which the first is to be at MASTER_ADDR."""
    nodes = [facts[0] for facts in by_host.values()]
    by_rank, master = {node.place.rank: node.place for node in nodes}, nodes[0].master
    lookups = [one for node in nodes for one in node.lookups]
    found = _own_names([one for one in lookups if one.source == one.target], by_rank, nodes[0].is_told)
    forward = [one for one in lookups if not one.is_reverse and one.source != one.target]
    astray = [one for one in forward if _is_astray(one, by_rank, forward)]
    for name in dict.fromkeys(one.name for one in astray):
        of_name = [one for one in astray if one.name == name]
        sources = {one.source for one in forward if one.name == name}
        if len(sources) > 1 and len(of_name) == len(sources):
            found.append(_astray_everywhere(of_name, by_rank, master))
            astray = [one for one in astray if one.name != name]
    for source in dict.fromkeys(one.source for one in astray):
        found.append(_astray_on_node([one for one in astray if one.source == source], by_rank, master))
    return found + _slow([one for one in lookups if one.took_s > SLOW_S], by_rank)


def summary(by_host: Mapping[str, Sequence[Facts]]) -> str:
    """How many names were looked up."""
    number = sum(len(facts[0].lookups) for facts in by_host.values())
    if number:
        return f"{number} lookups of {len(by_host)} nodes lead where they should"
    return "one machine: no name is needed"


def _own_names(lookups: Sequence[Lookup], by_rank: Mapping[int, Place], is_told: bool) -> list[Finding]:
    """Own names that lead to no address that others could use, one finding for each kind."""
    kinds: dict[str, list[Lookup]] = {}
    for one in lookups:
        first = one.addresses[0] if one.addresses else ""
        if not first:
            kinds.setdefault("does not resolve", []).append(one)
        elif is_loopback(first):
            kinds.setdefault("leads to a loopback address", []).append(one)
        elif first not in by_rank[one.source].addresses:
            kinds.setdefault("leads to an address that is not its own", []).append(one)
    so = "gloo is told the interface, what is not told would listen there" if is_told else "gloo listens there"
    found: list[Finding] = []
    for kind, bad in kinds.items():
        hosts = listed([one.name for one in bad], MOST)
        address = by_rank[bad[0].source].address or "ADDRESS"
        found.append(
            Finding(
                "warning" if is_told else "failed",
                "name",
                "" if len(bad) == len(by_rank) > 2 else ", ".join(one.name for one in bad),
                f"the own name of {hosts} {kind} there: {so}, and other nodes can't come",
                "; ".join(f"{one.name}: {_seen(one)}" for one in bad[:MOST]),
                f"in /etc/hosts of {hosts}: `{address} {bad[0].name}`, with its address on the network of the job; or "
                "export GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME, as muster does",
            )
        )
    return found


def _is_astray(one: Lookup, by_rank: Mapping[int, Place], lookups: Sequence[Lookup]) -> bool:
    target = by_rank[one.target]
    if one.addresses:
        return not set(one.addresses) & set(target.addresses)
    # A name that a node has for itself alone, as containers have, is of no use to others, and nobody uses it.
    is_known = any(other.name == one.name and other.addresses for other in lookups)
    return is_known or one.name != target.host


def _astray_everywhere(found: Sequence[Lookup], by_rank: Mapping[int, Place], master: str) -> Finding:
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


def _astray_on_node(found: Sequence[Lookup], by_rank: Mapping[int, Place], master: str) -> Finding:
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
    return "failed" if any(one.name == master for one in found) else "warning"


def _slow(slow: Sequence[Lookup], by_rank: Mapping[int, Place]) -> list[Finding]:
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
