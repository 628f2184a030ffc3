"""The mode of bench that measures every pair of nodes by itself, and names the slow link or node.

All ranks of both nodes take part at the same time, each with its partner of the same local rank, as each may have its
own network card. Many pairs are measured at the same time, but a node is in only one of them. If anything seems slow,
or links differ much, everything is measured again, up to twice.
"""

import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from statistics import median, median_high
from typing import Any

import torch
import torch.distributed as dist

from muster.check.bench import collectives, transport
from muster.check.bench.sweep import bandwidth, parse_size, wait_for_device
from muster.check.options import BenchOptions
from muster.check.ranks import ALL_PAIRS_UP_TO, partners
from muster.errors import ExitCode, MusterError
from muster.train.distributed.world import World

SIZES = {"gloo": "4M", "nccl": "16M"}
"""The largest message by backend, where `--max-size` is not given."""

FIRST_SIZE = 1 << 16
"""Bytes of the first messages, and of all on a link that is very slow."""

BUDGET_S = 0.5
"""Seconds, approximately, for which each direction of a pair is measured."""

TRIES, MIN_TIMED = 3, 3
"""Messages of each size while the size grows; the least number of messages that are timed, however slow they are."""

SLOW_FACTOR = 1.5
"""A link is slow if a message takes more than this many times as long as usual.

A link that came up at half its width takes twice as long, less what is the same on all links: latency, and the time
spent in the hosts. The best messages of healthy links, of up to three measurements, differ less than this.
"""

MEASUREMENTS = 3
"""The most measurements of all pairs: a busy host slows links too, but seldom the same one each time."""

MATRIX = 16
"""The most nodes for which a matrix is printed; for more, the slowest links are listed."""

LISTED = 10

RULE = (
    f"a link is slow if its best message takes more than {SLOW_FACTOR:g} times as long as the best message of the "
    f"usual link (the median of the links that no slow node has), by the best of {MEASUREMENTS} measurements; "
    "a node is slow if it sends, or receives, slowly on all links with nodes that are not slow themselves"
)

DOES = ("sends", "receives")
End = tuple[str, str]
"""One end of a direction: a node, and whether it sends or receives (one of DOES)."""


@dataclass(frozen=True)
class Row:
    """The figures of one direction between two nodes: of several ranks measured at the same time, the slowest one's.

    Attributes:
        gb_s, best_gb_s: 10^9 bytes a second, by the median and by the best message.
        latency_us: half of the shortest round trip of an 8-byte message.
        size: bytes of a message.
        local_rank: the local rank of the slowest rank, the same on both nodes.
        num_ranks: how many ranks of each node were measured at the same time.
    """

    source: str
    target: str
    gb_s: float
    best_gb_s: float
    latency_us: float
    size: int
    local_rank: int = 0
    num_ranks: int = 1

    @property
    def direction(self) -> tuple[str, str]:
        return self.source, self.target

    @property
    def ends(self) -> tuple[End, End]:
        return (self.source, DOES[0]), (self.target, DOES[1])


def run(world: World, options: BenchOptions) -> list[Row]:
    """Measures all pairs of nodes; returns a row for each direction, the same on all ranks, and none for one node.

    To be called on all ranks, once the process group is open.

    Raises:
        MusterError: two nodes can't reach each other.
        RuntimeError: this rank lost the others.
    """
    if len(world.nodes) < 2:
        return []
    backend = world.backend or "gloo"
    size = parse_size(options.max_size or SIZES[backend], "--max-size")
    device = torch.device("cpu") if backend == "gloo" else world.device
    link = Link(world, torch.zeros(max(size, FIRST_SIZE), dtype=torch.uint8, device=device), size, options.iters)
    rows = _measure(link)
    for _ in range(MEASUREMENTS - 1):
        if errors(rows) or differ(rows) > SLOW_FACTOR:
            # The cause may be temporary: for each direction the better measurement counts.
            rows = better(rows, _measure(link))
    return rows


def rounds(num_nodes: int) -> list[dict[int, int]]:
    """All pairs to measure, in rounds: each round maps a node to its only partner, and leaves out nodes without one."""
    pairs = [(node, other) for node in range(num_nodes) for other in partners(node, num_nodes) if node < other]
    if num_nodes <= ALL_PAIRS_UP_TO:
        # As in a round-robin tournament: pairs with the same sum modulo num_nodes have no node in common.
        pairs.sort(key=lambda pair: sum(pair) % num_nodes)
    found: list[dict[int, int]] = []
    for node, other in pairs:
        met = next((met for met in found if node not in met and other not in met), None)
        if met is None:
            found.append(met := {})
        met |= {node: other, other: node}
    return found


