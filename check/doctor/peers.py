"""The nodes of a job as they look at each other: who looks at whom, and by which address a node is found."""

import os
import socket
from collections.abc import Mapping, Sequence
from typing import Any

import psutil

from check.doctor.meeting import gather
from train.world import World

ALL_PAIRS_UP_TO = 32
"""Up to so many nodes every one looks at every other."""

QUICK_ALL_PAIRS_UP_TO = 8
"""The same for `--quick`."""


def of_nodes(world: World, value: Any, *, to_all: bool = True) -> list[Any]:
    """`value` of the first rank of each node, by rank; the other ranks' counts for nothing. See `meeting.gather`."""
    told = gather(world, value if world.local_rank == 0 else None, to_all=to_all)
    return [one for one in told if one is not None]


def targets(node: int, num_nodes: int, all_pairs_up_to: int = ALL_PAIRS_UP_TO) -> list[int]:
    """The nodes that `node` looks at: all others, or of many nodes those 1, 2, 4, 8... places away, both ways.

    Whoever is looked at looks back, and each node is connected to each other one by no more than log2 n of them.
    """
    if num_nodes <= all_pairs_up_to:
        return [other for other in range(num_nodes) if other != node]
    steps = [1 << power for power in range((num_nodes // 2).bit_length())]
    return sorted({(node + way * step) % num_nodes for step in steps for way in (1, -1)} - {node})


def up_to(is_quick: bool) -> int:
    """How many nodes may all look at each other."""
    return QUICK_ALL_PAIRS_UP_TO if is_quick else ALL_PAIRS_UP_TO


def plain(address: str) -> str:
    """An address without its zone."""
    return address.partition("%")[0]


def own_addresses() -> dict[str, list[str]]:
    """The IPv4 and IPv6 addresses of this host's interfaces, by name; IPv4 first, none that only one link knows."""
    found: dict[str, list[str]] = {}
    for name, entries in psutil.net_if_addrs().items():
        of_ip = sorted((entry for entry in entries if entry.family in (socket.AF_INET, socket.AF_INET6)), key=_family)
        own = [plain(entry.address) for entry in of_ip if not entry.address.startswith("fe80:")]
        if own:
            found[name] = own
    return found


def _family(entry: Any) -> int:
    return int(entry.family)


def chosen(environ: Mapping[str, str], interfaces: Mapping[str, Sequence[str]]) -> tuple[str, str]:
    """(interface, address) by which the other ranks find this node; empty where there is none.

    It is the one that gloo or NCCL is told to take, or else the one towards MASTER_ADDR.

    Source: https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html#nccl-socket-ifname
    """
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        for interface in matching(environ.get(name, ""), interfaces):
            return interface, interfaces[interface][0]
    address = towards(environ.get("MASTER_ADDR", ""))
    return interface_of(address, interfaces) or "", address


def interface_of(address: str, interfaces: Mapping[str, Sequence[str]] | None = None) -> str | None:
    """The interface of this host that has `address`."""
    known = own_addresses() if interfaces is None else interfaces
    return next((name for name, own in known.items() if address in own), None)


def matching(wanted: str, interfaces: Mapping[str, Sequence[str]]) -> list[str]:
    """The interfaces that NCCL_SOCKET_IFNAME=`wanted` stands for, in its order: names, prefixes, `=NAME`, `^NOT`."""
    if not wanted:
        return []
    if wanted.startswith("^"):
        unwanted = tuple(wanted[1:].lstrip("=").split(","))
        return [name for name in interfaces if not name.startswith(unwanted) and name != "lo"]
    is_exact, words = wanted.startswith("="), wanted.lstrip("=").split(",")
    found = [word for word in words if word in interfaces]
    if not is_exact:
        found += [name for word in words for name in interfaces if word and name.startswith(word)]
    return list(dict.fromkeys(found))


def towards(host: str) -> str:
    """The address that this host would use as its own towards `host`, without sending anything; empty without one."""
    try:
        family, kind, _, _, place = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(place)
            return plain(str(probe.getsockname()[0]))
    except (OSError, UnicodeError):
        return ""


def own_place() -> tuple[str, str]:
    """(interface, address) of this node, see `chosen`."""
    return chosen(os.environ, own_addresses())
