"""Collectives whose values are known: who has spoilt them, and who did not come."""

import json
import subprocess
import sys
from collections.abc import Mapping

import pytest

from check.doctor.circle import COLLECTIVES, UNKNOWN
from check.doctor.verdict import NOT_OVER, START, Told, judge, needs_pairs
from tests.train.conftest import environment, free_port

HOSTS = ["a", "b", "c", "d"]


def told(rank, *, stuck="", why="", at="", **wrong):
    return Told(rank, at, {name: [list(one) for one in ones] for name, ones in wrong.items()}, [], stuck, why)


def found(*ranks: Told, pairs: frozenset[tuple[int, int]] = frozenset(), places: Mapping[int, str] = {}):
    where = {one.rank: "barrier" for one in ranks} | dict(places)
    return [(one.about, one.host, one.wrong) for one in judge(ranks, where, set(pairs), HOSTS, 30).findings]


def test_nothing_is_wrong():
    part = judge([told(0), told(1)], {0: "barrier", 1: "barrier"}, set(), HOSTS, 30)
    assert part.findings == []
    assert part.says == "8 kinds between 2 ranks, all values right"


def test_what_this_torch_does_not_have_is_said():
    part = judge([told(0), Told(1, "", missing=["all_to_all"])], {}, set(), HOSTS, 30)
    assert part.says == "7 kinds between 2 ranks, all values right; this torch has no all_to_all here"


def test_a_share_that_is_wrong_at_all_is_its_givers():
    ranks = [told(rank, all_gather=[(2, "5 in place of 4")]) for rank in range(4)]
    assert found(*ranks) == [("collective", "c", "all_gather gives wrong values: by rank 2 on c")]


def test_shares_that_are_wrong_at_one_rank_are_its_own():
    ranks = [told(0), told(1, all_gather=[(0, "x"), (1, "x"), (2, "x")], reduce_scatter=[(UNKNOWN, "x")]), told(2)]
    assert found(*ranks) == [("collective", "b", "all_gather, reduce_scatter give wrong values: by rank 1 on b")]


def test_one_share_that_is_wrong_at_one_other_rank_is_the_pairs():
    ranks = [told(0), told(1), told(2, send_recv=[(1, "x")])]
    assert found(*ranks)[0][:2] == ("collective", "b -> c")


def test_a_sum_that_is_wrong_at_all_needs_a_second_round():
    ranks = [told(rank, reduce_scatter=[(UNKNOWN, "x")]) for rank in range(4)]
    assert needs_pairs(ranks) == "reduce_scatter"
    assert found(*ranks, pairs=frozenset({(1, 2), (2, 3)}))[0][:2] == ("collective", "c")
    assert found(*ranks)[0][1:] == ("", "reduce_scatter gives wrong values: it can't be told by which rank")


@pytest.mark.parametrize(
    ("ranks", "name"),
    [
        ([told(0), told(1)], ""),
        ([told(0), told(1, all_reduce=[(0, "x")])], ""),
        ([told(0, reduce=[(UNKNOWN, "x")]), told(1)], "reduce"),
        ([told(0, all_gather=[(1, "x")]), told(1, all_gather=[(1, "x")])], ""),
        ([told(0, reduce=[(UNKNOWN, "x")]), told(1, stuck="barrier")], ""),
    ],
)
def test_when_a_second_round_can_tell_more(ranks, name):
    assert needs_pairs(ranks) == name


def test_who_did_not_come_is_named():
    waiting = [told(rank, stuck="broadcast", why="Timed out", at="broadcast") for rank in (0, 1)]
    ranks = [*waiting, told(2, stuck="all_gather", why=NOT_OVER, at="all_gather")]
    places = {0: "broadcast", 1: "broadcast", 2: "all_gather"}
    # The collective that the others are in may have ended for them, never for who was left in it.
    ((_, host, wrong),) = found(*ranks, places=places)
    assert (host, wrong) == ("c", "all_gather did not end: rank 2 on c did not come back")


def test_a_rank_that_is_behind_did_not_come():
    waiting = [told(rank, stuck="broadcast", why="Timed out", at="broadcast") for rank in (0, 1)]
    ((_, host, wrong),) = found(*waiting, Told(2), places={0: "broadcast", 1: "broadcast", 2: "all_gather"})
    assert (host, wrong) == ("c", "broadcast did not end: rank 2 on c did not come")