def _measure(link: "Link") -> list[Row]:
    """Measures all pairs once; returns a row for each direction, the same on all ranks."""
    world, hosts = link.world, link.world.nodes
    nodes = [[rank for rank, host in enumerate(world.hosts) if host == each] for each in hosts]
    node = hosts.index(world.host)
    place = nodes[node].index(world.rank)
    own: list[Row] = []
    for met in rounds(len(nodes)):
        link.barrier()
        other = met.get(node)
        side_by_side = 0 if other is None else min(len(nodes[node]), len(nodes[other]))
        if other is None or place >= side_by_side:
            continue
        try:
            for source in sorted((node, other)):
                if source == node:
                    own.append(Row(hosts[node], hosts[other], *link.send(nodes[other][place]), place, side_by_side))
                else:
                    link.receive(nodes[other][place])
        except RuntimeError as error:
            raise MusterError(
                f"no message gets through between {hosts[node]} and {hosts[other]}",
                seen=transport.with_warnings(error),
                fix="muster doctor checks the nodes and the network between them",
                code=ExitCode.FAILED,
            ) from error
    link.barrier()
    of_ranks: list[list[dict[str, Any]]] = world.gather([asdict(row) for row in own])
    slowest: dict[tuple[str, str], Row] = {}
    for row in (Row(**row) for rows in of_ranks for row in rows):
        slowest[row.direction] = min(slowest.get(row.direction, row), row, key=lambda row: row.best_gb_s)
    return list(slowest.values())


@dataclass
class Link:
    """This rank's end of a link: its buffer, and the protocol.

    The sender announces the number of bytes that come next, or 0 for the end; the receiver answers when it is ready,
    and again when it has received them.

    Attributes:
        buffer: the bytes that are sent, or overwritten by those received.
        size: bytes of the largest message.
        iters: the most messages that are timed, unless it is below MIN_TIMED.
    """

    world: World
    buffer: torch.Tensor
    size: int
    iters: int

    def barrier(self) -> None:
        """Waits until all ranks have called it."""
        dist.barrier()
        wait_for_device(self.world)

    def send(self, peer: int) -> tuple[float, float, float, int]:
        """Sends messages to `peer`; returns the gb_s, best_gb_s, latency_us and size of a Row."""
        latencies: list[float] = []
        size = min(FIRST_SIZE, self.size)
        while True:
            best = min(self._message(peer, size, latencies) for _ in range(TRIES))
            larger = min(4 * size, self.size)
            if larger == size or best * larger / size * MIN_TIMED > BUDGET_S:
                break
            size = larger
        times: list[float] = []
        while len(times) < MIN_TIMED or (len(times) < self.iters and sum(times) < BUDGET_S):
            times.append(self._message(peer, size, latencies))
        self._move(dist.isend, torch.zeros(1, dtype=torch.int64, device=self.buffer.device), peer)
        return 1e-9 * size / median(times), 1e-9 * size / min(times), 1e6 * min(latencies), size

    def receive(self, peer: int) -> None:
        """Receives messages from `peer` until it announces the end."""
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
        """Sends one message; returns the seconds until it was answered, and adds its latency in s to `latencies`."""
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
        # A batch uses the communicator of all ranks: for single calls NCCL would create one for each pair.
        for work in dist.batch_isend_irecv([dist.P2POp(how, tensor, peer)]):
            work.wait()
        wait_for_device(self.world)


def errors(rows: Sequence[Row]) -> list[MusterError]:
    """The errors for slow nodes, and for slow links between other nodes."""
    suspects = {node for node, _ in slow_ends(rows)}
    # Both directions of a suspect are compared with the links between the other nodes.
    usual = _usual(row.best_gb_s for row in rows if suspects.isdisjoint(row.direction))
    slow: dict[str, list[list[Row]]] = {}
    for node, does in product(sorted(suspects), DOES):
        own = [row for row in rows if (node, does) in row.ends]
        if len(own) > 1 and all(is_slow(row.best_gb_s, usual) for row in own):
            slow.setdefault(node, []).append(own)
    others = [row for row in rows if slow.keys().isdisjoint(row.direction)]
    links = sorted((row for row in others if is_slow(row.best_gb_s, usual)), key=lambda row: row.best_gb_s)
    rest = [row.best_gb_s for row in others if not is_slow(row.best_gb_s, usual)]
    compared = f" where others have {bandwidth(median(rest))} GB/s, by their best messages" if rest else ""
    found: list[MusterError] = []
    for node, directions in slow.items():
        does = [f"{'sends' if own[0].source == node else 'receives'} at {_speeds(own)}" for own in directions]
        wrong = f"slow node: {node} {' and '.join(does)}{compared}{_which([row for own in directions for row in own])}"
        seen = f"all of its {len(directions[0])} links; {RULE}"
        fix = f"leave {node} out of the job, and tell the administrators: its network card, cable or port"
        found.append(MusterError(wrong, seen=seen, fix=fix, code=ExitCode.FAILED))
    for pair in dict.fromkeys(frozenset(row.direction) for row in links):
        own = [row for row in links if pair == frozenset(row.direction)]
        first, second = sorted(pair) if len(own) == 2 else own[0].direction
        link = f"{first} {'-' if len(own) == 2 else '->'} {second}"
        wrong = f"slow link: {link}, {_speeds(own)}{compared}{_which(own)}"
        fix = f"tell the administrators: the cables and switches between {first} and {second}"
        found.append(MusterError(wrong, seen=RULE, fix=fix, code=ExitCode.FAILED))
    return found


