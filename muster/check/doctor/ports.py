"""Connections between nodes, pair by pair, on ports such as a training uses, with small and large messages.

Each node listens as gloo and NCCL do, and connects to the others. A listener signs what it receives with a secret that
only the job knows: another program, or another host with the same address, is not taken for the node.
"""

import contextlib
import hmac
import secrets
import socket
import socketserver
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import Thread

from muster.check.doctor.finding import Finding, alike
from muster.check.doctor.network import Place, gather_places
from muster.check.options import DoctorOptions
from muster.check.ranks import gather_hosts, leads_host
from muster.paths import text_of
from muster.train.distributed.world import World
from muster.units import listed

NAME = "ports"

CONNECT_S, ANSWER_S = 6.0, 10.0
"""Seconds for a connection, which the kernel retries after 1 and 3 s, and for an answer, as a program may be busy."""

SILENT, STRANGER, CLOSED = "connected, then no answer", "another program answers there", "connected, then closed"
STALLED = "small messages pass, 64 KiB do not"

MAX_AT_ONCE = 64

_NONCE, _DIGEST, _MUCH = 16, 32, 1 << 16


@dataclass(frozen=True)
class Probe:
    """A test connection from one host to the port of another; `wrong` is empty where it succeeded."""

    source: str
    target: str
    port: int
    wrong: str

    @property
    def pair(self) -> frozenset[str]:
        return frozenset((self.source, self.target))


@dataclass(frozen=True)
class Facts:
    """The connections of one node.

    Attributes:
        place: the addresses of the node.
        wrong: why it can't listen; empty where it can.
        probes: its test connections to other nodes.
    """

    place: Place
    wrong: str = ""
    probes: tuple[Probe, ...] = ()


def gather(world: World, options: DoctorOptions) -> Facts | None:
    """Test connections to other nodes, by the first rank of each host."""
    own, others = gather_places(world)
    is_asking = leads_host(world) and bool(others)
    with contextlib.ExitStack() as stack:
        port, secret, wrong = 0, secrets.token_hex(16), ""
        if is_asking and not own.address:
            wrong = "no interface leads to the other nodes"
        elif is_asking:
            try:
                port = stack.enter_context(contextlib.closing(Listener(own.address, secret))).port
            except OSError as error:
                wrong = f"can't listen at {own.address}: {error}"
        listeners = dict(zip(world.nodes, gather_hosts(world, [port, secret]), strict=True))

        def ask(other: Place) -> Probe:
            return Probe(own.host, other.host, listeners[other.host][0], probe(other.address, *listeners[other.host]))

        asked = [other for other in others if is_asking and listeners[other.host][0]]
        with ThreadPoolExecutor(MAX_AT_ONCE) as threads:
            probes = tuple(threads.map(ask, asked))
        gather_hosts(world, None)  # a barrier: the listener is needed until all nodes have asked
    return Facts(own, wrong, probes) if leads_host(world) else None


def ephemeral_range() -> str:
    return "-".join((text_of(Path("/proc/sys/net/ipv4/ip_local_port_range")) or "32768 60999").split())


class Listener(socketserver.ThreadingTCPServer):
    """A server on a port that the kernel chooses; it answers messages with their signatures until it is closed.

    Args:
        address: of the one interface that it listens on.
        secret: the key of the signatures.

    Raises:
        OSError: it can't listen there.
    """

    daemon_threads = True
    block_on_close = False
    request_queue_size = 256

    def __init__(self, address: str, secret: str) -> None:
        self.address_family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self.secret = secret
        super().__init__((address, 0), Answer)
        self.port = int(self.socket.getsockname()[1])
        Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()

    def close(self) -> None:
        self.shutdown()
        self.server_close()


class Answer(socketserver.StreamRequestHandler):
    """Answers the small and the large message of one connection, each with its signature."""

    # Seconds, more than the client waits: it reports its own time-out, and not that this side closed the connection.
    timeout = 3 * ANSWER_S

    def handle(self) -> None:
        assert isinstance(self.server, Listener)
        with contextlib.suppress(OSError):
            for length in (_NONCE, _MUCH):
                words = self.rfile.read(length)
                if len(words) < length:
                    return
                self.wfile.write(sign(self.server.secret, words))


def sign(secret: str, words: bytes) -> bytes:
    """The signature of `words` by the key `secret`: HMAC with SHA-256."""
    return hmac.digest(secret.encode(), words, "sha256")


def probe(address: str, port: int, secret: str) -> str:
    """Tests a listener that should know `secret`; returns what is wrong with it, or an empty string."""
    try:
        connection = socket.create_connection((address, port), timeout=CONNECT_S)
    except OSError as error:
        return str(error) or repr(error)
    with connection, connection.makefile("rb") as answers:
        connection.settimeout(ANSWER_S)
        for length, late in ((_NONCE, SILENT), (_MUCH, STALLED)):
            words = secrets.token_bytes(length)
            try:
                connection.sendall(words)
                answer = answers.read(_DIGEST)
            except TimeoutError:
                return late
            except OSError as error:
                return f"{CLOSED}: {error}"
            if len(answer) < _DIGEST:
                return CLOSED
            if not hmac.compare_digest(answer, sign(secret, words)):
                return STRANGER
        return ""


