"""Every pair of nodes by itself: the mode of bench that names the slow link or node.

All ranks of both nodes take part side by side, each with the one of the same local rank, as each may have a network
card of its own. Many pairs are measured at once, but no node is in two of them. Where anything seems slow, or
links differ much, all is measured again.
"""

import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from check.bench import pairs, schedule, sizes, transport
from check.bench.pairs import Row
from check.bench.timing import Late, wait_for_device
from check.bench.together import Broken
from check.doctor.findings import Finding
from check.options import BenchOptions
from train.errors import FAILED, MusterError
from train.world import World

SIZES = {"gloo": "4M", "nccl": "16M"}
"""Messages, where `--max-size` is not given."""

LEAST = 1 << 16
"""Bytes of the first messages, and of all on a link that is very slow."""

BUDGET_S = 0.5
"""For about so long each direction of a pair is measured."""

SPIN_S = 0.05
"""So long a rank asks its GPU without a pause whether it is done."""

TRIES, FEWEST = 3, 3
"""Messages of each size on the way to the largest; messages that are counted, however slow they are."""


@dataclass(frozen=True)
class Figures:
    """One direction of a pair, for programs.

    Attributes:
        source, target: the sending and the receiving host.
        gb_s, best_gb_s: 10^9 bytes a second, by the middle and by the best message.
        latency_us: one way, of the shortest message.
        size: bytes of a message.
        local_rank: of the `num_ranks` of a node that went side by side, the slowest, which the figures are of.
    """

    source: str
    target: str
    gb_s: float
    best_gb_s: float
    latency_us: float
    size: int
    local_rank: int
    num_ranks: int


@dataclass(frozen=True)
class Pairs:
    """What was measured, on all ranks the same.

    Attributes:
        rows: each direction of each pair.
        findings: what is slow, by host, and a network that is not the one to be expected; none where all is well.
        text: the network and the figures, for people.
        differ: how many times as long as the fastest direction the slowest takes.
    """

    rows: tuple[Figures, ...] = ()
    findings: tuple[Finding, ...] = ()
    text: str = ""
    differ: float = 1.0


def run(world: World, options: BenchOptions) -> Pairs:
    """The pairs of nodes of `world`, measured. To be called on all ranks, once there is a group.

    Raises:
        MusterError: two nodes can't reach each other.
        Broken: this rank lost the others.
    """
    hosts, nodes = _nodes(world)
    if len(hosts) < 2:
        return Pairs(text="one node: there is no pair to measure")
    backend = world.backend or "gloo"
    size = sizes.parse(options.max_size or SIZES[backend], "--max-size")
    device = torch.device("cpu") if backend == "gloo" else world.device
    line = Line(world, torch.zeros(max(size, LEAST), dtype=torch.uint8, device=device), size, options.iters)
    rows = _measure(line, nodes, hosts)
    slow = pairs.slow(rows)
    for _ in range(pairs.PASSES - 1):
        if slow or pairs.differ(rows) > pairs.TIMES:
            again = _measure(line, nodes, hosts)
            slow &= pairs.slow(again)
            rows = pairs.better(rows, again)
    used = transport.used(world, options)
    findings = [] if used.is_expected else [Finding("fault", "network", "", used.wrong, used.seen, used.fix)]
    findings += pairs.judge(rows, slow, hosts)
    text = "\n".join([f"network: {used.says}", *used.notes, "", *_lines(rows, hosts, nodes)])
    return Pairs(tuple(_figures(row, hosts) for row in rows), tuple(findings), text, pairs.differ(rows))


def _nodes(world: World) -> tuple[tuple[str, ...], list[list[int]]]:
    """The hosts, and the ranks of each by local rank."""
    places = world.gather([world.host, world.local_rank])
    hosts = tuple(dict.fromkeys(host for host, _ in places))
    ranks = [sorted((place[1], rank) for rank, place in enumerate(places) if place[0] == host) for host in hosts]
    return hosts, [[rank for _, rank in each] for each in ranks]


def _measure(line: "Line", nodes: Sequence[Sequence[int]], hosts: Sequence[str]) -> list[Row]:
    """A row for each direction of all pairs, on all ranks the same."""
    world = line.world
    node, place = next((node, ranks.index(world.rank)) for node, ranks in enumerate(nodes) if world.rank in ranks)
    own: list[Row] = []
    for met in schedule.rounds(len(nodes)):
        line.meet()
        pair = next((pair for pair in met if node in pair), None)
        side_by_side = min(len(nodes[each]) for each in pair) if pair else 0
        if pair is None or place >= side_by_side:
            continue
        other = pair[1 - pair.index(node)]
        with _named(hosts[node], hosts[other]):
            for source in pair:
                if source != node:
                    line.receive(nodes[other][place])
                    continue
                found = line.send(nodes[other][place])
                own.append(Row(node, other, *found[:3], local_rank=place, num_ranks=side_by_side, size=found[3]))
    line.meet()
    told: list[list[dict[str, Any]]] = world.gather([asdict(row) for row in own])
    by_way: dict[tuple[int, int], list[Row]] = {}
    for row in (Row(**row) for rows in told for row in rows):
        by_way.setdefault((row.source, row.target), []).append(row)
    return [max(by_way[way], key=lambda row: row.best_s) for way in sorted(by_way)]


