"""Addresses, interfaces and ports of this host. For a route, the routing table is asked, and no packet is sent."""

import errno
import socket
from collections.abc import Callable
from concurrent.futures import Future
from threading import Thread
from typing import TypeVar

import psutil

from muster.errors import MusterError
from muster.interfaces import is_loopback, own_addresses, source_address

T = TypeVar("T")

RESOLVE_TIMEOUT_S = 10.0
REFUSED_TIMEOUT_S = 30.0
"""Seconds that the others have to come and read why a process can't take part in their launch."""
LOOPBACK = "lo"
# An address reserved for documentation (RFC 5737): outside of every cluster, so its route is the default one.
_ELSEWHERE = "192.0.2.1"

FIX_NAME = "--master-addr ADDRESS, with an address or name of node rank 0 that this host can resolve"


def call_within(timeout_s: float, ask: Callable[[], T]) -> T:
    """Calls `ask` in a daemon thread; returns its result, or raises its exception.

    Raises:
        TimeoutError: it took longer than `timeout_s`; the thread goes on.
    """
    answer: Future[T] = Future()

    def run() -> None:
        try:
            answer.set_result(ask())
        except Exception as error:  # raised below, in the thread that asked
            answer.set_exception(error)

    Thread(target=run, daemon=True).start()
    return answer.result(timeout_s)


def resolve(host: str, seen: str) -> str:
    """The address to which `host` resolves here, IPv4 where it has both; `seen` is for the error.

    Raises:
        MusterError: it has none, or the answer takes longer than RESOLVE_TIMEOUT_S.
    """
    try:
        # The resolver has no deadline of its own that could be set.
        found = call_within(RESOLVE_TIMEOUT_S, lambda: socket.getaddrinfo(host, None, type=socket.SOCK_STREAM))
        # AF_INET sorts before AF_INET6.
        return str(min(found, key=lambda entry: entry[0])[4][0])
    except (OSError, UnicodeError) as caught:
        reason = str(caught) or f"no answer within {RESOLVE_TIMEOUT_S:.0f} s"  # a TimeoutError has no message
    raise MusterError(
        f"the name of the master, {host}, does not resolve on {socket.gethostname()}: {reason}", seen=seen, fix=FIX_NAME
    )


def is_own(host: str) -> bool:
    """Whether `host`, a name or an address, leads to this host itself."""
    try:
        address = resolve(host, host)
    except MusterError:
        return False
    return is_loopback(address) or any(address in own for own in own_addresses().values())


def address_of(interface: str | None) -> str | None:
    """The address of this host on `interface`, IPv4 where it has both; None without one."""
    return next(iter(own_addresses().get(interface or "", ())), None)


def own_address(interface: str | None) -> str:
    """The address by which others reach this host: on `interface`, by the default route, or the first that is up."""
    up = sorted(name for name, status in psutil.net_if_stats().items() if status.isup and name != LOOPBACK)
    found = (address_of(name) for name in (interface, fabric_interface(()), *up))
    # A machine without any network can still run all ranks itself.
    return next(filter(None, found), "127.0.0.1")


def fabric_interface(targets: tuple[str, ...]) -> str | None:
    """The interface to the first of the addresses `targets` that is not reached by loopback, else of the default route.

    The master's own name may resolve to a loopback address on the master (Debian writes 127.0.1.1 into /etc/hosts),
    which says nothing about the route to the others. None if all lead over loopback.
    """
    for address in (*targets, _ELSEWHERE):
        if not is_loopback(address):
            own = source_address(address)
            name = next((name for name, addresses in own_addresses().items() if own in addresses), LOOPBACK)
            if name != LOOPBACK:
                return name
    return None


def check_port_free(port: int, source: str) -> None:
    """Checks that this host can listen on `port`; `source` says where the port comes from.

    Raises:
        MusterError: it can't.
    """
    try:
        socket.create_server(("", port)).close()
    except OSError as reason:
        why = "is taken" if reason.errno == errno.EADDRINUSE else f"can't be listened on: {reason.strerror}"
        raise MusterError(
            f"port {port} on {socket.gethostname()} {why}",
            seen=source,
            fix="--master-port PORT, the same on all nodes, with a free port",
        ) from None


def free_port() -> int:
    """A port that nothing listens on at this moment."""
    with socket.create_server(("", 0)) as probe:
        return int(probe.getsockname()[1])
