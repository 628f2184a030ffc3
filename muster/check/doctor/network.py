"""The network that was chosen: interfaces, the fabric's devices, and by which address nodes are found."""

import glob
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from ipaddress import ip_address
from typing import Any

import msgspec
import psutil

from muster.check.doctor.facts import Facts, Finding, Part, attempt, differences, distinct
from muster.check.fabric import DEVICES
from muster.check.options import DoctorOptions
from muster.check.ranks import ALL_PAIRS_UP_TO, gather_nodes, partners
from muster.train.world import World
from muster.variables import LaunchVariable

QUICK_ALL_PAIRS_UP_TO = 8
"""Up to so many nodes every one is tried by every other with `--quick`; without it: ALL_PAIRS_UP_TO."""


@dataclass(frozen=True)
class Place:
    """Where a node is found.

    Attributes:
        rank: of its first process.
        host: the name that it has for itself.
        addresses: of its interfaces, without loopback.
        interface, address: by which the other ranks find it; empty where there is none.
    """

    rank: int
    host: str
    addresses: tuple[str, ...]
    interface: str
    address: str


def gather_places(world: World) -> list[Place]:
    """The places of all nodes."""
    interfaces = own_addresses()
    addresses = tuple(one for of_one in interfaces.values() for one in of_one if not is_loopback(one))
    own = Place(world.rank, world.host, addresses, *choose(os.environ, interfaces))
    return msgspec.convert(gather_nodes(world, asdict(own)), list[Place])


def targets(world: World, places: Sequence[Place], options: DoctorOptions) -> list[int]:
    """The nodes, by number, that this rank tries to reach, and whose names it looks up: none but for a node's first."""
    own = next((number for number, place in enumerate(places) if place.rank == world.rank), None)
    most = QUICK_ALL_PAIRS_UP_TO if options.quick else ALL_PAIRS_UP_TO
    return [] if own is None else partners(own, len(places), most)


def is_loopback(address: str) -> bool:
    """Whether this is an address that never leaves its host; False for names."""
    try:
        return ip_address(address).is_loopback
    except ValueError:
        return False


def gather() -> dict[str, Any]:
    """The fields of a Node that tell of its network."""
    devices = tuple(sorted(path for pattern in DEVICES for path in glob.glob(pattern)))
    return {
        "interfaces": tuple(sorted(name for name in attempt(own_addresses) or () if name != "lo")),
        "fabric": os.environ.get(LaunchVariable.FABRIC_FOUND),
        "devices": devices,
        "closed": tuple(path for path in devices if not os.access(path, os.R_OK | os.W_OK)),
    }


def own_addresses() -> dict[str, list[str]]:
    """The IPv4 and IPv6 addresses of this host's interfaces, by name; IPv4 first, none that only one link knows."""
    found: dict[str, list[str]] = {}
    for name, entries in psutil.net_if_addrs().items():
        addresses = [
            entry.address.partition("%")[0]
            for family in (socket.AF_INET, socket.AF_INET6)
            for entry in entries
            if entry.family == family and not entry.address.startswith("fe80:")
        ]
        if addresses:
            found[name] = addresses
    return found


def choose(environ: Mapping[str, str], interfaces: Mapping[str, Sequence[str]]) -> tuple[str, str]:
    """(interface, address) by which the other ranks find this node; empty where there is none.

    It is the one that gloo is told to take, or else the one towards MASTER_ADDR.
    """
    for name in environ.get("GLOO_SOCKET_IFNAME", "").split(","):
        if name in interfaces:
            return name, interfaces[name][0]
    address = towards(environ.get("MASTER_ADDR", ""))
    return interface_of(address, interfaces) or "", address


def interface_of(address: str, interfaces: Mapping[str, Sequence[str]]) -> str | None:
    """The one of these `interfaces` that has `address`."""
    return next((name for name, own in interfaces.items() if address in own), None)


def towards(host: str) -> str:
    """The address that this host would use as its own towards `host`, without sending anything; empty without one."""
    try:
        family, kind, _, _, place = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(place)
            return str(probe.getsockname()[0]).partition("%")[0]
    except (OSError, UnicodeError):
        return ""


def findings(facts: Facts) -> Part:
    """The interface that gloo is told, the way to rank 0, the fabric and its devices."""
    found: list[Finding] = []
    for node in facts.nodes:
        # NCCL also takes prefixes, and what is to be left out: only gloo's plain names are held against what is there.
        wanted = node.variables.get("GLOO_SOCKET_IFNAME", "")
        if [each for each in wanted.removeprefix("=").split(",") if each not in (*node.interfaces, "lo", "")]:
            seen = f"GLOO_SOCKET_IFNAME={wanted}; here: {', '.join(node.interfaces) or 'none'}"
            fix = "unset GLOO_SOCKET_IFNAME, or --interface with the name of an interface that all nodes have"
            found.append(Finding("fault", "interface", node.host, "the interface does not exist", seen, fix))
        if node.closed:
            wrong = "this user may not open the fabric's devices"
            fix = "docker run --device /dev/infiniband; on a node: the devices' permissions"
            found.append(Finding("warning", "fabric", node.host, wrong, ", ".join(node.closed), fix))
    for host in facts.hosts[1:]:
        address = next((rank.address or "" for rank in facts.on(host) if (rank.address or "").startswith("127.")), "")
        if address:
            wrong, seen = "its way to rank 0 is the loopback: it would meet itself", f"own address there: {address}"
            fix = "--master-addr with an address that others reach"
            found.append(Finding("fault", "address", host, wrong, seen, fix))
    fix = "look at what `muster fabric plan` says on that node, and whether the host's libraries are bound there too"
    found += differences(facts.by_host(lambda node: node.fabric), "fault", "fabric", "fabric", fix)
    chosen = distinct([rank.interface for rank in facts.ranks]) or "-"
    return Part("network", f"{distinct([node.fabric for node in facts.nodes]) or 'tcp'} by {chosen}", found)
