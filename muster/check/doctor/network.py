"""The network: interfaces and addresses of nodes, the fabric's devices, and the links that the kernel shows.

A cable or a slot with a bad contact does not fail: its link comes up with fewer lanes, or at a lower speed.

Source: https://docs.kernel.org/admin-guide/abi-stable.html (infiniband), abi-testing.html (current_link_width)
"""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import msgspec

from muster.check import fabric, ranks
from muster.check.doctor.finding import Finding, alike, attempt, differences
from muster.check.options import DoctorOptions
from muster.interfaces import is_loopback, own_addresses, source_address
from muster.paths import text_of
from muster.train.distributed.world import World
from muster.units import listed, plural
from muster.variables import LaunchVariable

NAME = "network"


@dataclass(frozen=True, kw_only=True)
class Facts:
    """The network of one rank; the fields from `fabric` on are of a host's first rank only.

    Attributes:
        address: the address of `interface` by which other ranks reach this one.
        fabric: the fabric that the launch found.
        devices: what is wrong with the device files of the fabric.
        memlock: what is wrong with the memory that may be locked, where there is a fabric.
        ports: the rate of each InfiniBand or RoCE port (mlx5_0/1), in 10^9 bits a second; None for one that is down.
            None for the whole where the ports can't be read.
        pcie: adapters and GPUs whose PCIe link has fewer lanes or less speed than possible, with both numbers.
    """

    address: str | None = None
    interface: str | None = None
    fabric: str | None = None
    devices: str = ""
    memlock: str = ""
    ports: dict[str, float | None] | None = None
    pcie: dict[str, str] = field(default_factory=dict[str, str])


def gather(world: World, options: DoctorOptions) -> Facts:
    """The address of this rank; on the first rank of a host also its fabric and links."""
    place = own_place(world)
    own = Facts(address=place.address or None, interface=place.interface or None)
    if not ranks.leads_host(world):
        return own
    devices, memory = fabric.devices(), fabric.memory()
    return replace(
        own,
        fabric=os.environ.get(LaunchVariable.FABRIC_FOUND),
        devices=devices.says if devices.is_good is False else "",
        memlock=memory.says if memory.is_good is False else "",
        ports=attempt(ports),
        pcie=attempt(slow_pcie_links) or {},
    )


@dataclass(frozen=True)
class Place:
    """The addresses of a node.

    Attributes:
        rank: of its first process.
        host: the name that it has for itself.
        addresses: of its interfaces, without loopback.
        interface, address: by which other ranks reach it; empty where there is none.
    """

    rank: int
    host: str
    addresses: tuple[str, ...]
    interface: str
    address: str


def own_place(world: World) -> Place:
    interfaces = attempt(own_addresses) or {}
    addresses = tuple(one for of_one in interfaces.values() for one in of_one if not is_loopback(one))
    interface, address = attempt(lambda: choose(os.environ, interfaces)) or ("", "")
    return Place(world.rank, world.host, addresses, interface, address)


def gather_places(world: World) -> tuple[Place, list[Place]]:
    """The addresses of this node, and of those that it connects to and whose names it looks up."""
    places = msgspec.convert(ranks.gather_hosts(world, asdict(own_place(world))), list[Place])
    own = world.nodes.index(world.host)
    return places[own], [places[other] for other in ranks.partners(own, len(places))]


def choose(environ: Mapping[str, str], interfaces: Mapping[str, Sequence[str]]) -> tuple[str, str]:
    """(interface, address) by which other ranks reach this node; empty where there is none.

    The interface is the one that GLOO_SOCKET_IFNAME names, or else the one on the route to MASTER_ADDR.
    """
    if asked := environ.get("GLOO_SOCKET_IFNAME"):
        return next(((name, interfaces[name][0]) for name in asked.split(",") if name in interfaces), ("", ""))
    address = source_address(environ.get("MASTER_ADDR", ""))
    return next((name for name, own in interfaces.items() if address in own), ""), address


