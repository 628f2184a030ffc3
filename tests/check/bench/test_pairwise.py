"""Pairs of nodes: the schedule of pairs, and which links and nodes are called slow. The figures are invented."""

import json
import random
from dataclasses import asdict, replace
from itertools import combinations

import pytest

from muster.check.bench import pairwise
from muster.check.bench.pairwise import Row
from muster.check.bench.run import verdict_of_pairs
from muster.check.bench.transport import Transport
from muster.errors import MusterError

USED = Transport(network="tcp", says="gloo over TCP")
HOSTS = [f"node{number:02d}" for number in range(1, 1001)]


def healthy(num_nodes: int, seed: int = 0, spread: float = 0.3) -> list[Row]:
    """Rows at 1 GB/s whose medians differ by up to `spread`; the best message is a bit better than the median."""
    chance = random.Random(seed)
    return [
        Row(HOSTS[source], HOSTS[target], 1 / time, 1 / (time * chance.uniform(0.8, 1)), 20, 4 << 20)
        for met in pairwise.rounds(num_nodes)
        for source, target in met.items()
        for time in [chance.uniform(1, 1 + spread)]
    ]


def slowed(rows: list[Row], *ways: tuple[int | None, int | None], factor: float = 10) -> list[Row]:
    """`rows` in which the directions `ways` (from, to; None is any node) take `factor` times as long."""

    def is_hit(row: Row) -> bool:
        return any(
            (source is None or HOSTS[source] == row.source) and (target is None or HOSTS[target] == row.target)
            for source, target in ways
        )

    return [
        replace(row, best_gb_s=row.best_gb_s / factor, gb_s=row.gb_s / factor) if is_hit(row) else row for row in rows
    ]


def judged(rows: list[Row]) -> list[str]:
    """The errors for `rows`, if repeated measurements gave the same figures."""
    return [each.wrong for each in pairwise.errors(rows)]


@pytest.mark.parametrize("num_nodes", [*range(9), 31, 32])
def test_each_pair_meets_once_and_a_node_is_in_one_pair_at_a_time(num_nodes: int) -> None:
    plan = pairwise.rounds(num_nodes)
    met = [pair for each in plan for pair in each.items() if pair[0] < pair[1]]
    assert sorted(met) == list(combinations(range(num_nodes), 2))
    for each in plan:
        assert all(each[other] == node for node, other in each.items())
    assert len(plan) <= num_nodes


@pytest.mark.parametrize("num_nodes", [33, 40, 64, 100, 257])
def test_above_a_number_of_nodes_there_are_n_log_n_pairs(num_nodes: int) -> None:
    plan = pairwise.rounds(num_nodes)
    met = [pair for each in plan for pair in each.items() if pair[0] < pair[1]]
    log = (num_nodes - 1).bit_length()
    assert len(set(met)) == len(met) <= num_nodes * log
    partners = {node: {other for pair in met if node in pair for other in pair} - {node} for node in range(num_nodes)}
    assert min(map(len, partners.values())) >= log
    for each in plan:
        assert all(each[other] == node for node, other in each.items())
    assert len(plan) <= 4 * log


@pytest.mark.parametrize("num_nodes", [2, 3, 4, 8, 33])
@pytest.mark.parametrize("seed", range(5))
def test_what_differs_as_healthy_links_do_is_not_slow(num_nodes: int, seed: int) -> None:
    rows = healthy(num_nodes, seed)
    for again in range(1, pairwise.MEASUREMENTS):
        rows = pairwise.better(rows, healthy(num_nodes, seed + 100 * again))
    assert judged(rows) == []


def test_equally_slow_links_are_not_called_slow() -> None:
    assert judged(slowed(healthy(4), (None, None))) == []


def test_a_link_with_wide_spread_is_not_slow_if_its_best_is_not() -> None:
    ways = (HOSTS[1], HOSTS[2])
    rows = [replace(row, gb_s=row.gb_s / (10 if row.direction == ways else 1)) for row in healthy(4)]
    assert judged(rows) == []


