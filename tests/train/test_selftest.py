"""`train selftest`, for a site's staff: it passes where all strategies agree, and prints FAIL where one does not."""

import json
import math
import os
import signal
import sys
import tempfile

import pytest
import torch

from muster.config import STRATEGIES, check
from muster.errors import MusterError
from muster.train import selftest
from muster.train.__main__ import parse
from muster.train.selftest import (
    COMMON,
    LIMITS,
    PARTS,
    STEPS,
    Case,
    cases,
    compare,
    launch,
    relative_difference,
    run_ranks,
    split,
)


def state(value, loss=2.0):
    return {
        "model": {"w": torch.tensor([value, 1.0])},
        "progress": {"history": [{"valid_loss": loss}]},
    }


@pytest.mark.full
@pytest.mark.process
@pytest.mark.parametrize(
    ("steps", "limit"), [pytest.param("sgd", LIMITS["cpu"], marks=pytest.mark.long), ("adamw", 1e-15)]
)
def test_real_launches_agree(tmp_path, steps, limit):
    single = launch(Case("single", 1, split(1)), steps, tmp_path)
    row = compare(Case("ddp", 2, split(2)), {steps: single}, tmp_path)
    assert row["passed"]
    assert max(row[steps], row["loss"]) < limit
    assert single["progress"]["step"] == 3


@pytest.mark.process
def test_ranks_that_fail_are_told_of(tmp_path):
    with pytest.raises(MusterError) as raised:
        run_ranks(["ddp", "--model=resnet81"], 2, tmp_path / "rank")
    assert "resnet81" in raised.value.wrong


@pytest.mark.process
def test_ranks_that_raise_before_they_train_are_told_of(tmp_path):
    with pytest.raises(MusterError) as raised:
        run_ranks(["single"], 1, tmp_path / "missing" / "rank")
    assert "No such file" in raised.value.wrong


@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8])
def test_every_case_sees_the_same_parts(num_ranks, steps):
    found = cases(num_ranks)
    assert {case.strategy for case in found} == set(STRATEGIES) - {"single", "dp"}
    for case in found:
        strategy, options = parse([case.strategy, *COMMON, *STEPS[steps], *case.options])
        check(strategy, options)
        shares = case.num_ranks
        if strategy == "tp":
            shares //= options.tensor_parallel or case.num_ranks
        if strategy == "pipeline":
            shares //= options.pipeline_parallel or case.num_ranks
        assert shares * options.accumulate * options.batch_size == PARTS
        assert options.batch_size == (options.microbatches or 1)


def test_a_difference_is_seen(monkeypatch, tmp_path):
    monkeypatch.setattr(selftest, "launch", lambda *_: state(1.0 + 2e-6, loss=2.1))
    row = compare(Case("ddp", 2, split(2)), {"sgd": state(1.0)}, tmp_path)
    assert row["sgd"] > 1e-6
    assert row["loss"] == pytest.approx(0.05)
    assert not row["passed"]
    assert relative_difference(state(1.0)["model"], state(1.0)["model"]) == 0


def test_a_loss_that_is_no_number_fails(monkeypatch, tmp_path):
    monkeypatch.setattr(selftest, "launch", lambda case, steps, folder: state(1.0, math.nan if steps == "sgd" else 2.0))
    row = compare(Case("ddp", 2, split(2)), {"sgd": state(1.0), "adamw": state(1.0)}, tmp_path)
    assert not row["passed"]


def answer(monkeypatch, capsys, argv, result):
    """The program's exit code and output where `result` replaces the launches of all strategies but single."""

    def launched(case, steps, folder):
        return state(1.0) if case.strategy == "single" else result(case, steps)

    monkeypatch.setattr(selftest, "launch", launched)
    monkeypatch.setattr(sys, "argv", ["selftest", *argv])
    with pytest.raises(SystemExit) as raised:
        selftest.main()
    said = capsys.readouterr()
    return raised.value.code, said.out, said.err


