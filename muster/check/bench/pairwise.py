"""Every pair of nodes by itself: the mode of bench that names the slow link or node.

All ranks of both nodes take part side by side, each with the one of the same local rank, as each may have a network
card of its own. Many pairs are measured at once, but no node is in two of them. Where anything seems slow, or
links differ much, all is measured again, up to twice.
"""

import time
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from statistics import median, median_low
from typing import Any

import torch
import torch.distributed as dist

from muster.check.bench import transport
from muster.check.bench.collectives import shown
from muster.check.bench.sweep import Broken, bandwidth, parse_size, safe, wait_for_device
from muster.check.options import BenchOptions
from muster.check.ranks import ALL_PAIRS_UP_TO, partners
from muster.errors import ExitCode, MusterError
from muster.train.distributed.world import World

SIZES = {"gloo": "4M", "nccl": "16M"}
"""Messages, where `--max-size` is not given."""

LEAST = 1 << 16
"""Bytes of the first messages, and of all on a link that is very slow."""

BUDGET_S = 0.5
"""For about so long each direction of a pair is measured."""

TRIES, FEWEST = 3, 3
"""Messages of each size on the way to the largest; messages that are counted, however slow they are."""

TIMES = 1.5
"""How many times as long as usual a link takes that is called slow.

A link that came up at half its width takes twice as long, less what is the same on all links: latency, and the hosts'
own share. The best messages of healthy links, of up to three measurements, differ less than this.
"""

MEASUREMENTS = 3
"""So often all is measured at most: a busy host slows links too, but seldom the same one each time."""

MATRIX = 16
"""Up to so many nodes the figures are a matrix; above it the slowest links are listed."""

LISTED = 10

RULE = (
    f"a link is slow if its best message takes more than {TIMES:g} times as long as the best message of the usual link "
    f"(the median of the links that no slow node has), by the best of {MEASUREMENTS} measurements; "
    "a node is slow if all its links are, to nodes that are not slow too"
)

Pair = tuple[int, int]
"""Two nodes by number; of a direction, the sender first."""


@dataclass(frozen=True)
class Row:
    """One direction between two nodes; where they have several ranks, the slowest of those that went side by side.

    Attributes:
        source, target: nodes by their number.
        best_s, median_s: seconds for a byte.
        latency_s: of the shortest message, one way.
        local_rank: the rank of each node that was the slowest.
        num_ranks: how many of each went side by side.
        size: bytes of a message.
    """

    source: int
    target: int
    best_s: float
    median_s: float
    latency_s: float
    local_rank: int = 0
    num_ranks: int = 1
    size: int = 0

    @property
    def nodes(self) -> frozenset[int]:
        """Both ends."""
        return frozenset((self.source, self.target))

    @property
    def direction(self) -> Pair:
        """From whom to whom."""
        return self.source, self.target

    @property
    def gb_s(self) -> float:
        """10^9 bytes a second."""
        return 1e-9 / self.median_s

    def figures(self, hosts: Sequence[str]) -> dict[str, Any]:
        """The row for programs, with the names of the hosts: bandwidths are by the middle and by the best message."""
        return {
            "source": hosts[self.source],
            "target": hosts[self.target],
            "gb_s": self.gb_s,
            "best_gb_s": 1e-9 / self.best_s,
            "latency_us": self.latency_s * 1e6,
            "size": self.size,
            "local_rank": self.local_rank,
            "num_ranks": self.num_ranks,
        }


def run(world: World, options: BenchOptions) -> list[Row]:
    """A row for each direction of all pairs of nodes of `world`, on all ranks the same; none for one node.

    To be called on all ranks, once there is a group.

    Raises:
        MusterError: two nodes can't reach each other.
        Broken: this rank lost the others.
    """
    hosts = world.nodes
    if len(hosts) < 2:
        return []
    nodes = [[rank for rank, host in enumerate(world.hosts) if host == each] for each in hosts]
    backend = world.backend or "gloo"
    size = parse_size(options.max_size or SIZES[backend], "--max-size")
    device = torch.device("cpu") if backend == "gloo" else world.device
    link = Link(world, torch.zeros(max(size, LEAST), dtype=torch.uint8, device=device), size, options.iters)
    rows = _measure(link, nodes, hosts)
    for _ in range(MEASUREMENTS - 1):
        if errors(rows, hosts) or differ(rows) > TIMES:
            # It may have been something passing: of each direction the better of both counts.
            rows = better(rows, _measure(link, nodes, hosts))
    return rows