@pytest.mark.parametrize("num_nodes", [3, 4, 5, 8, 32])
def test_a_slow_link_is_named(num_nodes: int) -> None:
    (wrong,) = judged(slowed(healthy(num_nodes), (1, 2), (2, 1)))
    assert wrong.startswith("slow link: node02 - node03, 0.")
    assert " GB/s where others have 0." in wrong


@pytest.mark.parametrize("num_nodes", [2, 3, 4, 8, 33])
@pytest.mark.parametrize("seed", range(5))
def test_a_link_at_half_its_width_is_named(num_nodes: int, seed: int) -> None:
    """A message takes less than twice as long: latency and the time in the hosts are the same on all links."""
    (wrong,) = judged(slowed(healthy(num_nodes, seed, spread=0.15), (0, 1), factor=1.9))
    assert wrong.startswith("slow link: node01 -> node02")


@pytest.mark.parametrize("num_nodes", [3, 4, 8, 33])
@pytest.mark.parametrize("seed", range(5))
def test_a_node_with_a_card_at_half_its_width_is_named(num_nodes: int, seed: int) -> None:
    (wrong,) = judged(slowed(healthy(num_nodes, seed, spread=0.15), (2, None), (None, 2), factor=1.9))
    assert wrong.startswith("slow node: node03 sends")


def test_one_direction_may_be_slow() -> None:
    (finding,) = pairwise.errors(slowed(healthy(4), (2, 1)))
    assert "slow link: node03 -> node02" in finding.wrong
    assert "twice" not in finding.seen
    assert finding.seen == pairwise.RULE


@pytest.mark.parametrize("num_nodes", [3, 4, 5, 8, 33])
@pytest.mark.parametrize(
    ("ways", "told"),
    [
        ([(2, None), (None, 2)], "slow node: node03 sends at 0.{} and receives at 0.{} where others have 0."),
        ([(2, None)], "slow node: node03 sends at 0.{} where others have 0."),
        ([(None, 2)], "slow node: node03 receives at 0.{} where others have 0."),
    ],
)
def test_of_a_slow_node_only_the_node_is_named(
    num_nodes: int, ways: list[tuple[int | None, int | None]], told: str
) -> None:
    (wrong,) = judged(slowed(healthy(num_nodes), *ways))
    for part in told.split("{}"):
        assert part.strip() in wrong.replace(" GB/s", "")


def test_two_slow_nodes_and_a_slow_link_among_many() -> None:
    rows = slowed(healthy(12), (2, None), (None, 2), (7, None), (None, 7))
    found = judged(slowed(rows, (4, 5), (5, 4)))
    assert [wrong.split(",")[0].split(" sends")[0] for wrong in found] == [
        "slow node: node03",
        "slow node: node08",
        "slow link: node05 - node06",
    ]


@pytest.mark.parametrize(
    ("num_nodes", "num_slow"), [(4, 2), (5, 2), (6, 3), (7, 3), (10, 4), (16, 5), (64, 5), (250, 20)]
)
def test_several_slow_nodes_are_named_although_most_links_are_theirs(num_nodes: int, num_slow: int) -> None:
    ways = [way for node in range(1, num_slow + 1) for way in ((node, None), (None, node))]
    rows = slowed(healthy(num_nodes), *ways, factor=5)
    assert [each.wrong.split()[2] for each in pairwise.errors(rows)] == HOSTS[1 : num_slow + 1]


@pytest.mark.parametrize(("num_nodes", "num_slow"), [(3, 1), (7, 2), (10, 3)])
def test_what_is_slow_in_one_direction_only_stays_named_too(num_nodes: int, num_slow: int) -> None:
    rows = slowed(healthy(num_nodes), *((node, None) for node in range(num_slow)), factor=5)
    assert [wrong.split(" at ")[0] for wrong in judged(rows)] == [
        f"slow node: {host} sends" for host in HOSTS[:num_slow]
    ]


def test_two_racks_with_a_slow_link_between_them_have_no_slow_node_but_differ() -> None:
    between = [(source, target) for source in range(8) for target in range(8) if (source < 4) != (target < 4)]
    rows = slowed(healthy(8), *between, factor=5)
    assert judged(rows) == []
    assert pairwise.differ(rows) > pairwise.SLOW_FACTOR
    assert pairwise.differ(healthy(8)) < pairwise.SLOW_FACTOR
    assert pairwise.differ([]) == 1


