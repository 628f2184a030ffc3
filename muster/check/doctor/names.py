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

from muster.check.doctor.finding import Finding, attempt
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


class Lookup(NamedTuple):
    """What a name led to on one node.

    Attributes:
        source: the rank that asked.
        target: the rank on the node that was meant.
        wrong: why there are no addresses.
        line: the line of /etc/hosts that has the name.
        took_s: seconds, for the name and for that of the node's address, which torch asks for in its messages.
    """

    source: int
    target: int
    name: str
    addresses: list[str]
    wrong: str = ""
    line: str = ""
    took_s: float = 0.0

    def __str__(self) -> str:
        led = f"leads to {listed(self.addresses)}" if self.addresses else f"leads nowhere: {self.wrong}"
        return f"{self.name} {led}, by {self.line or 'the name service'}"


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
    own, master = next(place for place in places if place.host == world.host), os.environ.get("MASTER_ADDR", "")
    asked: list[tuple[str, Place]] = []
    if len(places) > 1 and not is_loopback(master) and master != "localhost":
        asked = [
            (place.host, place) for place in (own, *(places[number] for number in targets(world, places, options)))
        ]
        if not world.main and master != places[0].host:
            asked.append((master, places[0]))
    return Facts(own, tuple(look_up(world.rank, asked)), master, bool(os.environ.get("GLOO_SOCKET_IFNAME")))


def look_up(source: int, asked: Sequence[tuple[str, Place]], limit_s: float = LIMIT_S) -> list[Lookup]:
    """What each of these names leads to, all asked at once.

    The resolver has no deadline of its own: what is late is left behind in a thread. What is slow is asked again, and
    the shorter time counts: the machine may have been busy.
    """
    hosts_file = attempt(lambda: HOSTS.read_text(errors="replace")) or ""
    late = f"no answer within {limit_s:.0f} s"
    found = [Lookup(source, place.rank, name, [], late, took_s=limit_s) for name, place in asked]

    def ask(index: int) -> None:
        name, place = asked[index]
        for _ in range(2):
            started = time.monotonic()
            addresses, wrong = addresses_of(name)
            found[index] = found[index]._replace(addresses=addresses, wrong=wrong, line=line_of(name, hosts_file))
            with suppress(OSError):
                socket.getnameinfo((place.address, 0), socket.NI_NAMEREQD)
            took_s = min(found[index].took_s, round(time.monotonic() - started, 3))
            found[index] = found[index]._replace(took_s=took_s)
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
    places = {node.place.rank: node.place for node in nodes}
    lookups = [one for node in nodes for one in node.lookups]
    found = _own_names([one for one in lookups if one.source == one.target], places, nodes[0].is_told)
    of_others = [one for one in lookups if one.source != one.target]
    astray = [one for one in of_others if _is_astray(one, places[one.target], of_others)]
    # One finding of a name that leads astray wherever it was asked for; of the others, one of each node that asked.
    by_node: dict[tuple[str, str], list[Lookup]] = {}
    for one in astray:
        asking = {other.source for other in of_others if other.name == one.name}
        is_everywhere = len(asking) > 1 and asking == {other.source for other in astray if other.name == one.name}
        host = places[one.target if is_everywhere else one.source].host
        by_node.setdefault((host, one.name if is_everywhere else ""), []).append(one)
    found += [_astray(host, own, places, nodes[0].master) for (host, _), own in by_node.items()]
    return found + _slow([one for one in lookups if one.took_s > SLOW_S], places)


def summary(by_host: Mapping[str, Sequence[Facts]]) -> str:
    """How many names were looked up."""
    number = sum(len(facts[0].lookups) for facts in by_host.values())
    if number:
        return f"{number} lookups of {len(by_host)} nodes lead where they should"
    return "one machine: no name is needed"


def _own_names(lookups: Sequence[Lookup], places: Mapping[int, Place], is_told: bool) -> list[Finding]:
    """Of own names that do not lead to an address that others could use: the first one is what programs listen on."""
    bad = [one for one in lookups if not set(one.addresses[:1]) & set(places[one.source].addresses)]
    if not bad:
        return []
    so = "gloo is told the interface, what is not told would listen there" if is_told else "gloo listens there"
    hosts = listed(one.name for one in bad)
    wrong = f"the own name of {hosts} does not lead to an address that others reach: {so}, and other nodes can't come"
    fix = (
        f"in /etc/hosts of {hosts}: `{places[bad[0].source].address or 'ADDRESS'} {bad[0].name}`, with its address on "
        "the network of the job; or export GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME, as muster does"
    )
    seen = listed(bad, between="; ")
    return [Finding("warning" if is_told else "failed", "name", _where(bad, places), wrong, seen, fix)]


def _is_astray(one: Lookup, target: Place, lookups: Sequence[Lookup]) -> bool:
    if one.addresses:
        return not set(one.addresses) & set(target.addresses)
    # A name that a node has for itself alone, as containers have, is of no use to others, and nobody uses it.
    is_known = any(other.name == one.name and other.addresses for other in lookups)
    return is_known or one.name != target.host


def _astray(host: str, found: Sequence[Lookup], places: Mapping[int, Place], master: str) -> Finding:
    """Of names that lead astray, because of `host`."""
    names = listed(one.name for one in found)
    sources = listed(places[one.source].host for one in found)
    seen: list[str] = []
    for one in found:
        target = places[one.target]
        seen.append(f"{one}; {target.host} has {listed(target.addresses) or 'no address'}")
    lines = listed(f"`{places[one.target].address} {one.name}`" for one in found)
    service = "/etc/hosts" if any(one.line for one in found) else "the name service (`getent hosts NAME`)"
    return Finding(
        "failed" if any(one.name == master for one in found) else "warning",
        "name",
        host,
        f"the name {names} does not lead where it should on {sources}",
        listed(seen, between="; "),
        f"{service} has to have {lines} there",
    )


def _slow(slow: Sequence[Lookup], places: Mapping[int, Place]) -> list[Finding]:
    if not slow:
        return []
    worst = max(slow, key=lambda one: one.took_s)
    host = places[worst.source].host
    wrong = f"a name lookup takes more than {SLOW_S:.0f} s: each start of a training waits for such ones"
    seen = f"{worst.name} took {worst.took_s:.1f} s on {host}"
    fix = f"see which servers /etc/resolv.conf names there, and whether they answer: `time getent hosts {worst.name}`"
    return [Finding("warning", "name", _where(slow, places), wrong, seen, fix)]


def _where(found: Sequence[Lookup], places: Mapping[int, Place]) -> str:
    """The nodes that asked; empty where it is all of them."""
    hosts = list(dict.fromkeys(places[one.source].host for one in found))
    return "" if len(hosts) == len(places) > 2 else ", ".join(hosts)
