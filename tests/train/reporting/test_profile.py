"""`--profile`: a trace that opens in Perfetto, and steps that it does not slow."""

import gzip
import json

import pytest
import torch
from torch import nn

from muster.train.checkpoint import manager as checkpoint
from muster.train.reporting.metrics import StepTimes
from muster.train.reporting.profile import NAME, OPERATIONS, Profile
from tests.train.comparing import apart

GPT = ["--model=gpt-tiny", "--seq-len=32", "--data=synthetic", "--batch-size=4", "--num-samples=96", "--no-bf16"]


def events_of(run):
    with gzip.open(run / NAME) as file:
        return [event for event in json.load(file)["traceEvents"] if event.get("ph") == "X"]


def steps_in(names):
    return sorted((name for name in names if name.startswith("step ")), key=lambda name: int(name[5:]))


@pytest.mark.process
@pytest.mark.parametrize(
    ("strategy", "world_size"),
    [
        ("ddp", 2),
        *(
            pytest.param(name, size, marks=pytest.mark.full)
            for name, size in [("single", 1), ("fsdp", 2), ("tp", 2), ("pipeline", 2)]
        ),
    ],
)
def test_a_trace_has_the_steps_the_layers_and_the_messages(train, tmp_path, strategy, world_size):
    argv = [strategy, *GPT, "--max-steps=6", f"--runs-dir={tmp_path}"]
    ended = train([*argv, "--profile", "--name=run"], world_size, ok=True)
    run = tmp_path / "run"
    names = {event["name"] for event in events_of(run)}
    assert steps_in(names) == [f"step {number}" for number in range(2, 7)]
    assert {"data", "forward and backward", "optimizer", "aten::mm", "Layer layers.0"} <= names
    assert any(name.startswith("gloo:") for name in names) == (world_size > 1)
    assert {path.name for path in run.glob("profile/*")} == {"operations.txt", "rank-0.json.gz"}
    assert "aten::mm" in (run / OPERATIONS).read_text()
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["profile"], summary["profile_steps"]) == (NAME, 5)
    assert "ui.perfetto.dev" in ended[0].out
    assert ended[0].err == ""
    assert summary["num_timed_steps"] == 0  # neither the first step nor the five traced ones are timed
    if strategy == "ddp":  # tracing does not change the weights
        train([*argv, "--name=plain"], world_size, ok=True)
        first, second = (checkpoint.load_newest(tmp_path / name)[1] for name in ("run", "plain"))
        assert apart(first, second) == [0, 0]
        assert not (tmp_path / "plain" / "profile").exists()


@pytest.mark.process
def test_a_trace_keeps_within_an_epoch(train, tmp_path):
    """An epoch has seven steps: the trace has steps 11 to 14, and no validation."""
    argv = ["single", *GPT, "--num-samples=28", "--epochs=3", "--profile", f"--runs-dir={tmp_path}", "--name=run"]
    train(argv, 1, ok=True)
    names = [event["name"] for event in events_of(tmp_path / "run")]
    assert steps_in(names) == [f"step {number}" for number in range(11, 15)]
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["profile_steps"], summary["num_timed_steps"]) == (4, 21 - 1 - 4 - 1)


def traced(profile, epochs):
    """Runs epochs with so many steps; returns the numbers (from 1) of the timed steps."""
    times = StepTimes(torch.device("cpu"), profile=profile)
    timed, number = [], 0
    for num_steps in epochs:
        times.start()
        for _ in range(num_steps):
            with times.waiting():
                number += 1
            if times.data.is_counting:
                timed.append(number)
            with times.part("optimizer"):
                torch.ones(1).add(1)
            times.step()
        times.stop()
    assert len(times.seconds) == len(timed)
    return timed


@pytest.mark.parametrize("main", [True, False])
@pytest.mark.parametrize(
    ("epochs", "timed", "first"),
    [
        ([20], [*range(2, 11), 17, 18, 19, 20], 11),
        ([10, 10], [*range(2, 11), 17, 18, 19, 20], 11),
        ([1], [], 1),
        ([2], [], 2),
        ([4], [], 2),
        ([12], [2, 3, 4, 5, 6, 7], 8),
    ],
)
def test_which_steps_are_traced_and_which_are_timed(tmp_path, main, epochs, timed, first):
    profile = Profile(tmp_path, sum(epochs), {"": nn.Linear(1, 1)}, torch.device("cpu"), main=main)
    assert traced(profile, epochs) == timed
    assert profile.path.exists() == main
    if main:
        assert steps_in({event["name"] for event in events_of(tmp_path)})[0] == f"step {first}"


def test_a_trace_that_can_not_be_written_ends_no_run(tmp_path):
    (tmp_path / "profile").write_text("in the way")
    profile = Profile(tmp_path, 3, {}, torch.device("cpu"), main=True)
    traced(profile, [3])
    assert "could not be written" in profile.problem
