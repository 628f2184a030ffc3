"""The network: interfaces, the fabric's devices, by which address nodes are found; and links as the kernel shows them.

A cable or a slot with a bad contact does not fail: its link comes up with fewer lanes, or at a lower speed.

Source: https://docs.kernel.org/admin-guide/abi-stable.html (infiniband), abi-testing.html (current_link_width)
"""

import os
import re
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from ipaddress import ip_address
from pathlib import Path

import msgspec
import psutil

from muster.check import fabric
from muster.check.doctor.finding import Finding, attempt, differences, distinct
from muster.check.options import DoctorOptions
from muster.check.ranks import ALL_PAIRS_UP_TO, gather_hosts, leads_host, listed, partners
from muster.train.distributed.world import World
from muster.variables import LaunchVariable

NAME = "network"

SYS = Path("/sys")
"""Where the kernel shows links."""

QUICK_ALL_PAIRS_UP_TO = 8
"""Up to so many nodes every one is tried by every other with `--quick`; without it: ALL_PAIRS_UP_TO."""


@dataclass(frozen=True, kw_only=True)
class Port:
    """An InfiniBand or RoCE port.

    Attributes:
        name: device and port: mlx5_0/1.
        rate_gbit_s: 10^9 bits a second.
    """

    name: str
    is_active: bool
    rate_gbit_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class PcieLink:
    """The PCIe link of a network adapter or a GPU.

    Attributes:
        width, max_width: lanes in use; lanes that both the card and its slot have.
        speed_gt_s, max_speed_gt_s: 10^9 transfers a second and lane.
    """

    name: str
    is_gpu: bool
    width: int
    max_width: int
    speed_gt_s: float | None = None
    max_speed_gt_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What a rank tells of the network; from `interfaces` on, of a host's first rank only.

    Attributes:
        address: its own towards rank 0, which the `interface` has.
        interfaces: those with an address, but the loopback.
        gloo_interface: what gloo is told to use.
        fabric: what the launch found.
        devices: what is wrong with the device files of the fabric.
        memlock: what is wrong with the memory that may be locked, where there is a fabric.
    """

    address: str | None = None
    interface: str | None = None
    interfaces: tuple[str, ...] = ()
    gloo_interface: str = ""
    fabric: str | None = None
    devices: str = ""
    memlock: str = ""
    ports: tuple[Port, ...] = ()
    pcie: tuple[PcieLink, ...] = ()


def gather(world: World, options: DoctorOptions) -> Facts:
    """The way to rank 0; of the first rank of a host also its interfaces, fabric and links."""
    address = attempt(lambda: towards(os.environ.get("MASTER_ADDR", ""))) or ""
    interface = attempt(lambda: interface_of(address, own_addresses()))
    if not leads_host(world):
        return Facts(address=address or None, interface=interface)
    devices, memory = fabric.devices(), fabric.memory()
    return Facts(
        address=address or None,
        interface=interface,
        interfaces=tuple(sorted(name for name in attempt(own_addresses) or () if name != "lo")),
        gloo_interface=os.environ.get("GLOO_SOCKET_IFNAME", ""),
        fabric=os.environ.get(LaunchVariable.FABRIC_FOUND),
        devices=devices.says if devices.is_good is False else "",
        memlock=memory.says if memory.is_good is False else "",
        ports=attempt(lambda: tuple(ports(SYS))) or (),
        pcie=attempt(lambda: tuple(pcie_links(SYS))) or (),
    )


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
    return msgspec.convert(gather_hosts(world, asdict(own)), list[Place])


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


def findings(by_host: Mapping[str, Sequence[Facts]]) -> list[Finding]:
    """What is wrong with the way to the other nodes, with the fabric and with links."""
    nodes = {host: ranks[0] for host, ranks in by_host.items()}
    found: list[Finding] = []
    for host, node in nodes.items():
        # NCCL also takes prefixes, and what is to be left out: only gloo's plain names are held against what is there.
        wanted = node.gloo_interface
        if [each for each in wanted.removeprefix("=").split(",") if each not in (*node.interfaces, "lo", "")]:
            seen = f"GLOO_SOCKET_IFNAME={wanted}; here: {', '.join(node.interfaces) or 'none'}"
            fix = "unset GLOO_SOCKET_IFNAME, or --interface with the name of an interface that all nodes have"
            found.append(Finding("failed", "interface", host, "the interface does not exist", seen, fix))
        if node.devices:
            fix = "docker run --device /dev/infiniband; on a node: the devices' permissions"
            found.append(Finding("warning", "fabric", host, "the fabric's devices can't be used", node.devices, fix))
    for host, ranks in list(by_host.items())[1:]:
        address = next((rank.address or "" for rank in ranks if (rank.address or "").startswith("127.")), "")
        if address:
            wrong, seen = "its way to rank 0 is the loopback: it would meet itself", f"own address there: {address}"
            fix = "--master-addr with an address that others reach"
            found.append(Finding("failed", "address", host, wrong, seen, fix))
    for host, ranks in by_host.items():
        addresses = distinct([rank.address for rank in ranks])
        if "," in addresses:
            wrong = "nodes have the same name, and are taken for one: only one of them was looked at"
            fix = "give each node a hostname of its own (docker run --hostname)"
            found.append(Finding("warning", "host", host, wrong, f"own addresses there: {addresses}", fix))
    fix = "look at what `muster fabric plan` says on that node, and whether the host's libraries are bound there too"
    fabrics = {host: node.fabric for host, node in nodes.items()}
    found += differences(fabrics, "failed", "fabric", "fabric", fix)
    return [*found, *_locked_memory(nodes), *_port_findings(nodes), *_pcie_findings(nodes)]


def summary(by_host: Mapping[str, Sequence[Facts]]) -> str:
    """The fabric, the interface towards rank 0, and the ports that are up."""
    nodes = [ranks[0] for ranks in by_host.values()]
    interface = distinct([rank.interface for ranks in by_host.values() for rank in ranks]) or "-"
    most = max(len(_rates(node)) for node in nodes)
    rates = distinct([f"{rate:g}" for node in nodes for rate in _rates(node)])
    links = f"{most} ports up, at {rates} Gb/s" if most else "no InfiniBand or RoCE port"
    return f"{distinct([node.fabric for node in nodes]) or 'tcp'} by {interface}; {links}"


def _locked_memory(nodes: Mapping[str, Facts]) -> list[Finding]:
    """Of nodes with a fabric whose users may lock little memory."""
    few = {host: node.memlock for host, node in nodes.items() if node.memlock}
    if not few:
        return []
    fix = "docker run --ulimit memlock=-1; in Slurm PropagateResourceLimitsExcept=MEMLOCK and slurmd's LimitMEMLOCK"
    wrong, seen = "RDMA may lock little memory", distinct(list(few.values()))
    return [Finding("warning", "memlock", listed(list(few)), wrong, seen, fix)]


def _port_findings(nodes: Mapping[str, Facts]) -> list[Finding]:
    """Of ports that are down, or slower than on other nodes."""
    fix = "tell the site: a link of that node is down (ibstat)"
    up = {host: len(_rates(node)) if node.ports else None for host, node in nodes.items()}
    found = differences(up, "warning", "ports", "number of active InfiniBand ports", fix)
    # Where ports are down the rates differ for that reason. Names of devices are each node's own: only rates count.
    most = max((number for number in up.values() if number), default=0)
    rates = {host: _rates(node) if len(_rates(node)) == most else None for host, node in nodes.items()}
    shown = {
        _rates(node): ", ".join(f"{port.name} at {port.rate_gbit_s:g} Gb/s" for port in node.ports if _is_up(port))
        for node in nodes.values()
    }
    fix = "tell the site: the cable or the port of a slow link (ibstat, mlxlink)"
    return found + differences(rates, "warning", "ports", "rate of InfiniBand ports", fix, lambda value: shown[value])


def _pcie_findings(nodes: Mapping[str, Facts]) -> list[Finding]:
    """Of adapters and GPUs whose PCIe link is less than it can be."""
    less: dict[tuple[str, str], list[str]] = {}
    for host, node in nodes.items():
        for link in node.pcie:
            if said := _less(link):
                less.setdefault((link.name, said), []).append(host)
    wrong = "the PCIe link of {} is less than the card and its slot can"
    fix = "tell the site: the card in its slot, or the slot (lspci -vv: LnkSta against LnkCap)"
    return [
        Finding("warning", "pcie", listed(hosts), wrong.format(name), said, fix) for (name, said), hosts in less.items()
    ]


def ports(sys: Path) -> Iterator[Port]:
    """The InfiniBand and RoCE ports that the kernel shows below `sys`."""
    for folder in sorted(sys.glob("class/infiniband/*/ports/*")):
        # "4: ACTIVE", "200 Gb/sec (4X HDR)"
        state, rate = _read(folder / "state"), _read(folder / "rate")
        name = f"{folder.parents[1].name}/{folder.name}"
        yield Port(name=name, is_active=state.endswith(": ACTIVE"), rate_gbit_s=_number(rate))


def pcie_links(sys: Path) -> Iterator[PcieLink]:
    """The PCIe links of network adapters and GPUs that the kernel shows below `sys`."""
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


def _is_up(port: Port) -> bool:
    return port.is_active and port.rate_gbit_s is not None


def _rates(node: Facts) -> tuple[float, ...]:
    """Of the ports that are up, in order."""
    return tuple(sorted(port.rate_gbit_s or 0.0 for port in node.ports if _is_up(port)))


def _less(link: PcieLink) -> str:
    """In what a PCIe link is less than it can be; empty where it is not."""
    if link.width < link.max_width:
        return f"{link.width} lanes of {link.max_width}"
    speed, can = link.speed_gt_s, link.max_speed_gt_s
    # An idle GPU lowers its speed by itself.
    return f"{speed:g} GT/s of {can:g}" if speed and can and speed < can and not link.is_gpu else ""
