"""This host's network interfaces: their addresses, and which of them leads to another host. No packet is sent."""

import socket
from contextlib import suppress
from ipaddress import ip_address

import psutil

from muster.errors import MusterError


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


def check_interfaces(names: str, seen: str, *, by_prefix: bool = False) -> None:
    """Returns if this host has the interfaces `names`, between commas; `by_prefix` if it has some that begin so.

    Raises:
        MusterError: one is not here, or has no address.
    """
    families = (socket.AF_INET, socket.AF_INET6)
    here = [name for name, entries in psutil.net_if_addrs().items() if any(each.family in families for each in entries)]
    for name in filter(None, names.split(",")):
        if not any(each.startswith(name) if by_prefix else each == name for each in here):
            raise MusterError(
                f"{socket.gethostname()} has no network interface {name} with an address",
                seen=f"{seen}; there are: {' '.join(here)}",
                fix="--interface NAME, with one that all nodes have, or neither of them",
            )


def towards(host: str) -> str:
    """The address that this host would use as its own towards `host`, by the routing table; empty without one."""
    with suppress(OSError, UnicodeError):
        family, kind, _, _, place = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(place)
            return str(probe.getsockname()[0]).partition("%")[0]
    return ""


def is_loopback(address: str) -> bool:
    """Whether this is an address that never leaves its host; False for names."""
    with suppress(ValueError):
        return ip_address(address).is_loopback
    return False