def rounds(num_nodes: int) -> list[list[Pair]]:
    """All pairs that are measured, as rounds: in each, no node is in two pairs."""
    pairs = [(node, other) for node in range(num_nodes) for other in partners(node, num_nodes) if node < other]
    if num_nodes <= ALL_PAIRS_UP_TO:
        # As in a tournament: pairs whose numbers have the same sum have no node in common.
        pairs.sort(key=lambda pair: sum(pair) % num_nodes)
    result: list[list[Pair]] = []
    busy: list[set[int]] = []
    for pair in pairs:
        number = next((number for number, nodes in enumerate(busy) if nodes.isdisjoint(pair)), len(busy))
        if number == len(busy):
            result.append([])
            busy.append(set())
        result[number].append(pair)
        busy[number].update(pair)
    return result


def _measure(link: "Link", nodes: Sequence[Sequence[int]], hosts: Sequence[str]) -> list[Row]:
    """A row for each direction of all pairs, on all ranks the same."""
    world = link.world
    node, place = next((node, ranks.index(world.rank)) for node, ranks in enumerate(nodes) if world.rank in ranks)
    own: list[Row] = []
    for met in rounds(len(nodes)):
        link.barrier()
        pair = next((pair for pair in met if node in pair), None)
        side_by_side = min(len(nodes[each]) for each in pair) if pair else 0
        if pair is None or place >= side_by_side:
            continue
        other = pair[1 - pair.index(node)]
        try:
            for source in pair:
                if source != node:
                    link.receive(nodes[other][place])
                    continue
                best_s, median_s, latency_s, size = link.send(nodes[other][place])
                own.append(Row(node, other, best_s, median_s, latency_s, place, side_by_side, size))
        except (RuntimeError, Broken) as error:
            said = str(error).strip().partition("\n")[0]
            raise MusterError(
                f"{hosts[node]} and {hosts[other]} don't get a message through to each other",
                seen="; NCCL says: ".join(filter(None, [said, transport.complaints()])),
                fix="muster doctor looks at the nodes and the network between them",
                code=ExitCode.FAILED,
            ) from error
    link.barrier()
    of_ranks: list[list[dict[str, Any]]] = world.gather([asdict(row) for row in own])
    by_direction: dict[Pair, list[Row]] = {}
    for row in (Row(**row) for rows in of_ranks for row in rows):
        by_direction.setdefault(row.direction, []).append(row)
    return [max(by_direction[each], key=lambda row: row.best_s) for each in sorted(by_direction)]


@dataclass
class Link:
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

    def barrier(self) -> None:
        """Returns when all ranks have come."""
        safe(dist.barrier)
        safe(lambda: wait_for_device(self.world))

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
        wait_for_device(self.world)


def errors(rows: Sequence[Row], hosts: Sequence[str]) -> list[MusterError]:
    """What to say of what is slow: of a node all of whose links are, only the node; else each link."""
    suspects = _suspects(rows)
    others = _without(rows, suspects)
    usual = _usual(others) if others else 0.0
    slow_ways = {node: [way for way in _ways(rows, node) if _best(way) > TIMES * usual] for node in suspects}
    # A node that is slow by its best links only is no slow node, but a link of it may be.
    nodes = sorted(node for node, ways in slow_ways.items() if ways)
    others = _without(rows, nodes)
    usual = _usual(others) if others else 0.0
    links = sorted((row for row in others if row.best_s > TIMES * usual), key=lambda row: row.best_s, reverse=True)
    rest = [row for row in others if row.best_s <= TIMES * usual]
    compared = f" where others have {bandwidth(median(row.gb_s for row in rest))} GB/s" if rest else ""
    found = [_slow_node(hosts[node], node, slow_ways[node], compared) for node in nodes]
    for pair in dict.fromkeys(row.nodes for row in links):
        found.append(_slow_link([row for row in links if row.nodes == pair], compared, hosts))
    return found


def _suspects(rows: Sequence[Row]) -> list[int]:
    """The nodes whose best link is slow, measured by the best links of the other nodes; the slowest first.

    Nodes are counted, not links: two slow nodes of five have most of the links. The links of a slow node are left out
    before the next is looked for.
    """
    left, found = list(rows), list[int]()
    while True:
        by_node: dict[int, list[Row]] = {}
        for row in left:
            for node in row.direction:
                by_node.setdefault(node, []).append(row)
        # Of a node with a single link nobody can tell which end is slow.
        best = {
            node: max(map(_best, _ways(own, node)), default=0.0)
            for node, own in by_node.items()
            if len({row.nodes for row in own}) > 1
        }
        worst = max(best, key=lambda node: best[node], default=None)
        if worst is None or best[worst] <= TIMES * median_low(best.values()):
            return found
        found.append(worst)
        left = _without(left, [worst])


