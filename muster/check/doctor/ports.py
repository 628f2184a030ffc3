"""Whether the nodes reach each other on the ports that a training uses, pair by pair, with large messages too.

Each node listens as gloo and NCCL do, and connects to the others. Who listens signs what it is sent with a secret of
the job: another program, or another host with that address, is not taken for the node.
"""

import contextlib
import hashlib
import hmac
import os
import random
import secrets
import socket
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from threading import Thread
from typing import Any

import msgspec

from muster.check.doctor.findings import Finding, Part
from muster.check.doctor.network import own_address, targets
from muster.check.options import DoctorOptions
from muster.check.ranks import gather_nodes, listed
from muster.train.world import World

FIRST_PORT, NUM_PORTS = 61000, 4536
"""Of these the launcher takes the port at which ranks meet (entrypoint/rendezvous.py)."""

EPHEMERAL, MEETING = "ephemeral", "rendezvous"
"""The kinds of ports: those that the kernel gives out, and those at which ranks meet."""

PORT_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")

CONNECT_S, ANSWER_S = 3.0, 10.0
"""A connection is the kernel's work; an answer is a program's, on a machine that may be busy."""

TIMED_OUT, REFUSED = "timed out", "refused"
SILENT, STRANGER = "connected, then silence", "another program answers there"
STALLED = "small messages pass, 64 KiB do not"

MOST_AT_ONCE = 64
MOST_ROWS = 2000
MOST_LINES = 6

_NONCE, _DIGEST, _MUCH = 16, 32, 1 << 16


@dataclass(frozen=True)
class Node:
    """A node, and where it listens.

    Attributes:
        rank: of its first process.
        ports: by their kind.
        wrong: why it can't listen.
    """

    host: str
    interface: str
    address: str
    rank: int = 0
    secret: str = ""
    ports: dict[str, int] = field(default_factory=dict[str, int])
    wrong: str = ""


@dataclass(frozen=True)
class Probe:
    """One node's connection to a port of another, and what was wrong; nothing where all was well.

    Attributes:
        source, target: nodes by their number.
        ms: milliseconds that a short message took there and back.
    """

    source: int
    target: int
    kind: str
    port: int
    wrong: str
    ms: float

    @property
    def pair(self) -> tuple[int, int]:
        return min(self.source, self.target), max(self.source, self.target)


def check(world: World, options: DoctorOptions) -> Part:
    """Which nodes reach which."""
    listeners: list[Listener] = []
    own = _listen(world, listeners) if world.local_rank == 0 else None
    try:
        nodes = msgspec.convert(gather_nodes(world, None if own is None else asdict(own)), list[Node])
        if len(nodes) < 2:
            return Part("ports", "one node: nothing to reach")
        probes = [] if own is None else _probe_others(nodes, world.rank, options)
        of_nodes = gather_nodes(world, probes, to_all=False)
    finally:
        for listener in listeners:
            listener.close()
    if not world.main:
        return Part("ports")
    return _part(nodes, [Probe(*one) for of_one in of_nodes for one in of_one])


def ephemeral_range() -> str:
    """The ports that the kernel gives to programs that ask for any."""
    try:
        return "-".join(PORT_RANGE.read_text().split())
    except OSError:
        return "32768-60999"


def _listen(world: World, listeners: list["Listener"]) -> Node:
    """What the others have to know to connect to this node, whose listeners are added to `listeners`."""
    interface, address = own_address()
    secret = secrets.token_hex(16)
    port = os.environ.get("MASTER_PORT", "")
    ports: dict[str, int] = {}
    wrong = "" if address else "no interface leads to the other nodes"
    try:
        if address:
            listeners.append(Listener(address, 0, secret))
            ports[EPHEMERAL] = listeners[-1].port
        # Who has ranks meet elsewhere need not have opened these.
        if address and port.isdecimal() and FIRST_PORT <= int(port) < FIRST_PORT + NUM_PORTS:
            listeners.append(listen_in_range(address, secret))
            ports[MEETING] = listeners[-1].port
    except OSError as error:
        wrong = f"can't listen at {address}: {error}"
    return Node(world.host, interface, address, world.rank, secret, ports, wrong)


