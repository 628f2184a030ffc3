"""This host's network interfaces: their addresses, and which of them leads to another host. No packet is sent."""

import socket
from collections.abc import Collection
from ipaddress import ip_address

import psutil


def own_addresses() -> dict[str, list[str]]:
    """The addresses of this host's interfaces, by interface name: first IPv4, then IPv6 without link-local ones."""
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


def has_one(interfaces: Collection[str], names: str) -> bool:
    """Whether NCCL's list `names` selects one of `interfaces`: eth,ib are prefixes, =ib0,ib1 whole names, ^lo excludes.

    Source: https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html#nccl-socket-ifname
    """
    if names.startswith("^"):
        return True
    if names.startswith("="):
        return any(name in interfaces for name in names[1:].split(","))
    return any(each.startswith(name) for each in interfaces for name in names.split(",") if name)


def source_address(host: str) -> str:
    """The source address that the routing table gives packets to `host`; empty where there is none."""
    try:
        family, kind, _, _, place = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(place)
            return str(probe.getsockname()[0]).partition("%")[0]
    except (OSError, UnicodeError):
        return ""


def is_loopback(address: str) -> bool:
    """Whether `address` is a loopback address; False for names."""
    try:
        return ip_address(address).is_loopback
    except ValueError:
        return False