def is_slow(best_gb_s: float, usual_gb_s: float) -> bool:
    """Whether a byte takes more than SLOW_FACTOR times as long as usual."""
    return best_gb_s * SLOW_FACTOR < usual_gb_s


def slow_ends(rows: Sequence[Row]) -> set[End]:
    """The ends whose best link is slow, compared with the best links of the other ends.

    Ends are compared, not links, as two slow nodes of five have most of the links. The links of a slow end are left
    out before the next one is searched for.
    """
    left, found = list(rows), set[End]()
    while True:
        by_end: dict[End, list[float]] = {}
        for row in left:
            for end in row.ends:
                by_end.setdefault(end, []).append(row.best_gb_s)
        # A single link does not show which of its ends is slow.
        best = {end: max(each) for end, each in by_end.items() if len(each) > 1}
        worst = min(best, key=lambda end: best[end], default=None)
        if worst is None or not is_slow(best[worst], _usual(best.values())):
            return found
        found.add(worst)
        left = [row for row in left if worst not in row.ends]


def _usual(figures: Iterable[float]) -> float:
    # The higher median: if one of two directions is slow, or two of four nodes are, the faster ones are the usual ones.
    return median_high([*figures] or [0.0])


def differ(rows: Sequence[Row]) -> float:
    """The ratio of the fastest direction's best bandwidth to the slowest direction's."""
    figures = [row.best_gb_s for row in rows]
    return max(figures) / min(figures) if figures else 1.0


def better(first: Sequence[Row], again: Sequence[Row]) -> list[Row]:
    """The faster row of each direction; both measurements have their rows in the same order."""
    return [max(pair, key=lambda row: row.best_gb_s) for pair in zip(first, again, strict=True)]


def _which(rows: Sequence[Row]) -> str:
    """The local rank that is always the slowest, in words, if nodes have several: it may have its own network card."""
    ranks = {row.local_rank for row in rows}
    return f", always at local rank {ranks.pop()}" if len(ranks) == 1 and rows[0].num_ranks > 1 else ""


def _speeds(rows: Sequence[Row]) -> str:
    """The range of best bandwidths in words: 1.50 GB/s, or 1.50 to 2.00 GB/s."""
    low, high = (pick(row.best_gb_s for row in rows) for pick in (min, max))
    return f"{bandwidth(low)} GB/s" if high < 1.1 * low else f"{bandwidth(low)} to {bandwidth(high)} GB/s"


def about(rows: Sequence[Row]) -> str:
    latencies = [row.latency_us for row in rows]
    most = max(row.num_ranks for row in rows)
    ranks = f"; by the slowest of {most} ranks measured at the same time" if most > 1 else ""
    size = collectives.shown(max(row.size for row in rows))
    return f"latency {min(latencies):.0f} to {max(latencies):.0f} us, messages of {size}{ranks}"


def matrix(rows: Sequence[Row], hosts: Sequence[str]) -> str:
    """The bandwidths as a matrix, from row to column; for more than MATRIX nodes, a list of the slowest links."""
    if len(hosts) > MATRIX:
        slowest = sorted(rows, key=lambda row: row.best_gb_s)[:LISTED]
        lines = [f"{row.source} -> {row.target}  {bandwidth(row.gb_s)} GB/s" for row in slowest]
        return "\n".join([f"the slowest {len(slowest)} of {len(rows)} directions", *lines])
    cells = {row.direction: bandwidth(row.gb_s) for row in rows}
    table = [["GB/s, from \\ to", *hosts]]
    table += [[source, *(cells.get((source, target), "-") for target in hosts)] for source in hosts]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return "\n".join(
        "  ".join([first.ljust(widths[0]), *map(str.rjust, others, widths[1:])]) for first, *others in table
    )
