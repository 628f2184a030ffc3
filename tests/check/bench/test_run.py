"""bench with gloo ranks on this machine: its output and files, its exit codes, and planted faults."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from textwrap import indent

import msgspec
import pytest
import torch.distributed as dist

from muster.check import ranks
from muster.check.bench import baseline, run
from muster.check.bench.baseline import Setting
from muster.check.bench.collectives import NAMES
from muster.check.options import BenchOptions
from muster.train.distributed.world import RanksMissing, World
from tests.train.conftest import ROOT, Ended, environment, rank_environments, read_ranks

pytestmark = pytest.mark.process

SMALL = ["--device=cpu", "--min-size=1K", "--max-size=16K", "--factor=4", "--iters=3", "--warmup=1"]

PLANTED = """
import sys, time
import torch.distributed as dist
from muster.check.__main__ import main

def spoil(name, fault):
    whole = getattr(dist, name)
    def spoilt(*arguments, **options):
        done = whole(*arguments, **options)
        fault(arguments[0], dist.get_rank())
        return done
    setattr(dist, name, spoilt)

{plant}
main()
"""

Bench = Callable[..., list[Ended]]


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    """Runs bench with ARGV in `world_size` processes, forked from one that has loaded torch; each runs `plant` first.

    tests/train/forks.py forks them: the code that it runs before a trainer is bench here, and ends the process.
    """
    command = [sys.executable, str(ROOT / "tests" / "train" / "forks.py")]
    env = environment({"TORCH_CPP_LOG_LEVEL": "ERROR"})
    forks = subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    orders, answers = forks.stdin, forks.stdout
    assert orders is not None
    assert answers is not None

    def run(argv: list[str], world_size: int, plant: str = "") -> list[Ended]:
        folder = str(tmp_path_factory.mktemp("ranks"))
        before = "try:\n" + indent(PLANTED.format(plant=plant), "    ") + "\nexcept SystemExit as end:\n"
        before += "    import os; sys.stderr.flush(); os._exit(end.code)"
        ranks = [
            {"argv": ["bench", *argv], "env": env, "folder": folder, "name": rank, "before": before}
            for rank, env in enumerate(rank_environments(world_size, {}, {}))
        ]
        orders.write(json.dumps({"ranks": ranks, "deadline_s": 240, "shm": None}) + "\n")
        orders.flush()
        codes = json.loads(answers.readline())
        ended = read_ranks(codes, Path(folder))
        assert None not in codes, ended
        return ended

    yield run
    forks.kill()
    forks.wait()


def errors(ended: list[Ended]) -> list[str]:
    """The error lines of all ranks."""
    return [line for rank in ended for line in rank.err.splitlines() if line.startswith("error:")]


@pytest.fixture(scope="module")
def measured(bench: Bench, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Ended], Path]:
    """Two ranks that measured all collectives, with --json, and the folder of the baseline that they saved."""
    folder = tmp_path_factory.mktemp("bench")
    return bench([*SMALL, f"--save-baseline={folder / 'base.json'}", "--json"], 2), folder


def test_two_ranks_measure_all_collectives_with_right_values(measured):
    ended, _ = measured
    assert [rank.code for rank in ended] == [0, 0], [rank.err for rank in ended]
    assert ended[1].out == ""
    (line,) = ended[0].out.splitlines()
    value = json.loads(line)
    assert (value["verdict"], value["code"], value["faults"]) == ("ok", 0, [])
    assert list(dict.fromkeys(row["collective"] for row in value["rows"])) == list(NAMES)
    for row in value["rows"]:
        assert row["values_ok"] is (True if row["size"] else None)
        assert 0 < row["p50_us"] <= row["p99_us"]
        if row["size"]:
            assert row["algbw"] == pytest.approx(row["size"] / row["time_us"] / 1000, rel=1e-3)
            assert row["busbw"] > 0
    assert value["setting"] | {"site": ""} == {
        "site": "", "backend": "gloo", "device": "cpu", "nodes": 1, "ranks": [2], "gpus": []
    }  # fmt: skip


def test_the_baseline_has_five_passes_of_each_row(measured):
    ended, folder = measured
    path = folder / "base.json"
    value = json.loads(ended[0].out)
    known = baseline.read(str(path), "--baseline", msgspec.convert(value["setting"], Setting))
    rows = value["rows"]
    assert set(known.passes) == {(row["collective"], row["size"]) for row in rows}
    assert {len(passes) for passes in known.passes.values()} == {5}


def faster(path: Path, factor: float) -> Path:
    """The path of a baseline like that at `path`, of a machine that is `factor` times as fast."""
    content = json.loads(path.read_text())
    for row in content["rows"]:
        row["passes"] = [{name: each / factor for name, each in one.items()} for one in row["passes"]]
    changed = path.with_name(f"{factor}.json")
    changed.write_text(json.dumps(content))
    return changed


@pytest.mark.parametrize(("factor", "code", "word"), [(1e-6, 0, "ok"), (1e6, 1, "failed")])
def test_a_baseline_decides(bench, measured, factor, code, word):
    """Of a machine that is a million times slower, and faster: this machine's noise is far less."""
    path = faster(measured[1] / "base.json", factor)
    ended = bench([*SMALL, "--collectives=all_reduce", f"--baseline={path}"], 2)
    assert [rank.code for rank in ended] == [code, code], [rank.err for rank in ended]
    last = ended[0].out.splitlines()[-1]
    assert last.startswith(f"{word}: ")
    assert ("all_reduce of " in last) == (word == "failed")
    assert ("in the fastest of 5 passes" in ended[0].out) == (word == "failed")


