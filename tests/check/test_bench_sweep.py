"""The figures of bench: what is timed, and what becomes of it."""

import pytest

from muster.check.bench import sweep
from muster.check.bench.collectives import ALL, BARRIER
from muster.check.bench.report import cells
from muster.check.bench.sweep import Row, Timing

SECOND = Timing(1.0, 1.0, 1.0)


@pytest.mark.parametrize(
    ("collective", "num_ranks", "busbw"),
    # Bus bandwidths of 10^9 bytes in a second, by the formulas that nccl-tests' PERFORMANCE.md writes out.
    [
        ("all_reduce", 2, 1.0),  # 2 (n - 1) / n
        ("all_reduce", 4, 1.5),
        ("all_reduce", 8, 1.75),
        ("all_gather", 2, 0.5),  # (n - 1) / n
        ("all_gather", 8, 0.875),
        ("reduce_scatter", 4, 0.75),
        ("all_to_all", 4, 0.75),
        ("all_to_all", 16, 0.9375),
        ("broadcast", 8, 1.0),  # 1
        ("reduce", 8, 1.0),
        ("send_recv", 8, 1.0),
    ],
)
def test_bandwidths_are_those_of_nccl_tests(collective, num_ranks, busbw):
    row = Row(collective, 10**9, num_ranks, (SECOND,), True)
    assert row.algbw == pytest.approx(1.0)
    assert row.busbw == pytest.approx(busbw)
    assert Row(collective, 10**9, num_ranks, (Timing(0.25, 1.0, 1.0),), True).busbw == pytest.approx(4 * busbw)


@pytest.mark.parametrize("collective", [one.name for one in ALL])
def test_one_rank_has_no_bus_bandwidth(collective):
    row = Row(collective, 4096, 1, (SECOND,), True)
    assert row.busbw is None
    assert row.figures()["busbw"] is None
    assert cells(row)[3] == "N/A"


def test_a_barrier_has_a_time_and_no_bandwidth():
    row = Row(BARRIER, 0, 4, (SECOND,), True)
    assert (row.algbw, row.busbw, row.figures()["time_us"]) == (None, None, 1e6)
    assert cells(row)[1:5] == ["-", "N/A", "N/A", "1000000.0"]


def test_the_time_is_the_mean_of_the_slowest_rank_and_percentiles_are_of_the_slowest_in_each_call():
    found = sweep.of_ranks([[1.0, 1.0, 4.0, 1.0], [2.0, 2.0, 2.0, 2.0], [3.0, 1.0, 1.0, 1.0]])
    # By call the slowest are 3, 2, 4, 2; by rank the means are 1.75, 2, 1.5.
    assert found == Timing(mean_s=2.0, p50_s=2.0, p99_s=4.0)


@pytest.mark.parametrize(
    ("share", "figure"),
    [(50, 10), (99, 20), (95, 19), (1, 1)],
)
def test_a_percentile_is_one_of_the_figures(share, figure):
    assert sweep.percentile(list(range(1, 21)), share) == figure


def test_the_middle_pass_stands_for_a_row():
    row = Row("reduce", 4, 2, tuple(Timing(each, each, each) for each in (5.0, 1.0, 2.0)), True)
    assert row.figures()["time_us"] == 2e6
    assert row.figures()["passes_us"] == [5e6, 1e6, 2e6]


def test_what_was_not_measured_says_why_and_what_is_wrong_says_so():
    cells_of = cells(Row("send_recv", 0, 1, note="needs two ranks"))
    assert (cells_of[0], cells_of[-1]) == ("send_recv", "needs two ranks")
    assert cells(Row("reduce", 8, 2, (SECOND,), False))[-1] == "WRONG"