def _probe_others(nodes: Sequence[Node], rank: int, options: DoctorOptions) -> list[list[Any]]:
    own = next(index for index, node in enumerate(nodes) if node.rank == rank)
    others = targets(own, len(nodes), options)
    places = [(other, kind, port) for other in others for kind, port in nodes[other].ports.items()]

    def ask(place: tuple[int, str, int]) -> list[Any]:
        other, kind, port = place
        wrong, ms = probe(nodes[other].address, port, nodes[other].secret)
        return [own, other, kind, port, wrong, round(ms, 3)]

    with ThreadPoolExecutor(MOST_AT_ONCE) as threads:
        return list(threads.map(ask, places))


class Listener:
    """A port of this host that answers to those who know its secret, until it is closed.

    Args:
        address: of the one interface that it listens on.
        port: 0 takes any that the kernel gives.

    Raises:
        OSError: it can't listen there.
    """

    def __init__(self, address: str, port: int, secret: str) -> None:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._secret = secret
        self._socket = socket.create_server((address, port), family=family, backlog=256)
        self.port = int(self._socket.getsockname()[1])
        Thread(target=self._serve, daemon=True).start()

    def close(self) -> None:
        """Ends it."""
        # Without this the thread that accepts would keep the port open.
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._socket.accept()
                Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            # Longer than who connects: that one tells what became of it, and would only see that this one hung up.
            connection.settimeout(3 * ANSWER_S)
            for length in (_NONCE, _MUCH):
                connection.sendall(sign(self._secret, _read(connection, length)))


def listen_in_range(address: str, secret: str) -> Listener:
    """A listener on a port of those at which ranks meet.

    Raises:
        OSError: it can't listen on any of some that were tried.
    """
    for port in random.sample(range(FIRST_PORT, FIRST_PORT + NUM_PORTS), 19):
        with contextlib.suppress(OSError):
            return Listener(address, port, secret)
    return Listener(address, FIRST_PORT + random.randrange(NUM_PORTS), secret)


def probe(address: str, port: int, secret: str) -> tuple[str, float]:
    """(what is wrong, milliseconds of a short message) of a listener that should know `secret`."""
    try:
        connection = _connect(address, port)
    except TimeoutError:
        return TIMED_OUT, 0.0
    except ConnectionRefusedError:
        return REFUSED, 0.0
    except OSError as error:
        return str(error), 0.0
    with connection:
        connection.settimeout(ANSWER_S)
        started, ms, late = time.perf_counter(), 0.0, SILENT
        try:
            for length in (_NONCE, _MUCH):
                if not _is_signed(connection, secret, secrets.token_bytes(length)):
                    return STRANGER, ms
                ms, late = ms or 1000 * (time.perf_counter() - started), STALLED
        except TimeoutError:
            return late, ms
        except OSError as error:
            return f"connected, then closed: {error}", ms
        return "", ms


def _connect(address: str, port: int) -> socket.socket:
    """A connection; a lost packet gets a second chance."""
    with contextlib.suppress(TimeoutError):
        return socket.create_connection((address, port), timeout=CONNECT_S)
    return socket.create_connection((address, port), timeout=CONNECT_S)


def _is_signed(connection: socket.socket, secret: str, words: bytes) -> bool:
    connection.sendall(words)
    return hmac.compare_digest(_read(connection, _DIGEST), sign(secret, words))


def sign(secret: str, words: bytes) -> bytes:
    """The signature that only those make of `words` who know `secret`."""
    return hmac.digest(secret.encode(), words, hashlib.sha256)


def _read(connection: socket.socket, length: int) -> bytes:
    """Raises: OSError: the other side closed before, or took too long."""
    got = b""
    while len(got) < length:
        part = connection.recv(length - len(got))
        if not part:
            raise ConnectionError("the other side hung up")
        got += part
    return got