def test_a_baseline_of_another_shape_is_neither_used_nor_replaced(bench, measured):
    path = measured[1] / "base.json"
    before = path.read_text()
    for option in ("--baseline", "--save-baseline"):
        (ended,) = bench([*SMALL, f"{option}={path}"], 1)
        assert (ended.code, ended.out) == (2, "")
        assert "ranks [2], not [1]" in ended.err
        assert option in ended.err
    assert path.read_text() == before


@pytest.mark.parametrize("name", ["file/base.json", "x" * 300, ""])
def test_a_baseline_that_can_not_be_written_is_told_before_anything_is_measured(bench, tmp_path, name):
    (tmp_path / "file").touch()
    path = tmp_path / name if name else ""  # as from a shell variable that is not set
    (ended,) = bench([*SMALL, f"--save-baseline={path}"], 1)
    assert (ended.code, ended.out) == (2, "")
    assert "error: the baseline can't be " in ended.err


def test_one_rank_has_no_bus_bandwidth(bench):
    (ended,) = bench(SMALL, 1)
    assert ended.code == 0, ended.err
    lines = ended.out.splitlines()
    first = lines[lines.index("# all_reduce") + 3].split()
    assert (first[7], first[8]) == ("N/A", "0")
    assert "# send_recv: needs two ranks" in lines
    assert ended.out.splitlines()[-1].startswith("ok: values were right in ")


def test_a_corrupted_collective_is_named_with_rank_and_element(bench, tmp_path):
    """The fault is planted in torch.distributed, on rank 1 at 4 KiB only."""
    plant = """
spoil("all_gather_into_tensor", lambda got, rank: got[100].add_(1) if rank == 1 and got.numel() == 1024 else None)
"""
    argv = [*SMALL, "--collectives=all_reduce,all_gather", f"--save-baseline={tmp_path / 'base.json'}"]
    ended = bench(argv, 2, plant)
    assert [rank.code for rank in ended] == [1, 1], [rank.err for rank in ended]
    assert "error: all_gather gave wrong values to rank 1 on " in ended[0].out
    assert "at 4K\n" in ended[0].out
    assert "element 100 of 4K was " in ended[0].out
    assert "1 element is wrong" in ended[0].out
    assert ended[0].out.splitlines()[-1].startswith("failed: all_gather gave wrong values to rank 1")
    assert not (tmp_path / "base.json").exists()


def test_memory_that_is_used_up_is_no_fault_of_the_network(bench):
    argv = ["--device=cpu", "--collectives=all_reduce", "--min-size=900000000G", "--max-size=900000000G"]
    (ended,) = bench(argv, 1)
    assert ended.code == 1
    assert "allocate memory" in ended.err
    assert "a smaller --max-size" in ended.err