def findings(by_host: Mapping[str, Sequence[Facts]]) -> list[Finding]:
    nodes = {host: ranks[0] for host, ranks in by_host.items()}
    addresses = {host: listed(rank.address for rank in ranks) for host, ranks in by_host.items()}
    several = {host: f"addresses of its ranks: {each}" for host, each in addresses.items() if "," in each}
    wrong = "several nodes have the same name, and count as one: only one of them was checked"
    fix = "give each node a hostname of its own (docker run --hostname)"
    found = alike(several, "warning", "host", wrong, fix)
    fix = "look at what `muster fabric plan` says on that node, and see that the host's libraries are bound there too"
    found += differences({host: node.fabric for host, node in nodes.items()}, "failed", "fabric", "fabric", fix)
    fix = "docker run --device /dev/infiniband; on a node: correct the devices' permissions"
    devices = {host: node.devices for host, node in nodes.items()}
    found += alike(devices, "warning", "fabric", "the fabric's devices can't be used", fix)
    fix = "docker run --ulimit memlock=-1; in Slurm PropagateResourceLimitsExcept=MEMLOCK and slurmd's LimitMEMLOCK"
    memlock = {host: node.memlock for host, node in nodes.items()}
    found += alike(memlock, "warning", "memlock", "the limit of locked memory is low for RDMA", fix)
    # Devices may have different names on each node: only rates are compared.
    known = {host: node.ports for host, node in nodes.items() if node.ports is not None}
    rates = {host: tuple(sorted(rate or 0 for rate in each.values())) for host, each in known.items()}
    shown = {
        rates[host]: ", ".join(f"{name} {f'at {rate:g} Gb/s' if rate else 'down'}" for name, rate in each.items())
        for host, each in known.items()
    }
    fix = "tell the site: the cable or the port of a link that is down or slow (ibstat, mlxlink)"
    found += differences(rates, "warning", "ports", "rate of InfiniBand ports", fix, lambda one: shown[one] or "none")
    fix = "tell the site: the card in its slot, or the slot (lspci -vv: LnkSta against LnkCap)"
    for name in sorted({name for node in nodes.values() for name in node.pcie}):
        wrong = f"the PCIe link of {name} is slower than the card and its slot allow"
        found += alike({host: node.pcie.get(name, "") for host, node in nodes.items()}, "warning", "pcie", wrong, fix)
    return found


def summary(by_host: Mapping[str, Sequence[Facts]]) -> str:
    nodes = [ranks[0] for ranks in by_host.values()]
    interface = listed(rank.interface for ranks in by_host.values() for rank in ranks) or "-"
    up = [[rate for rate in (node.ports or {}).values() if rate] for node in nodes]
    rates = listed(f"{rate:g}" for each in up for rate in sorted(each))
    links = f"{plural(max(map(len, up)), 'port')} up, at {rates} Gb/s" if rates else "no InfiniBand or RoCE port"
    return f"{listed(node.fabric for node in nodes) or 'tcp'} by {interface}; {links}"


def ports(sys: Path = Path("/sys")) -> dict[str, float | None]:
    """The rates of the InfiniBand and RoCE ports below `sys`, in 10^9 bits a second; None for a port that is down."""
    found: dict[str, float | None] = {}
    for folder in sorted(sys.glob("class/infiniband/*/ports/*")):
        # "4: ACTIVE", "200 Gb/sec (4X HDR)"
        is_active = text_of(folder / "state").strip().endswith(": ACTIVE")
        found[f"{folder.parents[1].name}/{folder.name}"] = _number(folder / "rate") if is_active else None
    return found


def slow_pcie_links(sys: Path = Path("/sys")) -> dict[str, str]:
    """Adapters and GPUs whose PCIe link has fewer lanes or less speed than card and slot allow, with both numbers."""
    found: dict[str, str] = {}
    adapters = {folder.name: folder / "device" for folder in sorted(sys.glob("class/infiniband/*"))}
    gpus = {f"GPU at {folder.name}": folder for folder in sorted(sys.glob("bus/pci/drivers/nvidia/*:*:*.*"))}
    for name, folder in (adapters | gpus).items():
        device = folder.resolve()
        # The weaker end sets the limit: a card of 16 lanes in a slot of 8 is not faulty.
        ends = [end for end in (device, device.parent) if (end / "max_link_width").exists()]
        lanes, speed = _number(device / "current_link_width"), _number(device / "current_link_speed")
        most_lanes = min(filter(None, (_number(end / "max_link_width") for end in ends)), default=0)
        most_speed = min(filter(None, (_number(end / "max_link_speed") for end in ends)), default=0)
        # A virtual link has 0 lanes; 255 is the kernel's value for an unknown number (PCIE_LNK_WIDTH_UNKNOWN).
        if lanes and lanes < most_lanes < 255:
            found[name] = f"{lanes:g} lanes of {most_lanes:g}"
        # An idle GPU lowers the speed of its link by itself.
        elif lanes and speed and speed < most_speed and name not in gpus:
            found[name] = f"{speed:g} GT/s of {most_speed:g}"
    return found


def _number(path: Path) -> float | None:
    """The number at the start of a file such as "16.0 GT/s PCIe"; None without one."""
    found = re.match(r"\d+(\.\d+)?", text_of(path))
    return float(found.group()) if found else None