@contextmanager
def _named(one: str, other: str) -> Generator[None]:
    """What a backend says of a pair that does not get through, with the names of both."""
    try:
        yield
    except (RuntimeError, Late) as error:
        said = (str(error).strip().splitlines() or ["no message"])[0]
        raise MusterError(
            f"{one} and {other} don't get a message through to each other",
            seen="; NCCL says: ".join(filter(None, [said, transport.complaints()])),
            fix="muster doctor looks at the nodes and the network between them",
            code=FAILED,
        ) from error


@dataclass
class Line:
    """This rank's end of a link: what it sends, and how.

    The sender says how many bytes come next, or 0 for the end; the receiver answers when it is ready, and again when
    it has them.

    Attributes:
        buffer: what is sent, and overwritten.
        size: bytes of a message, at most.
        iters: messages, at most.
    """

    world: World
    buffer: torch.Tensor
    size: int
    iters: int

    def meet(self) -> None:
        """Returns when all ranks have come."""
        try:
            dist.barrier()
            wait_for_device(self.world)
        except (RuntimeError, Late) as error:
            raise Broken(str(error)) from error

    def send(self, peer: int) -> tuple[float, float, float, int]:
        """Best and median seconds a byte, the shortest one-way seconds, and the bytes of a message."""
        latencies: list[float] = []
        size = min(LEAST, self.size)
        while True:
            best = min(self._message(peer, size, latencies) for _ in range(TRIES))
            larger = min(4 * size, self.size)
            if larger == size or best * larger / size * FEWEST > BUDGET_S:
                break
            size = larger
        times: list[float] = []
        while len(times) < FEWEST or (len(times) < self.iters and sum(times) < BUDGET_S):
            times.append(self._message(peer, size, latencies))
        self._move(dist.isend, torch.zeros(1, dtype=torch.int64, device=self.buffer.device), peer)
        return min(times) / size, median(times) / size, min(latencies), size

    def receive(self, peer: int) -> None:
        """Takes what `peer` sends, to its end."""
        header = torch.zeros(1, dtype=torch.int64, device=self.buffer.device)
        while True:
            self._move(dist.irecv, header, peer)
            size = int(header.item())
            if not size:
                return
            self._move(dist.isend, header, peer)
            self._move(dist.irecv, self.buffer[:size], peer)
            self._move(dist.isend, header, peer)

    def _message(self, peer: int, size: int, latencies: list[float]) -> float:
        """Seconds from the start of a message until the answer to it has come."""
        header = torch.full((1,), size, dtype=torch.int64, device=self.buffer.device)
        wait_for_device(self.world)
        started = time.perf_counter()
        self._move(dist.isend, header, peer)
        self._move(dist.irecv, header, peer)
        ready = time.perf_counter()
        self._move(dist.isend, self.buffer[:size], peer)
        self._move(dist.irecv, header, peer)
        ended = time.perf_counter()
        latencies.append((ready - started) / 2)
        return ended - ready

    def _move(self, how: Any, tensor: torch.Tensor, peer: int) -> None:
        # By the communicator of all ranks: single calls would have NCCL make one for each pair.
        for work in dist.batch_isend_irecv([dist.P2POp(how, tensor, peer)]):
            work.wait()
        if tensor.device.type == "cuda":
            self._spin()

    def _spin(self) -> None:
        """Returns when the GPU is done: the usual wait would sleep longer than a short message takes."""
        event, ends = torch.cuda.Event(), time.perf_counter() + SPIN_S
        event.record()
        while not event.query():
            if time.perf_counter() > ends:
                wait_for_device(self.world)


def _lines(rows: Sequence[Row], hosts: Sequence[str], nodes: Sequence[Sequence[int]]) -> list[str]:
    """The figures for people."""
    latencies = sorted(row.latency_s * 1e6 for row in rows)
    most = max(map(len, nodes))
    ranks = f"; of {most} ranks side by side the slowest" if most > 1 else ""
    size = sizes.shown(max(row.size for row in rows))
    about = f"latency {latencies[0]:.0f} to {latencies[-1]:.0f} us, messages of {size}{ranks}"
    lines = [pairs.shown(rows, hosts), "", about]
    if len(hosts) == 2:
        lines.append("two nodes: there is nothing to hold their link against but its own two directions")
    return lines


def _figures(row: Row, hosts: Sequence[str]) -> Figures:
    return Figures(
        hosts[row.source],
        hosts[row.target],
        row.gb_s,
        1e-9 / row.best_s,
        row.latency_s * 1e6,
        row.size,
        row.local_rank,
        row.num_ranks,
    )
