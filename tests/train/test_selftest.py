"""The test that a site's staff run: it passes where all is well, and says FAIL where it is not."""

import json
import sys

import pytest
import torch

from train import selftest
from train.arguments import parse
from train.combinations import check
from train.errors import MusterError
from train.options import STRATEGIES
from train.selftest import COMMON, PARTS, Case, cases, differences, launch, split


def state(value, loss=2.0):
    return {"model": {"w": torch.tensor([value, 1.0])}, "progress": {"history": [{"valid_loss": loss}]}}


@pytest.mark.process
def test_real_launches_agree(tmp_path):
    one, other = (
        launch(Case(name, ranks, split(ranks)), tmp_path, name) for name, ranks in (("single", 1), ("ddp", 2))
    )
    assert differences(one, other) == (0, 0)
    assert one["progress"]["step"] == 3


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_every_case_sees_the_same_parts(num_ranks):
    found = cases(num_ranks)
    assert {case.strategy for case in found} == set(STRATEGIES) - {"single", "dp"}
    for case in found:
        strategy, options = parse([case.strategy, *COMMON, *case.options])
        check(strategy, options)
        shares = case.num_ranks
        if strategy == "tp":
            shares //= options.tensor_parallel or case.num_ranks
        if strategy == "pipeline":
            shares //= options.pipeline_parallel
        assert shares * options.accumulate * options.batch_size == PARTS
        assert options.batch_size == (options.microbatches or 1)


def test_a_difference_is_seen():
    assert differences(state(1.0), state(1.0)) == (0, 0)
    weights, loss = differences(state(1.0), state(1.0 + 2e-6, loss=2.1))
    assert weights > 1e-6
    assert loss == pytest.approx(0.05)


def answer(monkeypatch, capsys, argv, result):
    """What the program prints and answers where launches have `result`."""

    def launched(case, folder, name):
        return state(1.0) if case.strategy == "single" else result(case)

    monkeypatch.setattr(selftest, "launch", launched)
    monkeypatch.setattr(sys, "argv", ["selftest", *argv])
    with pytest.raises(SystemExit) as raised:
        selftest.main()
    return raised.value.code, capsys.readouterr().out


def test_a_strategy_that_trains_something_else_fails(monkeypatch, capsys):
    code, out = answer(monkeypatch, capsys, [], lambda case: state(1.1 if case.strategy == "tp" else 1.0))
    assert code == 1
    assert [line.split()[1] for line in out.splitlines() if "FAIL" in line] == ["tp"]
    assert "4 of 5 pass" in out


def test_a_launch_that_breaks_fails_with_its_reason(monkeypatch, capsys):
    def broken(case):
        raise MusterError("it failed: no such thing", seen="x", fix="y")

    code, out = answer(monkeypatch, capsys, ["--ranks=4", "--json"], broken)
    assert code == 1
    rows = json.loads(out)
    assert len(rows) == 8
    assert all(row["error"] == "it failed: no such thing" and not row["passed"] for row in rows)


def test_all_is_well(monkeypatch, capsys):
    code, out = answer(monkeypatch, capsys, ["--ranks=2"], lambda case: state(1.0))
    assert (code, out.count("PASS")) == (0, 5)