def test_a_rank_that_has_died_in_it_says_nothing_any_more():
    waiting = [told(rank, stuck="reduce", why="Connection reset", at="reduce") for rank in (0, 1)]
    ((_, host, wrong),) = found(*waiting, Told(2), places={0: "reduce", 1: "reduce", 2: "reduce"})
    assert (host, wrong) == ("c", "reduce did not end: rank 2 on c said nothing any more")


def test_a_group_that_does_not_start():
    ranks = [told(rank, stuck=START, why="no route", at=START) for rank in range(3)]
    ((_, host, wrong),) = found(*ranks, places=dict.fromkeys(range(3), START))
    assert (host, wrong) == ("", f"{START} did not end, though all ranks came to it")


# Three ranks for each of the scenarios, all forked by one process: torch takes its time to load. They go through this
# part of a look only. What is planted stands in the place of torch's own function on one of them.
RANKS = """
import json, os, sys, time
from dataclasses import replace
from pathlib import Path
import torch.distributed as dist
from check.doctor import trial
from check.options import DoctorOptions
from train.world import connect, read_environment

def plant(what, deed):
    real = getattr(dist, what)
    def planted(*args, **kwargs):
        if deed == "hang":
            time.sleep(600)
        if deed == "in":
            args[0][0] += 1
        answer = real(*args, **kwargs)
        if deed == "out":
            args[0].add_(1)
        return answer
    setattr(dist, what, planted)

def run(rank, folder, port, planted, timeout_s):
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "3", "MASTER_PORT": str(port)}
    for what, where, deed in planted:
        if where == rank:
            plant(what, deed)
    trial.SLACK_S = 5.0
    world = read_environment(os.environ, 90)
    world = replace(world, store=connect(world), hosts=("a", "b", "c"))
    part = trial.look(world, DoctorOptions(device="cpu", timeout_s=timeout_s))
    if world.main:
        lines = [" ".join([finding.about, finding.host, finding.wrong]) for finding in part.findings]
        Path(folder, "findings").write_text(json.dumps(lines))
    world.gather("bye")

for scenario in json.loads(sys.argv[1]):
    for rank in range(3):
        if not os.fork():
            try:
                run(rank, *scenario)
            finally:
                sys.stderr.flush()
                os._exit(0)
for _ in range(3 * len(json.loads(sys.argv[1]))):
    os.wait()
"""

Spoilt = list[tuple[str, int, str]]
SPOILT: Spoilt = [("all_reduce", 1, "in"), ("all_to_all_single", 2, "out")]
HANGS: Spoilt = [("reduce", 1, "hang")]


@pytest.fixture(scope="module")
def trials(tmp_path_factory: pytest.TempPathFactory) -> list[list[str]]:
    """The findings where collectives are spoilt, and where one hangs."""
    folders = [tmp_path_factory.mktemp(name) for name in ("spoilt", "hangs")]
    scenarios = [
        [str(folder), free_port(), planted, timeout_s]
        for folder, planted, timeout_s in zip(folders, (SPOILT, HANGS), (60, 10), strict=True)
    ]
    env = environment({"MASTER_ADDR": "127.0.0.1", "TORCH_CPP_LOG_LEVEL": "ERROR"})
    command = [sys.executable, "-c", RANKS, json.dumps(scenarios)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=200)
    assert all((folder / "findings").exists() for folder in folders), done.stderr
    return [json.loads((folder / "findings").read_text()) for folder in folders]


@pytest.mark.process
def test_collectives_that_are_spoilt_on_one_rank(trials: list[list[str]]) -> None:
    assert trials[0] == [
        "collective b all_reduce gives wrong values: by rank 1 on b",
        "collective c all_to_all gives wrong values: by rank 2 on c",
    ]


@pytest.mark.process
def test_a_rank_that_does_not_come_back_is_named_in_time(trials: list[list[str]]) -> None:
    assert trials[1] == ["collective b reduce did not end: rank 1 on b did not come back"]


def test_all_kinds_are_tried():
    assert list(COLLECTIVES) == [
        "all_reduce",
        "all_gather",
        "reduce_scatter",
        "broadcast",
        "reduce",
        "all_to_all",
        "send_recv",
        "barrier",
    ]
