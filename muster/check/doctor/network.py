"""The network: interfaces, the fabric's devices, by which address nodes are found; and links as the kernel shows them.

A cable or a slot with a bad contact does not fail: its link comes up with fewer lanes, or at a lower speed.

Source: https://docs.kernel.org/admin-guide/abi-stable.html (infiniband), abi-testing.html (current_link_width)
"""

import glob
import os
import re
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import msgspec
import psutil

from muster.check.doctor.facts import Facts, Finding, Node, Part, PcieLink, Port, attempt, differences, distinct
from muster.check.fabric import DEVICES
from muster.check.options import DoctorOptions
from muster.check.ranks import ALL_PAIRS_UP_TO, gather_nodes, listed, partners
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


def gather(sys: Path = Path("/sys")) -> dict[str, Any]:
    """The fields of a Node that tell of its network.

    Args:
        sys: where the kernel shows links.
    """
    devices = tuple(sorted(path for pattern in DEVICES for path in glob.glob(pattern)))
    return {
        "interfaces": tuple(sorted(name for name in attempt(own_addresses) or () if name != "lo")),
        "fabric": os.environ.get(LaunchVariable.FABRIC_FOUND),
        "devices": devices,
        "closed": tuple(path for path in devices if not os.access(path, os.R_OK | os.W_OK)),
        "ports": attempt(lambda: tuple(_ports(sys))) or (),
        "pcie": attempt(lambda: tuple(_pcie(sys))) or (),
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


def _ports(sys: Path) -> Iterator[Port]:
    for folder in sorted(sys.glob("class/infiniband/*/ports/*")):
        # "4: ACTIVE", "200 Gb/sec (4X HDR)"
        state, rate = _read(folder / "state"), _read(folder / "rate")
        name = f"{folder.parents[1].name}/{folder.name}"
        yield Port(name=name, is_active=state.endswith(": ACTIVE"), rate_gbit_s=_number(rate))


def _pcie(sys: Path) -> Iterator[PcieLink]:
    adapters = [(folder.name, folder / "device", False) for folder in sorted(sys.glob("class/infiniband/*"))]
    gpus = [(f"GPU at {folder.name}", folder, True) for folder in sorted(sys.glob("bus/pci/drivers/nvidia/*:*:*.*"))]
    for name, folder, is_gpu in adapters + gpus:
        device = folder.resolve()
        # Both ends have to be able: a card of 16 lanes in a slot of 8 is as it was built.
        ends = [end for end in (device, device.parent) if (end / "max_link_width").exists()]
        width, max_width = _least([device], "current_link_width"), _least(ends, "max_link_width")
        if width and max_width:
            speeds = _least([device], "current_link_speed"), _least(ends, "max_link_speed")
            yield PcieLink(
                name=name,
                is_gpu=is_gpu,
                width=int(width),
                max_width=int(max_width),
                speed_gt_s=speeds[0],
                max_speed_gt_s=speeds[1],
            )


def _least(folders: list[Path], name: str) -> float | None:
    """The smallest number that these devices have in the file `name`; None without any, and for 0, a virtual link's."""
    return min((number for folder in folders if (number := _number(_read(folder / name)))), default=None)


def _number(text: str) -> float | None:
    """The number at the start of "16.0 GT/s PCIe"."""
    found = re.match(r"\d+(\.\d+)?", text)
    return float(found.group()) if found else None


def _read(path: Path) -> str:
    return attempt(lambda: path.read_text().strip()) or ""


def link_findings(facts: Facts) -> Part:
    """Ports that are down or slower than on other nodes; adapters and GPUs whose PCIe link is less than it can be."""
    fix = "tell the site: a link of that node is down (ibstat)"
    up = {node.host: len(_rates(node)) if node.ports else None for node in facts.nodes}
    found = differences(up, "warning", "ports", "number of active InfiniBand ports", fix)
    # Where ports are down the rates differ for that reason. Names of devices are each node's own: only rates count.
    most = max((number for number in up.values() if number), default=0)
    rates = {node.host: _rates(node) if len(_rates(node)) == most else None for node in facts.nodes}
    shown = {
        _rates(node): ", ".join(f"{port.name} at {port.rate_gbit_s:g} Gb/s" for port in node.ports if _is_up(port))
        for node in facts.nodes
    }
    fix = "tell the site: the cable or the port of a slow link (ibstat, mlxlink)"
    found += differences(rates, "warning", "ports", "rate of InfiniBand ports", fix, lambda value: shown[value])
    less: dict[tuple[str, str], list[str]] = {}
    for node in facts.nodes:
        for link in node.pcie:
            if said := _less(link):
                less.setdefault((link.name, said), []).append(node.host)
    fix = "tell the site: the card in its slot, or the slot (lspci -vv: LnkSta against LnkCap)"
    for (name, said), hosts in less.items():
        wrong = f"the PCIe link of {name} is less than the card and its slot can"
        found.append(Finding("warning", "pcie", listed(hosts), wrong, said, fix))
    usual = distinct([f"{rate:g}" for node in facts.nodes for rate in _rates(node)])
    return Part("links", f"{most} ports up, at {usual} Gb/s" if most else "no InfiniBand or RoCE port", found)


def _is_up(port: Port) -> bool:
    return port.is_active and port.rate_gbit_s is not None


def _rates(node: Node) -> tuple[float, ...]:
    """Of the ports that are up, in order."""
    return tuple(sorted(port.rate_gbit_s or 0.0 for port in node.ports if _is_up(port)))


def _less(link: PcieLink) -> str:
    """In what a PCIe link is less than it can be; empty where it is not."""
    if link.width < link.max_width:
        return f"{link.width} lanes of {link.max_width}"
    speed, can = link.speed_gt_s, link.max_speed_gt_s
    # An idle GPU lowers its speed by itself.
    return f"{speed:g} GT/s of {can:g}" if speed and can and speed < can and not link.is_gpu else ""