def test_around_1_mib_values_are_checked_at_other_sizes_than_those_measured(bench):
    plant = """
spoil("all_reduce", lambda got, rank: got[-1].add_(1) if got.numel() > 1 << 18 else None)
"""
    ended = bench([*SMALL, "--collectives=all_reduce", "--json"], 2, plant)
    assert [rank.code for rank in ended] == [1, 1], [rank.err for rank in ended]
    value = json.loads(ended[0].out)
    assert {fault["rank"] for fault in value["faults"]} == {0, 1}
    sizes = {fault["size"] for fault in value["faults"]}
    assert len(sizes) == 5
    assert all(1 << 20 < size < 9 << 17 for size in sizes)
    assert any(size // 4 % 2 for size in sizes)
    assert all(row["values_ok"] for row in value["rows"])


def test_a_misspelt_collective_is_told_once(bench):
    ended = bench(["--device=cpu", "--collectives=all_reduce,barier"], 2)
    assert [rank.code for rank in ended] == [2, 2]
    assert errors(ended) == ["error: there is no collective 'barier'"]


@pytest.mark.parametrize(
    ("plant", "told"),
    [
        ("sys.stdout = open('/dev/full', 'w')", ["error: the output can't be written: No space left on device"]),
        # As if the reader had closed the pipe.
        ("import os; ends = os.pipe(); os.close(ends[0]); sys.stdout = open(ends[1], 'w')", []),
    ],
)
def test_output_that_can_not_be_written_ends_all_ranks(bench, plant, told):
    ended = bench([*SMALL, "--collectives=barrier"], 2, plant)
    assert [rank.code for rank in ended] == [1, 1]
    assert errors(ended) == told


def test_pairs_of_nodes_have_no_baseline(bench, tmp_path):
    path = tmp_path / "base.json"
    (ended,) = bench(["--device=cpu", "--pairwise", f"--save-baseline={path}"], 1)
    assert ended.code == 2
    assert "compared with each other, not with a baseline" in ended.err
    (ended,) = bench(["--device=cpu", "--pairwise", "--json"], 1)
    assert ended.code == 0, ended.err
    assert json.loads(ended.out)["pairs"] == []
    assert list(tmp_path.iterdir()) == []


PAIRS = """
from dataclasses import replace
from muster.check import ranks

read = ranks.read_environment
ranks.read_environment = lambda environ, timeout_s: replace(read(environ, timeout_s), host="node" + environ["RANK"])

def barrier():
    raise RuntimeError("Connection reset")

dist.barrier = barrier
"""


def test_what_fails_among_pairs_of_nodes_is_told_as_that(bench):
    ended = bench(["--device=cpu", "--pairwise"], 2, PAIRS)
    assert [rank.code for rank in ended] == [1, 1]
    assert errors(ended) == ["error: all ranks are alive, but the measurement of pairs of nodes failed"]


@pytest.mark.full
def test_a_rank_that_stands_still_is_named(bench):
    """The others end after their timeout, and rank 1 with them: a thread of it waits for faults of other ranks."""
    plant = 'spoil("all_reduce", lambda got, rank: time.sleep(3600) if rank == 1 and got.numel() == 1024 else None)'
    ended = bench([*SMALL, "--collectives=all_reduce", "--timeout-s=12"], 3, plant)
    assert [rank.code for rank in ended] == [1, 1, 1], [rank.err for rank in ended]
    (line,) = errors(ended)
    assert line.startswith("error: rank 1 on ")
    assert line.endswith("did not return from all_reduce of 4K")


def test_losing_rank_0_before_all_have_connected_is_reported_without_a_traceback(capsys):
    lost = dist.DistNetworkError("Failed to recv, got 0 bytes\nException raised from")
    assert run.report_failure(None, lost, "the start") == 1
    said = capsys.readouterr().err.splitlines()
    assert [line.partition(":")[0].strip() for line in said] == ["error", "seen", "fix"]
    assert said[1].endswith("got 0 bytes")


def test_the_store_stays_until_all_ranks_know_which_are_missing(monkeypatch, capsys):
    """The store ends with rank 0: the other ranks would report a broken connection, with a traceback."""
    world = World(world_size=3, timeout_s=1)

    def join(timeout_s: int) -> World:
        raise RanksMissing(world, [2])

    def leave(with_store: World | None, code: int) -> None:
        assert with_store is world
        raise SystemExit(code)

    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr(ranks, "join", join)
    monkeypatch.setattr(ranks, "leave", leave)
    with pytest.raises(SystemExit, match="1"):
        run.run(BenchOptions())
    assert "rank 2 did not connect" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("rank", "alive", "wrong"),
    [
        (0, [0, 1, 2], "all ranks are alive, but all_reduce failed"),
        (0, [0, 2], "rank 1 on b did not return from all_reduce"),
        (0, [0], "ranks 1, 2 on b, c did not return from all_reduce"),
        (0, None, "rank 0 on a lost the other ranks during all_reduce"),
        (2, [0, 2], None),
    ],
)
def test_the_first_rank_left_names_the_ranks_that_did_not_return(monkeypatch, rank, alive, wrong):
    monkeypatch.setattr(run, "ranks_alive", lambda world: alive)
    world = World(rank=rank, world_size=3, host="abc"[rank], hosts=("a", "b", "c"))
    broken = dist.DistBackendError("Connection reset by peer")
    late = RanksMissing(world, [1])
    for error in (broken, late):
        found = run.explain(world, error, "all_reduce")
        assert (found and found.wrong) == wrong


def test_a_failure_of_bench_is_no_crash_for_the_agent(measured, tmp_path):
    """By the command that users type: torchrun's agent must not print an error or a traceback after the verdict."""
    path = faster(measured[1] / "base.json", 1e6)
    code = "from muster.entrypoint.cli import muster; muster()"
    words = ["bench", "--nproc-per-node=2", *SMALL, "--collectives=barrier", f"--baseline={path}"]
    done = subprocess.run(
        [sys.executable, "-P", "-c", code, *words],
        env=environment(), cwd=tmp_path, capture_output=True, text=True, check=False, timeout=250,
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    assert done.stdout.splitlines()[-1].startswith("failed: barrier takes ")
    assert "error:" not in done.stderr
    assert "Traceback" not in done.stderr
