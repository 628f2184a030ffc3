"""Addresses and interfaces of this host, towards the others. No packet is sent: the routing table is asked."""

import errno
import ipaddress
import socket
from concurrent.futures import Future
from threading import Thread

import psutil

from train.errors import MusterError

RESOLVE_TIMEOUT_S = 10.0
LOOPBACK = "lo"
# An address that documents use (RFC 5737): outside of every cluster, so its route is the default one.
_ELSEWHERE = "192.0.2.1"

FIX_NAME = "--master-addr ADDRESS, with an address or name of node rank 0 that this host can resolve"


def resolve(host: str, seen: str) -> str:
    """The address that `host` has from here, IPv4 where it has both.

    Raises:
        MusterError: it has none, or the answer takes longer than RESOLVE_TIMEOUT_S.
    """
    answer: Future[str] = Future()

    def ask() -> None:
        try:
            found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
            # AF_INET sorts before AF_INET6.
            answer.set_result(str(min(found, key=lambda entry: entry[0])[4][0]))
        except (OSError, UnicodeError) as reason:
            answer.set_exception(reason)

    # The resolver has no deadline of its own that could be set; a daemon thread is left behind at the exec.
    Thread(target=ask, daemon=True).start()
    try:
        return answer.result(timeout=RESOLVE_TIMEOUT_S)
    except TimeoutError:
        reason: object = f"no answer within {RESOLVE_TIMEOUT_S:.0f} s"
    except (OSError, UnicodeError) as caught:
        reason = caught
    raise MusterError(
        f"the name of the master, {host}, does not resolve on {socket.gethostname()}: {reason}", seen=seen, fix=FIX_NAME
    )


def interface_towards(address: str) -> str | None:
    """The network interface whose address this host would use as its own towards `address`; None if there is none."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((address, 9))
            own = str(probe.getsockname()[0])
    except OSError:
        return None
    for name, addresses in psutil.net_if_addrs().items():
        if any(entry.address.partition("%")[0] == own for entry in addresses):
            return name
    return None


def address_of(interface: str | None) -> str | None:
    """The address of this host on `interface`, IPv4 where it has both; None without one."""
    entries = psutil.net_if_addrs().get(interface or "", [])
    found = {entry.family: entry.address for entry in entries if not entry.address.startswith("fe80:")}
    return found.get(socket.AF_INET) or found.get(socket.AF_INET6)


def is_loopback(address: str) -> bool:
    """Whether `address`, an IPv4 or IPv6 address, never leaves the host."""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def fabric_interface(targets: tuple[str, ...]) -> str | None:
    """The interface that leads to the first of the addresses `targets` which is not this host over loopback.

    The master's own name may resolve to a loopback address on the master (Debian writes 127.0.1.1 into /etc/hosts),
    which says nothing about the way to the others: then another host's address, or the default route, tells.
    """
    for address in (*targets, _ELSEWHERE):
        if not is_loopback(address):
            name = interface_towards(address)
            if name is not None and name != LOOPBACK:
                return name
    return None


def check_port_free(port: int, source: str) -> None:
    """Returns if `port` can be listened on here.

    Raises:
        MusterError: it is taken; the error names the port, and the process where this user may know it.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
            probe.listen(1)
        except OSError as reason:
            if reason.errno != errno.EADDRINUSE:
                raise MusterError(
                    f"port {port} can't be listened on here: {reason.strerror}",
                    seen=source,
                    fix="--master-port PORT, the same on all nodes",
                ) from None
        else:
            return
    raise MusterError(
        f"port {port} on {socket.gethostname()} is taken{_holder(port)}",
        seen=source,
        fix="--master-port PORT, the same on all nodes, with a free port",
    )


def _holder(port: int) -> str:
    try:
        for connection in psutil.net_connections("tcp"):
            if connection.laddr and connection.laddr.port == port and connection.status == psutil.CONN_LISTEN:
                return (
                    f" by process {connection.pid} ({psutil.Process(connection.pid).name()})" if connection.pid else ""
                )
    except (psutil.Error, OSError):
        pass
    return ""


def free_port() -> int:
    """A port that nothing listens on at this moment."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