def _ways(rows: Sequence[Row], node: int) -> list[list[Row]]:
    """What a node sends, and what it receives, where that is more than one row."""
    both = [row for row in rows if row.source == node], [row for row in rows if row.target == node]
    return [each for each in both if len(each) > 1]


def _best(rows: Sequence[Row]) -> float:
    return min(row.best_s for row in rows)


def differ(rows: Sequence[Row]) -> float:
    """How many times as long as the fastest direction the slowest takes."""
    times = [row.best_s for row in rows]
    return max(times) / min(times) if times else 1.0


def better(first: Sequence[Row], again: Sequence[Row]) -> list[Row]:
    """The faster of both measurements of each direction, which are in the same order."""
    return [min(pair, key=lambda row: row.best_s) for pair in zip(first, again, strict=True)]


def _slow_node(host: str, node: int, several: Sequence[Sequence[Row]], compared: str) -> MusterError:
    """Of a node all of what it sends, or receives, or both, is slow."""
    does = [f"{'sends' if each[0].source == node else 'receives'} at {_speeds(each)}" for each in several]
    which = _which([row for each in several for row in each])
    return MusterError(
        f"slow node: {host} {' and '.join(does)}{compared}{which}",
        seen=f"all of its {len(several[0])} links; {RULE}",
        fix=f"leave {host} out of the job, and tell whoever runs it: its network card, cable or port",
        code=ExitCode.FAILED,
    )


def _slow_link(pair: Sequence[Row], compared: str, hosts: Sequence[str]) -> MusterError:
    first, second = (hosts[node] for node in (sorted(pair[0].nodes) if len(pair) == 2 else pair[0].direction))
    link = f"{first} {'-' if len(pair) == 2 else '->'} {second}"
    return MusterError(
        f"slow link: {link}, {_speeds(pair)}{compared}{_which(pair)}",
        seen=RULE,
        fix=f"tell whoever runs the cluster: the cables and switches between {first} and {second}",
        code=ExitCode.FAILED,
    )


def _which(rows: Sequence[Row]) -> str:
    """Of nodes with several ranks, the one that is always the slowest: it may have a network card of its own."""
    ranks = {row.local_rank for row in rows}
    return f", always at local rank {ranks.pop()}" if len(ranks) == 1 and rows[0].num_ranks > 1 else ""


def _usual(rows: Sequence[Row]) -> float:
    # The lower one: of two directions, or two nodes in four, the slow ones are not what is usual.
    return median_low(row.best_s for row in rows)


def _without(rows: Sequence[Row], nodes: Collection[int]) -> list[Row]:
    return [row for row in rows if row.nodes.isdisjoint(nodes)]


def _speeds(rows: Sequence[Row]) -> str:
    """0.1 GB/s, or 0.1 to 0.2 GB/s."""
    low, high = (pick(row.gb_s for row in rows) for pick in (min, max))
    return f"{bandwidth(low)} GB/s" if high < 1.1 * low else f"{bandwidth(low)} to {bandwidth(high)} GB/s"


def about(rows: Sequence[Row]) -> str:
    """The latencies, the size of a message, and how many ranks went side by side."""
    latencies = sorted(row.latency_s * 1e6 for row in rows)
    most = max(row.num_ranks for row in rows)
    ranks = f"; of {most} ranks side by side the slowest" if most > 1 else ""
    size = shown(max(row.size for row in rows))
    return f"latency {latencies[0]:.0f} to {latencies[-1]:.0f} us, messages of {size}{ranks}"


def matrix(rows: Sequence[Row], hosts: Sequence[str]) -> str:
    """The figures as a matrix; of many nodes the slowest links."""
    if len(hosts) > MATRIX:
        slowest = sorted(rows, key=lambda row: row.best_s, reverse=True)[:LISTED]
        lines = [f"{hosts[row.source]} -> {hosts[row.target]}  {bandwidth(row.gb_s)} GB/s" for row in slowest]
        return "\n".join([f"the slowest {len(slowest)} of {len(rows)} directions", *lines])
    cells = {row.direction: bandwidth(row.gb_s) for row in rows}
    table = [["GB/s, from \\ to", *hosts]]
    for source, host in enumerate(hosts):
        table.append([host, *(cells.get((source, target), "-") for target in range(len(hosts)))])
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines: list[str] = []
    for first, *others in table:
        padded = [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
        lines.append("  ".join([first.ljust(widths[0]), *padded]))
    return "\n".join(lines)