def _part(nodes: Sequence[Node], probes: Sequence[Probe]) -> Part:
    fine = [probe for probe in probes if not probe.wrong]
    pairs = len({(probe.source, probe.target) for probe in probes})
    says = f"{pairs} ways between {len(nodes)} nodes are open"
    if fine:
        slowest = max(fine, key=lambda probe: probe.ms)
        way = f"{nodes[slowest.source].host} -> {nodes[slowest.target].host}"
        says += f", the slowest answer took {slowest.ms:.1f} ms ({way})"
    rows = [
        [nodes[probe.source].host, nodes[probe.target].host, probe.kind, probe.port, probe.wrong, probe.ms]
        for probe in probes
    ]
    # What is wrong, then the slowest: of a thousand nodes nobody reads all.
    rows = sorted(rows, key=lambda row: (not row[4], -float(row[5])))[:MOST_ROWS]
    values = {"columns": ["from", "to", "kind", "port", "wrong", "ms"], "rows": rows}
    deaf = [_deaf(node) for node in nodes if node.wrong]
    return Part("ports", says, [*deaf, *findings(nodes, probes, ephemeral_range())], values)


def _deaf(node: Node) -> Finding:
    wrong = f"{node.host} has no port at which the others could reach it"
    seen = f"{node.wrong}; interface {node.interface or '(none)'}"
    fix = (
        "--interface NAME, with an interface that all nodes have (`ip -brief address`), or unset GLOO_SOCKET_IFNAME "
        "and NCCL_SOCKET_IFNAME"
    )
    return Finding("fault", "port", node.host, wrong, seen, fix)


def findings(nodes: Sequence[Node], probes: Sequence[Probe], ephemeral: str) -> list[Finding]:
    """What the failed probes come from: all nodes, single nodes, single pairs.

    Args:
        nodes: those that the probes tell of by number.
        probes: failed ones and others.
        ephemeral: the range of the ports that the kernel gives out.
    """
    found: list[Finding] = []
    words = _Words(nodes, probes, ephemeral)
    for stalled in (False, True):
        bad = [probe for probe in probes if probe.wrong and (probe.wrong == STALLED) == stalled]
        everywhere = [kind for kind in (EPHEMERAL, MEETING) if _is_everywhere(kind, probes, bad, len(nodes))]
        if everywhere:
            of_all = [probe for probe in bad if probe.kind in everywhere]
            found.append(words.finding("", "no node reaches any other", of_all))
            bad = [probe for probe in bad if probe not in of_all]
        while (node := _outlier(probes, bad)) is not None:
            of_node = [probe for probe in bad if node in probe.pair]
            found.append(words.of_node(node, of_node))
            bad = [probe for probe in bad if probe not in of_node]
        for pair in sorted({probe.pair for probe in bad}):
            found.append(words.of_pair([probe for probe in bad if probe.pair == pair]))
    return found


def _is_everywhere(kind: str, probes: Sequence[Probe], bad: Sequence[Probe], num_nodes: int) -> bool:
    of_kind = [probe for probe in probes if probe.kind == kind]
    return num_nodes > 2 and bool(of_kind) and len(of_kind) == sum(probe.kind == kind for probe in bad)


def _outlier(probes: Sequence[Probe], bad: Sequence[Probe]) -> int | None:
    """The node that failures with two others at least, and with half of those it had to do with, have in common."""
    others = _others(bad)
    ranked = sorted(others, key=lambda node: len(others[node]), reverse=True)
    most = len(others[ranked[0]]) if ranked else 0
    # Nodes that are cut off fail equally often; but where as many fail only among themselves, none is the odd one.
    tied = sum(len(each) == most for each in others.values())
    if most < 2 or (tied > 1 and tied >= most):
        return None
    return ranked[0] if 2 * most >= len(_others(probes)[ranked[0]]) else None


