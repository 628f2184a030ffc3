"""Short runs of the benchmarks with each of their contenders, at sizes too small to measure anything."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import results

ROOT = Path(__file__).parents[2]


def run(*argv: str) -> str:
    """Runs a benchmark; returns its output."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(ROOT / "benchmarks" / argv[0]), *argv[1:]]
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def rates(printed: str) -> dict[str, float]:
    """The rate of each contender in a table."""
    return {name: float(rate) for name, rate in re.findall(r"^\| (\S.*?) +\| ([\d.]+) \(", printed, re.MULTILINE)}


OURS = {"train ddp, fp32", "train ddp, fp32, bare", "train ddp, defaults"}


@pytest.mark.long
@pytest.mark.once
@pytest.mark.process
def test_all_contenders_train_images():
    sizes = ("--image-size=16", "--batch-size=2", "--steps=1", "--rounds=1")
    printed = run("trainer.py", "--workload=resnet18-64", *sizes)
    found = rates(printed)
    others = {"PyTorch's DDP tutorial", "NCAR's ResNet example", "JSC's recipe", "timm's task"}
    assert set(found) == OURS | others
    assert min(found.values()) > 0
    assert "wanted 1.0: " in printed
    assert "wanted 1.3: " in printed


@pytest.mark.long
@pytest.mark.once
@pytest.mark.process
def test_all_contenders_train_on_tokens():
    found = rates(run("trainer.py", "--workload=gpt", "--model=gpt-tiny", "--batch-size=1", "--steps=1", "--rounds=1"))
    assert set(found) == OURS | {"nanoGPT's loop, our model", "nanoGPT's loop and model"}
    assert min(found.values()) > 0


@pytest.mark.full
@pytest.mark.once
@pytest.mark.process
def test_bench_and_a_loop_by_hand_measure_the_same_collectives():
    printed = run("bench.py", "--rounds=1", "--iters=1")
    assert len(re.findall(r"^\| all_\w+ +\| (?:64K|1M|16M) ", printed, re.MULTILINE)) == 6
    assert "wanted within 5%: " in printed


def test_each_round_begins_with_the_next():
    ran: list[str] = []
    made = {name: (lambda name=name: ran.append(name) or len(ran)) for name in "abc"}
    figures = results.interleaved(made, 2)
    assert "".join(ran) == "abc" + "abc" + "bca"
    assert figures == {"a": [4, 9], "b": [5, 7], "c": [6, 8]}


def test_a_start_is_timed_to_its_line_and_to_its_end():
    script = "print('now', flush=True); print(sum(range(3_000_000)))"
    found = results.start([sys.executable, "-c", script], os.environ, "now")
    assert 0 < found.line_s <= found.end_s
    assert found.cpu_s > 0


@pytest.mark.parametrize("script", ["print('other')", "print('now'); raise SystemExit(3)"])
def test_a_start_that_fails_is_no_figure(script, capfd):
    with pytest.raises(subprocess.CalledProcessError):
        results.start([sys.executable, "-c", script], os.environ, "now")
    assert capfd.readouterr().err.strip() in ("other", "now")


def test_figures_are_printed_with_their_spread():
    assert results.spread([1.0, 3.0, 2.0], 1) == "2.0 (1.0 to 3.0)"
    assert results.middle([1.0, 2.0, 3.0, 4.0, 5.0], 1) == "3.0 (1.5 to 4.5)"
    assert results.middle([2.0], 1) == "2.0 (2.0 to 2.0)"
    assert results.ratios([2.0, 9.0], [1.0, 3.0]) == [2.0, 3.0]
    assert results.table(["a", "bcd"], [["1", "2"]]) == ["| a | bcd |", "|---|-----|", "| 1 | 2   |"]
