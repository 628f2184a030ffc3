"""The figures of bench: times, bandwidths and percentiles, and their table."""

import pytest
import torch

from muster.check.bench import sweep
from muster.check.bench.collectives import ALL, BARRIER, WrongValues
from muster.check.bench.run import HEADER, line, table
from muster.check.bench.sweep import Row, Sweep, Timing
from muster.check.options import BenchOptions
from muster.train.distributed.world import World

SECOND = Timing(1.0, 1.0, 1.0)
COLUMNS = HEADER[0].split()[1:]


def figures(row: Row) -> dict[str, str]:
    """The cells of a row in the table, by column."""
    return dict(zip(COLUMNS, line(row).split(), strict=True))


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
    row = Row(collective, 10**9, num_ranks, (SECOND,), 0)
    assert row.algbw == pytest.approx(1.0)
    assert row.busbw == pytest.approx(busbw)
    assert Row(collective, 10**9, num_ranks, (Timing(0.25, 1.0, 1.0),), 0).busbw == pytest.approx(4 * busbw)


@pytest.mark.parametrize("collective", [one.name for one in ALL])
def test_one_rank_has_no_bus_bandwidth(collective):
    row = Row(collective, 4096, 1, (SECOND,), 0)
    assert row.busbw is None
    assert row.figures()["busbw"] is None
    assert figures(row)["busbw"] == "N/A"


def test_a_barrier_has_a_time_and_no_bandwidth():
    row = Row(BARRIER, 0, 4, (SECOND,))
    assert (row.algbw, row.busbw, row.figures()["time_us"]) == (None, None, 1e6)
    told = figures(row)
    assert (told["time"], told["algbw"], told["busbw"], told["#wrong"]) == ("1000000.0", "N/A", "N/A", "N/A")


def test_the_time_is_the_mean_of_the_slowest_rank_and_percentiles_are_of_the_slowest_in_each_call():
    found = sweep.of_ranks([[1.0, 1.0, 4.0, 1.0], [2.0, 2.0, 2.0, 2.0], [3.0, 1.0, 1.0, 1.0]])
    # By call the slowest are 3, 2, 4, 2; by rank the means are 1.75, 2, 1.5.
    assert found == Timing(mean_s=2.0, p50_s=2.0, p99_s=4.0)


@pytest.mark.parametrize(("num_calls", "p50_s", "p99_s"), [(1, 1, 1), (2, 1, 2), (20, 10, 20), (200, 100, 198)])
def test_percentiles_are_some_of_the_calls(num_calls, p50_s, p99_s):
    found = sweep.of_ranks([[float(number) for number in range(num_calls, 0, -1)]])
    assert (found.p50_s, found.p99_s) == (p50_s, p99_s)


def test_the_middle_pass_stands_for_a_row():
    row = Row("reduce", 4, 2, tuple(Timing(each, each, each) for each in (5.0, 1.0, 2.0)), 0)
    assert row.figures()["time_us"] == 2e6
    assert row.figures()["passes_us"] == [5e6, 1e6, 2e6]


def test_the_table_reads_like_that_of_nccl_tests():
    rows = [Row("all_gather", size, 4, (SECOND,), 0) for size in (10**9, 2 * 10**9)]
    lines = table(rows, []).splitlines()
    assert lines[0] == "# all_gather"
    assert lines[1].split() == ["#", *COLUMNS]
    # The count is that of a rank's part; columns stand where those of nccl-tests do.
    assert lines[3].split()[:9] == ["1000000000", "62500000", "float", "none", "-1", "1000000.0", "1.00", "0.7500", "0"]
    assert lines[-2:] == ["# Out of bounds values : 0 OK", "# Avg bus bandwidth    : 1.12"]
    assert {len(line) for line in lines[3:5]} == {len(lines[1])}


def test_gloo_sends_nothing_between_gpus():
    """The kernel can't send from a pointer to a GPU's memory."""
    world = World(world_size=2, hosts=("a", "a"), device=torch.device("cuda"), backend="gloo")
    (row,) = Sweep(world, BenchOptions(), [1024], ["send_recv"]).rows()
    assert row.passes == ()
    assert "CPUs only" in table([row], [])


def test_what_was_not_measured_says_why_and_what_is_wrong_says_so():
    assert table([Row("send_recv", 0, 1, note="needs two ranks")], []) == "# send_recv: needs two ranks"
    wrong = Row("reduce", 8, 2, (SECOND,), 2)
    assert figures(wrong)["#wrong"] == "2"
    assert figures(wrong)["root"] == "0"
    fault = WrongValues("reduce", 8, 0, "a", 0, 1.0, "nan", 2)
    assert "# Out of bounds values : 2 FAILED" in table([wrong], [fault])