def findings(by_host: Mapping[str, Sequence[Facts]]) -> list[Finding]:
    """The findings of failed probes, by cause: all nodes, single nodes, single pairs."""
    places = {host: facts[0].place for host, facts in by_host.items()}
    probes = [one for facts in by_host.values() for one in facts[0].probes]
    fix = (
        "--interface NAME, with an interface that all nodes have (`ip -brief address`), or unset "
        "GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME"
    )
    unreachable = {host: facts[0].wrong for host, facts in by_host.items()}
    found = alike(unreachable, "failed", "port", "it can't open a port on which the other nodes could reach it", fix)
    for is_stalled in (False, True):
        bad = [probe for probe in probes if probe.wrong and (probe.wrong == STALLED) == is_stalled]
        found += [_finding(places, host, wrong, of_cause) for host, wrong, of_cause in _causes(probes, bad)]
    return found


def summary(by_host: Mapping[str, Sequence[Facts]]) -> str:
    ways = sum(len(facts[0].probes) for facts in by_host.values())
    return f"all {ways} connections between {len(by_host)} nodes are open" if ways else "one node: nothing to reach"


def _causes(probes: Sequence[Probe], bad: Sequence[Probe]) -> Iterator[tuple[str, str, list[Probe]]]:
    """The causes of failed probes: (host, what is wrong, probes of this cause); each probe has one cause."""
    if len(bad) == len(probes) > 2:
        yield "", "no node reaches any other", list(bad)
        return
    while (node := _outlier(probes, bad)) is not None:
        of_node = [probe for probe in bad if node in probe.pair]
        yield node, _wrong_with(node, of_node), of_node
        bad = [probe for probe in bad if node not in probe.pair]
    for pair in dict.fromkeys(probe.pair for probe in bad):
        of_pair = [probe for probe in bad if probe.pair == pair]
        source, target = of_pair[0].source, of_pair[0].target
        yield f"{source} {'->' if len(of_pair) == 1 else '<->'} {target}", _wrong_with(source, of_pair), of_pair


def _outlier(probes: Sequence[Probe], bad: Sequence[Probe]) -> str | None:
    """The node with failures to most others: at least two, and half of those it has probes with; None without one."""
    others = _others(bad)
    ranked = sorted(others, key=lambda node: len(others[node]), reverse=True)
    most = len(others[ranked[0]]) if ranked else 0
    # Several nodes that are cut off fail equally often; but nodes that all fail among themselves have no outlier.
    tied = sum(len(each) == most for each in others.values())
    if most < 2 or (tied > 1 and tied >= most):
        return None
    return ranked[0] if 2 * most >= len(_others(probes)[ranked[0]]) else None


def _others(probes: Sequence[Probe]) -> dict[str, set[str]]:
    """For each node, the nodes to or from which it has probes."""
    found: dict[str, set[str]] = {}
    for probe in probes:
        found.setdefault(probe.source, set()).add(probe.target)
        found.setdefault(probe.target, set()).add(probe.source)
    return found


def _wrong_with(node: str, bad: Sequence[Probe]) -> str:
    """The fault of `node`, in words; each probe in `bad` is to or from it."""
    incoming = {probe.source: None for probe in bad if probe.target == node}
    outgoing = {probe.target: None for probe in bad if probe.source == node}
    others = listed(incoming | outgoing)
    if incoming and outgoing:
        return f"{node} and {others} do not reach each other"
    return f"{node} can't be reached from {others}" if incoming else f"{node} does not reach {others}"


def _finding(places: Mapping[str, Place], host: str, wrong: str, bad: Sequence[Probe]) -> Finding:
    """The finding of probes that failed for one cause: either all of them stalled, or none."""
    lines = [f"{one.source} -> {one.target} {places[one.target].address} port {one.port}: {one.wrong}" for one in bad]
    seen = listed(lines, between="; ")
    source, target = places[bad[0].source], places[bad[0].target]
    if bad[0].wrong == STALLED:
        fix = (
            f"`ip link show {source.interface}` on both: the MTU has to be the same on all nodes and switches; "
            f"`ping -M do -s 8972 {target.address}` on {source.host} shows whether large packets pass"
        )
        return Finding("failed", "mtu", host, f"{wrong} with large messages", seen, fix)
    where = f"ports {ephemeral_range()}, on which gloo and NCCL listen"
    fix = (
        f"allow TCP between the nodes of a job on {where} (`nft list ruleset`, `iptables -S` on both); or use "
        f"another network on all: --interface NAME; `ip route get {target.address}` on {source.host} shows the route, "
        "which must not lead to a proxy or to another host with that address"
    )
    return Finding("failed", "port", host, f"{wrong} on {where}", seen, fix)