def _others(probes: Sequence[Probe]) -> dict[int, set[int]]:
    """The nodes that each node had to do with."""
    found: dict[int, set[int]] = {}
    for probe in probes:
        found.setdefault(probe.source, set()).add(probe.target)
        found.setdefault(probe.target, set()).add(probe.source)
    return found


@dataclass(frozen=True)
class _Words:
    """Words for failed probes."""

    nodes: Sequence[Node]
    probes: Sequence[Probe]
    ephemeral: str

    def of_node(self, node: int, bad: Sequence[Probe]) -> Finding:
        """What is wrong with a node."""
        host = self.nodes[node].host
        incoming = {probe.source for probe in bad if probe.target == node}
        outgoing = {probe.target for probe in bad if probe.source == node}
        others = listed([self.nodes[other].host for other in sorted(incoming | outgoing)])
        if incoming and outgoing:
            wrong = f"{host} and {others} do not reach each other"
        elif incoming:
            wrong = f"{host} can't be reached from {others}"
        else:
            wrong = f"{host} does not reach {others}"
        return self.finding(host, wrong, bad)

    def of_pair(self, bad: Sequence[Probe]) -> Finding:
        """What is wrong between two nodes."""
        ways = sorted({(probe.source, probe.target) for probe in bad})
        source, target = (self.nodes[node].host for node in ways[0])
        if len(ways) > 1:
            return self.finding(f"{source} <-> {target}", f"{source} and {target} do not reach each other", bad)
        return self.finding(f"{source} -> {target}", f"{source} does not reach {target}", bad)

    def finding(self, host: str, wrong: str, bad: Sequence[Probe]) -> Finding:
        """The finding of probes that failed for one reason: all of them stalled, or none."""
        kinds = {probe.kind for probe in bad}
        where = " and ".join(self._range(kind) for kind in sorted(kinds))
        lines = [self._line(probe) for probe in bad[:MOST_LINES]]
        more = [f"and {len(bad) - MOST_LINES} more"] if len(bad) > MOST_LINES else []
        # Only node 0 listens on a port of the range at which ranks meet; the next job may have another node there.
        is_fatal = EPHEMERAL in kinds or any(probe.target == 0 for probe in bad)
        about = "port"
        if bad[0].wrong == STALLED:
            wrong, about = f"{wrong} with more than small messages", "mtu"
        elif len(kinds) < len({probe.kind for probe in self.probes}):
            wrong += f" on {where}"
        level = "fault" if is_fatal else "warning"
        return Finding(level, about, host, wrong, "; ".join([*lines, *more]), self._fix(bad, where))

    def _range(self, kind: str) -> str:
        if kind == EPHEMERAL:
            return f"ports {self.ephemeral}, on which gloo and NCCL listen"
        return f"ports {FIRST_PORT}-{FIRST_PORT + NUM_PORTS - 1}, at which ranks meet"

    def _line(self, probe: Probe) -> str:
        source, target = self.nodes[probe.source], self.nodes[probe.target]
        return f"{source.host} -> {target.host} {target.address} port {probe.port} ({probe.kind}): {probe.wrong}"

    def _fix(self, bad: Sequence[Probe], where: str) -> str:
        source, target = self.nodes[bad[0].source], self.nodes[bad[0].target]
        wrong = {probe.wrong for probe in bad}
        if STALLED in wrong:
            return (
                f"`ip link show {source.interface}` on both: the MTU has to be the same on all nodes and switches; "
                f"`ping -M do -s 8972 {target.address}` on {source.host} shows what gets through"
            )
        if wrong <= {TIMED_OUT, REFUSED}:
            return f"let TCP through between the nodes of a job on {where} (`nft list ruleset`, `iptables -S` on both)"
        return (
            f"`ip route get {target.address}` on {source.host}: is there a way, and no proxy or second host with that "
            "address? Or another network for all: --interface NAME"
        )
