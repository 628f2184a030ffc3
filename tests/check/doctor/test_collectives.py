"""A call of each collective with known values: which rank makes them wrong, and which one did not return."""

import json
import subprocess
import sys
from dataclasses import replace

import pytest

from muster.check.bench.collectives import WrongValues
from muster.check.doctor import collectives
from muster.check.doctor.collectives import NOT_OVER, START, Facts
from muster.check.options import DoctorOptions
from muster.train.distributed.world import World
from tests.train.conftest import environment, free_port

HOSTS = ["a", "b", "c", "d"]


def facts(rank: int, *, at: str = "", why: str = "", **wrong: int | None) -> Facts:
    """The Facts of a rank; `wrong` has the rank that sent the wrong values, by collective; None where unknown."""
    values = {
        name: WrongValues(name, 4096, rank, HOSTS[rank], 0, 4.0, "5", 1, source) for name, source in wrong.items()
    }
    return Facts(rank, "gloo", at, why, values)


def found(*ranks: Facts) -> list[tuple[str, str]]:
    return [(one.host, one.wrong) for one in collectives.findings({HOSTS[one.rank]: [one] for one in ranks})]


def test_nothing_is_wrong():
    assert found(facts(0), facts(1)) == []
    assert "between 2 ranks by gloo" in collectives.summary({"a": [facts(0)], "b": [facts(1)]})
    assert "one rank" in collectives.summary({"a": [facts(0)]})


def test_values_that_are_wrong_on_all_ranks_are_blamed_on_their_sender():
    ranks = [facts(rank, all_gather=2) for rank in range(4)]
    assert found(*ranks) == [("c", "all_gather gives wrong values: by rank 2 on c")]


def test_values_of_several_senders_that_are_wrong_on_one_rank_are_blamed_on_it():
    ranks = [facts(0), facts(1, all_gather=None, reduce_scatter=None), facts(2)]
    assert found(*ranks) == [("b", "all_gather, reduce_scatter give wrong values: by rank 1 on b")]


def test_values_that_are_wrong_on_one_rank_are_blamed_on_it_and_their_sender():
    assert found(facts(0), facts(1), facts(2, send_recv=1))[0][0] == "b -> c"


def test_a_sum_that_is_wrong_on_all_ranks_is_blamed_on_none():
    ranks = [facts(rank, reduce_scatter=None) for rank in range(4)]
    assert found(*ranks) == [("", "reduce_scatter gives wrong values: the rank at fault is unknown")]
    assert found(facts(0, reduce=None), facts(1))[0][0] == ""


def test_a_rank_that_did_not_return_is_named():
    waiting = [facts(rank, why="Timed out", at="broadcast") for rank in (0, 1)]
    # The other ranks may have left the collective in which this one hangs.
    ((host, wrong),) = found(*waiting, facts(2, why=NOT_OVER, at="all_gather"))
    assert (host, wrong) == ("c", "all_gather did not end: rank 2 on c did not return")


def test_a_group_that_does_not_start():
    ((host, wrong),) = found(*(facts(rank, why="no route", at=START) for rank in range(3)))
    assert (host, wrong) == ("", f"{START} did not end, though all ranks reached it")


def test_a_longer_timeout_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL may take minutes to start on thousands of GPUs."""
    seconds: list[int] = []

    def open_group(world: World) -> None:
        seconds.append(world.timeout_s)
        raise RuntimeError

    monkeypatch.setattr(collectives, "open_group", open_group)
    monkeypatch.setattr(collectives, "with_device", lambda world, wanted: replace(world, backend="gloo"))
    collectives.gather(World(world_size=2, hosts=("a", "b")), DoctorOptions(timeout_s=600))
    assert seconds == [300]


# Three ranks for each scenario, all forked by one process, as torch takes long to load. They run only this subject of
# doctor. A planted function replaces torch's own on one of them.
RANKS = """
import json, os, sys, time
from dataclasses import replace
from pathlib import Path
import torch.distributed as dist
from muster.check.doctor import collectives
from muster.check.doctor.run import Report, examine
from muster.check.options import DoctorOptions
from muster.train.distributed.world import connect, read_environment

def plant(what, deed):
    real = getattr(dist, what)
    def planted(*args, **kwargs):
        if deed == "hang":
            time.sleep(600)
        if deed == "sent":
            args[1][0] += 1
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
    collectives.SLACK_S = 5.0
    world = read_environment(os.environ, 90)
    world = replace(world, store=connect(world), host="abc"[rank], hosts=("a", "b", "c"))
    report = Report()
    examine(world, DoctorOptions(device="cpu", timeout_s=timeout_s), [collectives], report)
    if world.main:
        lines = [" ".join([finding.about, finding.host, finding.wrong]) for finding in report.findings]
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
SPOILT: Spoilt = [("all_gather_into_tensor", 1, "sent"), ("all_to_all_single", 2, "out")]
HANGS: Spoilt = [("reduce", 1, "hang")]


@pytest.fixture(scope="module")
def trials(tmp_path_factory: pytest.TempPathFactory) -> list[list[str]]:
    """The findings of two scenarios: two collectives give wrong values; one hangs."""
    folders = [tmp_path_factory.mktemp(name) for name in ("spoilt", "hangs")]
    scenarios = [
        [str(folder), free_port(), planted, timeout_s]
        for folder, planted, timeout_s in zip(folders, (SPOILT, HANGS), (60, 10), strict=True)
    ]
    env = environment({"MASTER_ADDR": "127.0.0.1", "TORCH_CPP_LOG_LEVEL": "ERROR"})
    command = [sys.executable, "-c", RANKS, json.dumps(scenarios)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=240)
    assert all((folder / "findings").exists() for folder in folders), done.stderr
    return [json.loads((folder / "findings").read_text()) for folder in folders]


@pytest.mark.process
def test_collectives_that_are_spoilt_on_one_rank(trials: list[list[str]]) -> None:
    assert trials[0] == [
        "collective b all_gather gives wrong values: by rank 1 on b",
        "collective c all_to_all gives wrong values: by rank 2 on c",
    ]


@pytest.mark.process
def test_a_rank_that_does_not_come_back_is_named_in_time(trials: list[list[str]]) -> None:
    assert trials[1] == ["collective b reduce did not end: rank 1 on b did not return"]