@pytest.mark.parametrize("which", STEPS)
def test_a_strategy_that_trains_something_else_fails(monkeypatch, capsys, which):
    def wrong(case, steps):
        return state(1.1 if (case.strategy, steps) == ("tp", which) else 1.0)

    code, out, _ = answer(monkeypatch, capsys, ["--ranks=2"], wrong)
    assert code == 1
    assert [line.split()[1] for line in out.splitlines() if "FAIL" in line] == ["tp"]
    assert f"{len(cases(2)) - 1} of {len(cases(2))} pass" in out


def test_a_launch_that_breaks_fails_with_its_reason(monkeypatch, capsys):
    def broken(case, steps):
        raise MusterError("it failed: no such thing", seen="x", fix="y")

    code, out, _ = answer(monkeypatch, capsys, ["--ranks=4", "--json"], broken)
    assert code == 1
    rows = json.loads(out)
    assert len(rows) == len(cases(4)) > len(cases(2))
    assert all(row["error"] == "it failed: no such thing" and not row["passed"] for row in rows)


def test_all_is_well(monkeypatch, capsys):
    code, out, err = answer(monkeypatch, capsys, ["--ranks=2"], lambda case, steps: state(1.0))
    assert (code, out.count("PASS")) == (0, len(cases(2)))
    # All cases together take minutes, so each has a line of its own, printed as soon as it has ended.
    assert len([line for line in [*out.splitlines(), *err.splitlines()] if line.startswith("PASS")]) >= len(cases(2))


def test_sigterm_leaves_no_folder(monkeypatch, capsys):
    folders, ended_all = [], []

    def ended(case, steps, folder):
        folders.append(folder)
        os.kill(os.getpid(), signal.SIGTERM)

    remove = tempfile.TemporaryDirectory.cleanup

    def warned_again(folder):
        os.kill(os.getpid(), signal.SIGTERM)
        remove(folder)

    monkeypatch.setattr(tempfile.TemporaryDirectory, "cleanup", warned_again)
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        monkeypatch.setattr(selftest, "launch", ended)
        # Replaced, as processes of other tests are children of this one too.
        monkeypatch.setattr(selftest.processes, "kill_descendants", lambda: ended_all.append(True))
        assert exit_code(monkeypatch, "--ranks=2") == 143
    finally:
        signal.signal(signal.SIGTERM, before)
    assert (len(folders), ended_all) == (1, [True])
    assert not folders[0].exists()


def on_gpus(monkeypatch, num_gpus):
    """Makes the program see so many GPUs; returns the launches, and a list with their difference from single."""
    launches, difference = [], [0.0]

    def launched(case, steps, folder):
        launches.append((case, steps))
        return state(1.0 if case.strategy == "single" else 1.0 + difference[0])

    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    monkeypatch.setattr(selftest, "launch", launched)
    return launches, difference


def exit_code(monkeypatch, *argv):
    monkeypatch.setattr(sys, "argv", ["selftest", *argv])
    with pytest.raises(SystemExit) as raised:
        selftest.main()
    return raised.value.code


def test_one_gpu_is_tried_in_groups_of_one(monkeypatch):
    launches, difference = on_gpus(monkeypatch, 1)
    assert exit_code(monkeypatch) == 0
    assert all("--device=cuda" in case.options and case.num_ranks == 1 for case, _ in launches)
    assert all(("--single-rank-group" in case.options) == (case.strategy != "single") for case, _ in launches)
    assert {steps for _, steps in launches} == {"sgd"}
    # GPUs sum in another order within layers too.
    difference[0] = 5e-6
    assert exit_code(monkeypatch) == 0
    difference[0] = 5e-5
    assert exit_code(monkeypatch) == 1


def test_more_ranks_than_gpus_train_on_the_cpu(monkeypatch):
    launches, difference = on_gpus(monkeypatch, 1)
    assert exit_code(monkeypatch, "--ranks=2") == 0
    assert all("--device=cpu" in case.options for case, _ in launches)
    difference[0] = 5e-6
    assert exit_code(monkeypatch, "--ranks=2") == 1
