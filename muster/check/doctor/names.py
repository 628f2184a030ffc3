"""Host names: whether each one resolves to its node's address, on all nodes, and how long a lookup takes."""

import os
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from threading import Thread
from typing import NamedTuple

from muster.check.doctor.finding import Finding, alike
from muster.check.doctor.network import Place, gather_places
from muster.check.options import DoctorOptions
from muster.check.ranks import leads_host
from muster.interfaces import is_loopback
from muster.train.distributed.world import World
from muster.units import listed

NAME = "names"

LIMIT_S = 10.0
"""Seconds after which a name without an answer counts as not resolved."""

SLOW_S = 3.0
"""Seconds that no lookup should exceed: by default the resolver asks a second server after 5 s."""


class Lookup(NamedTuple):
    """The result of looking up a name on one node.

    Attributes:
        name: a node's name, as it calls itself.
        wrong: why there are no addresses.
        took_s: seconds to look up the name, and then the name of the node's address, as torch does for its messages.
    """

    name: str
    addresses: list[str]
    wrong: str = ""
    took_s: float = 0.0

    def leads(self) -> str:
        return f"resolves to {listed(self.addresses)}" if self.addresses else f"does not resolve ({self.wrong})"


@dataclass(frozen=True)
class Facts:
    """The address and the lookups of one node.

    Attributes:
        lookups: of its own name and of other nodes'.
        is_interface_set: whether GLOO_SOCKET_IFNAME names gloo's interface; if not, gloo resolves the host's own name.
    """

    place: Place
    lookups: tuple[Lookup, ...] = ()
    is_interface_set: bool = False


def gather(world: World, options: DoctorOptions) -> Facts | None:
    """The lookups on this host, by its first rank; none where all ranks are on one machine."""
    own, others = gather_places(world)
    if not leads_host(world):
        return None
    master = os.environ.get("MASTER_ADDR", "")
    is_local = not others or is_loopback(master) or master == "localhost"
    lookups = [] if is_local else look_up([own, *others])
    return Facts(own, tuple(lookups), bool(os.environ.get("GLOO_SOCKET_IFNAME")))


def look_up(nodes: Sequence[Place], limit_s: float = LIMIT_S) -> list[Lookup]:
    """The lookups of the names of `nodes`, all made at the same time.

    The resolver has no deadline of its own: a late lookup is left behind in its thread. A slow one is repeated, and
    the shorter time counts, as the machine may have been busy.
    """
    found = [Lookup(node.host, [], f"no answer within {limit_s:.0f} s", took_s=limit_s) for node in nodes]

    def ask(index: int) -> None:
        for _ in range(2):
            started = time.monotonic()
            addresses, wrong = addresses_of(nodes[index].host)
            found[index] = found[index]._replace(addresses=addresses, wrong=wrong)
            with suppress(OSError):
                socket.getnameinfo((nodes[index].address, 0), socket.NI_NAMEREQD)
            took_s = min(found[index].took_s, round(time.monotonic() - started, 3))
            found[index] = found[index]._replace(took_s=took_s)
            if took_s <= SLOW_S:
                break

    threads = [Thread(target=ask, args=(index,), daemon=True) for index in range(len(nodes))]
    for thread in threads:
        thread.start()
    ends = time.monotonic() + limit_s
    for thread in threads:
        thread.join(max(0.0, ends - time.monotonic()))
    return list(found)


def addresses_of(name: str) -> tuple[list[str], str]:
    """(addresses, error message) for a name: one of them is empty."""
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        return [], str(error.args[-1] if error.args else error)
    return list(dict.fromkeys(str(entry[4][0]).partition("%")[0] for entry in found)), ""


def findings(by_host: Mapping[str, Sequence[Facts]]) -> list[Finding]:
    """The findings on the nodes' names. MASTER_ADDR needs no check: the ranks have connected to it."""
    nodes = {host: facts[0] for host, facts in by_host.items()}
    known = {one.name for host, node in nodes.items() for one in node.lookups if one.addresses and one.name != host}
    own, others = dict[str, str](), dict[str, str]()
    for host, node in nodes.items():
        wrong: list[str] = []
        for one in node.lookups:
            place = nodes[one.name].place
            if one.name == host:
                # Programs listen on the first address.
                if not set(one.addresses[:1]) & set(place.addresses):
                    own[host] = f"its own name {one.leads()}"
            # A name that no other node can resolve, such as a container's, is not in use between nodes.
            elif one.name in known and not set(one.addresses) & set(place.addresses):
                wrong.append(f"{one.name} {one.leads()}, but its address is {place.address}")
        others[host] = listed(wrong, between="; ")
    is_interface_set = all(nodes[host].is_interface_set for host in own)
    so = "gloo has its interface, but other programs would listen there" if is_interface_set else "gloo listens there"
    wrong_own = f"its own name does not resolve to an address that others reach: {so}, and other nodes can't connect"
    fix_own = (
        "in /etc/hosts there, give the name its address on the job's network; or export GLOO_SOCKET_IFNAME and "
        "NCCL_SOCKET_IFNAME, as muster does"
    )
    wrong_other = "the name of another node does not resolve to its address"
    fix_other = "correct /etc/hosts or the name service there: `getent hosts NAME` shows the address"
    found = alike(own, "warning" if is_interface_set else "failed", "name", wrong_own, fix_own)
    found += alike(others, "warning", "name", wrong_other, fix_other)
    slow = [(one.took_s, host, one.name) for host, node in nodes.items() for one in node.lookups if one.took_s > SLOW_S]
    if slow:
        took_s, host, name = max(slow)
        wrong_slow = f"a name lookup takes more than {SLOW_S:.0f} s: each start of a training waits for such lookups"
        fix = f"see which servers /etc/resolv.conf names there, and whether they answer: `time getent hosts {name}`"
        seen = f"{name} took {took_s:.1f} s on {host}"
        found.append(Finding("warning", "name", listed(host for _, host, _ in slow), wrong_slow, seen, fix))
    return found


def summary(by_host: Mapping[str, Sequence[Facts]]) -> str:
    if number := sum(len(facts[0].lookups) for facts in by_host.values()):
        return f"{number} lookups of {len(by_host)} nodes give the right addresses"
    return "one machine: no name is needed"
