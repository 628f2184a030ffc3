"""Which nodes and links are slow: figures of pairs in, findings out."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from statistics import median

from check.doctor.findings import Finding

PASSES = 2
"""How often all is measured, where anything seems slow at first: it may have been something passing."""

TIMES = 2.0
"""How many times as long as usual a link takes that is called slow."""

MATRIX = 16
"""Up to so many nodes the figures are a matrix; above it the slowest links are listed."""

LISTED = 10

MANY = 200
"""So many rows, or nodes, are too many to take the median without each of them."""

RULE = (
    f"a link is slow if even its best message takes more than {TIMES:g} times as long as is usual in this run "
    f"(the median of the links that no slow node has), each of the {PASSES} times that all are measured; "
    "a node is slow if all its links are, to nodes that are not slow too"
)


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
    def way(self) -> tuple[int, int]:
        """From whom to whom."""
        return self.source, self.target

    @property
    def gb_s(self) -> float:
        """10^9 bytes a second."""
        return 1e-9 / self.median_s


def slow_nodes(rows: Sequence[Row]) -> list[int]:
    """The nodes whose best link is slow, measured by the best links of the other nodes; the slowest first.

    Nodes are counted, not links: two slow nodes of five have most of the links. The links of a slow node are left out
    before the next is looked for.
    """
    left, found = list(rows), list[int]()
    while True:
        own = {
            node: _slowness(each, node) for node, each in _by_node(left).items() if len({row.nodes for row in each}) > 1
        }
        # Of many nodes one does not move the median.
        usual = median(own.values()) if len(own) > MANY else None
        ratios = {
            node: slowness / (usual or median(own[other] for other in own if other != node))
            for node, slowness in own.items()
            if len(own) > 1
        }
        worst = max(ratios, key=lambda node: ratios[node], default=None)
        if worst is None or ratios[worst] <= TIMES:
            return found
        found.append(worst)
        left = [row for row in left if worst not in row.nodes]


def _by_node(rows: Sequence[Row]) -> dict[int, list[Row]]:
    """The rows of each node, at whichever end it is."""
    found: dict[int, list[Row]] = {}
    for row in rows:
        for node in row.way:
            found.setdefault(node, []).append(row)
    return dict(sorted(found.items()))


def _slowness(own: Sequence[Row], node: int) -> float:
    """The fastest of what a node sends, or of what it receives, whichever is slower."""
    return max(_fastest_out(own, node), _fastest_in(own, node))


def _fastest_out(rows: Sequence[Row], node: int) -> float:
    return min((row.best_s for row in rows if row.source == node), default=0.0)


def _fastest_in(rows: Sequence[Row], node: int) -> float:
    return min((row.best_s for row in rows if row.target == node), default=0.0)


def slow_links(rows: Sequence[Row]) -> list[Row]:
    """The single directions that are slow, measured by all others; the slowest first."""
    usual = _usual(rows) if len(rows) > MANY else None
    found: list[Row] = []
    for row in rows:
        others = [other for other in rows if other is not row] if usual is None else rows
        if others and row.best_s > TIMES * (usual or _usual(others)):
            found.append(row)
    return sorted(found, key=lambda row: row.best_s, reverse=True)


Way = tuple[int, int]
"""A direction: the sender's and the receiver's number."""


def slow(rows: Sequence[Row]) -> set[Way]:
    """The directions that are slow among all that were measured: those of slow nodes, and single ones."""
    nodes = slow_nodes(rows)
    others = _without(rows, nodes)
    usual = _usual(others) if others else 0.0
    ways = {
        node: [each for each in _ways(rows, node) if min(row.best_s for row in each) > TIMES * usual] for node in nodes
    }
    # A node that is slow by the best links only is no slow node, but a link of it may be.
    others = _without(rows, [node for node in nodes if ways[node]])
    found = {row.way for row in slow_links(others)}
    return found | {row.way for of_node in ways.values() for each in of_node for row in each}


def differ(rows: Sequence[Row]) -> float:
    """How many times as long as the fastest direction the slowest takes."""
    times = [row.best_s for row in rows]
    return max(times) / min(times) if times else 1.0


def _ways(rows: Sequence[Row], node: int) -> list[list[Row]]:
    """What a node sends, and what it receives, where that is more than one row."""
    both = [row for row in rows if row.source == node], [row for row in rows if row.target == node]
    return [ways for ways in both if len(ways) > 1]


def better(first: Sequence[Row], again: Sequence[Row]) -> list[Row]:
    """The faster of both measurements of each direction, where there are two."""
    seconds = {row.way: row for row in again}
    return [min(row, seconds.get(row.way, row), key=lambda row: row.best_s) for row in first]


def judge(rows: Sequence[Row], slow_ways: Collection[Way], hosts: Sequence[str]) -> list[Finding]:
    """What to say of the directions that are slow: of a node all of whose are, only the node; else each link."""
    by_node = _by_node(rows)
    nodes = [node for node, own in by_node.items() if any(_all_in(ways, slow_ways) for ways in _ways(own, node))]
    rest = [row for row in rows if row.way not in slow_ways]
    findings = [_of_node(node, by_node[node], slow_ways, rest, hosts) for node in nodes]
    links = [row for row in rows if row.way in slow_ways and not row.nodes.intersection(nodes)]
    links.sort(key=lambda row: row.best_s, reverse=True)
    for pair in dict.fromkeys(row.nodes for row in links):
        findings.append(_of_link([row for row in links if row.nodes == pair], rest, hosts))
    return findings


def _all_in(rows: Sequence[Row], ways: Collection[Way]) -> bool:
    return all(row.way in ways for row in rows)


def _of_node(
    node: int, own: Sequence[Row], slow_ways: Collection[Way], rest: Sequence[Row], hosts: Sequence[str]
) -> Finding:
    host = hosts[node]
    ways = [ways for ways in _ways(own, node) if _all_in(ways, slow_ways)]
    told = [f"{'sends' if each[0].source == node else 'receives'} at {_speeds(each)}" for each in ways]
    return Finding(
        "fault",
        "node",
        host,
        f"slow node: {host} {' and '.join(told)} {_compared(rest)}{_which([row for each in ways for row in each])}",
        f"all of its {len(ways[0])} links; {RULE}",
        f"leave {host} out of the job, and tell whoever runs it: its network card, cable or port",
    )


def _of_link(pair: Sequence[Row], rest: Sequence[Row], hosts: Sequence[str]) -> Finding:
    first, second = (hosts[node] for node in (sorted(pair[0].nodes) if len(pair) == 2 else pair[0].way))
    link = f"{first} {'-' if len(pair) == 2 else '->'} {second}"
    is_only = {row.nodes for row in rest} == {pair[0].nodes}
    compared = f"where the other way has {_speeds(rest)}" if is_only else _compared(rest)
    return Finding(
        "fault",
        "link",
        link,
        f"slow link: {link}, {_speeds(pair)} {compared}{_which(pair)}",
        RULE,
        f"tell whoever runs the cluster: the cables and switches between {first} and {second}",
    )


def _compared(rest: Sequence[Row]) -> str:
    return f"where others have {number(1e-9 / _usual(rest))} GB/s" if rest else ""


def _which(rows: Sequence[Row]) -> str:
    """Of nodes with several ranks, the one that is always the slowest: it may have a network card of its own."""
    ranks = {row.local_rank for row in rows}
    return f", always at local rank {ranks.pop()}" if len(ranks) == 1 and rows[0].num_ranks > 1 else ""


def _usual(rows: Sequence[Row]) -> float:
    return median(row.median_s for row in rows)


def _without(rows: Sequence[Row], nodes: Collection[int]) -> list[Row]:
    return [row for row in rows if row.nodes.isdisjoint(nodes)]


def _speeds(rows: Sequence[Row]) -> str:
    """0.1 GB/s, or 0.1 to 0.2 GB/s."""
    low, high = (pick(row.gb_s for row in rows) for pick in (min, max))
    return f"{number(low)} GB/s" if high < 1.1 * low else f"{number(low)} to {number(high)} GB/s"


def number(value: float) -> str:
    """Three significant digits at most, and never as a power of ten."""
    return f"{value:.4f}" if value < 0.01 else f"{value:.3g}" if value < 100 else f"{value:.0f}"


def shown(rows: Sequence[Row], hosts: Sequence[str]) -> str:
    """The figures as a matrix; of many nodes the slowest links."""
    if len(hosts) > MATRIX:
        slowest = sorted(rows, key=lambda row: row.best_s, reverse=True)[:LISTED]
        lines = [f"{hosts[row.source]} -> {hosts[row.target]}  {_cell(row)} GB/s" for row in slowest]
        return "\n".join([f"the slowest {len(slowest)} of {len(rows)} directions", *lines])
    cells = {row.way: _cell(row) for row in rows}
    table = [["GB/s, from \\ to", *hosts]]
    for source, host in enumerate(hosts):
        table.append([host, *(cells.get((source, target), "-") for target in range(len(hosts)))])
    widths = [max(len(line[column]) for line in table) for column in range(len(hosts) + 1)]
    return "\n".join(
        "  ".join(
            [line[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True))]
        )
        for line in table
    )


def _cell(row: Row) -> str:
    return number(row.gb_s)