@pytest.mark.parametrize(("num_nodes", "word"), [(1, "warning"), (2, "warning"), (3, "ok")])
def test_links_pass_only_where_there_are_others_to_hold_them_against(num_nodes: int, word: str) -> None:
    rows, hosts = healthy(num_nodes), HOSTS[:num_nodes]
    assert verdict_of_pairs(rows, hosts, USED).word == word
    tcp = replace(USED, error=MusterError("TCP", seen="-", fix="-", code=1))
    assert (verdict_of_pairs(rows, hosts, tcp).word, verdict_of_pairs(rows, hosts, tcp).code) == ("failed", 1)


def test_links_that_differ_do_not_pass_although_none_stands_out() -> None:
    between = [(source, target) for source in range(8) for target in range(8) if (source < 4) != (target < 4)]
    found = verdict_of_pairs(slowed(healthy(8), *between, factor=5), HOSTS[:8], USED)
    assert (found.word, found.code) == ("warning", 0)
    assert found.says.startswith("links differ ")
    assert "two nodes" in verdict_of_pairs(healthy(2), HOSTS[:2], USED).says


def test_what_is_said_are_the_figures_that_were_compared() -> None:
    """A busy host makes all medians alike, so the best messages are compared."""
    rows = [replace(row, gb_s=0.01) for row in healthy(3)]
    (wrong,) = judged([replace(row, best_gb_s=0.1 if row.direction == (HOSTS[0], HOSTS[1]) else 1) for row in rows])
    assert wrong == "slow link: node01 -> node02, 0.1000 GB/s where others have 1.00 GB/s, by their best messages"


def test_of_two_nodes_only_the_directions_can_be_compared() -> None:
    assert judged(slowed(healthy(2), (0, 1), (1, 0))) == []
    (wrong,) = judged(slowed(healthy(2), (0, 1)))
    assert "slow link: node01 -> node02" in wrong
    assert "where others have" in wrong


def test_what_was_slow_only_once_is_not_named() -> None:
    first, again = slowed(healthy(4), (1, 2)), slowed(healthy(4, seed=1), (0, 3))
    assert pairwise.errors(first)
    assert pairwise.errors(pairwise.better(first, again)) == []


def test_the_local_rank_that_is_always_the_slowest_is_named() -> None:
    rows = [replace(row, num_ranks=4, local_rank=3 if HOSTS[2] in row.direction else 0) for row in healthy(4)]
    (wrong,) = judged(slowed(rows, (2, None), (None, 2)))
    assert wrong.endswith("always at local rank 3")


def test_the_matrix_has_who_sends_in_its_rows() -> None:
    rows = [replace(row, gb_s=HOSTS.index(row.source) + HOSTS.index(row.target) / 10) for row in healthy(3)]
    assert pairwise.matrix(rows, HOSTS[:3]).splitlines() == [
        r"GB/s, from \ to  node01  node02  node03",
        "node01                -  0.1000  0.2000",
        "node02             1.00       -    1.20",
        "node03             2.00    2.10       -",
    ]


def test_of_many_nodes_the_slowest_links_are_shown() -> None:
    assert len(pairwise.matrix(healthy(16), HOSTS[:16]).splitlines()) == 17
    lines = pairwise.matrix(slowed(healthy(17), (4, 7)), HOSTS[:17]).splitlines()
    assert lines[0] == "the slowest 10 of 272 directions"
    assert lines[1].startswith("node05 -> node08  0.0")
    assert len(lines) == 11


def test_a_thousand_nodes_are_judged_at_once() -> None:
    rows = slowed(healthy(1000), (17, None))
    (error,) = pairwise.errors(rows)
    assert error.wrong.startswith("slow node: node18 sends")
    json.dumps([asdict(row) for row in rows])


def test_ranks_side_by_side_are_told_where_there_are_some() -> None:
    rows = healthy(2)
    assert "measured at the same time" not in pairwise.about(rows)
    assert "slowest of 4 ranks measured at the same time" in pairwise.about([replace(row, num_ranks=4) for row in rows])
