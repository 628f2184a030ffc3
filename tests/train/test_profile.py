"""`--profile`: a trace that opens in Perfetto, and steps that it does not slow."""

import gzip
import json
import types

import pytest
import torch
from torch import nn
from torch.autograd import DeviceType

from muster.train import checkpoint
from muster.train.measure.profile import NAME, Profile, operations, shares
from muster.train.metrics import StepTimes
from tests.train.comparing import apart

GPT = ["--model=gpt-tiny", "--seq-len=32", "--data=synthetic", "--batch-size=4", "--num-samples=96", "--no-bf16"]


def events_of(run):
    with gzip.open(run / NAME) as file:
        return [event for event in json.load(file)["traceEvents"] if event.get("ph") == "X"]


def steps_in(names):
    return sorted((name for name in names if name.startswith("step ")), key=lambda name: int(name[5:]))


@pytest.mark.process
@pytest.mark.parametrize(
    ("strategy", "world_size"), [("single", 1), ("ddp", 2), ("fsdp", 2), ("tp", 2), ("pipeline", 2)]
)
def test_a_trace_has_the_steps_the_layers_and_the_messages(train, tmp_path, strategy, world_size):
    argv = [strategy, *GPT, "--max-steps=6", f"--runs-dir={tmp_path}"]
    ended = train([*argv, "--profile", "--name=run"], world_size, ok=True)
    run = tmp_path / "run"
    names = {event["name"] for event in events_of(run)}
    assert steps_in(names) == [f"step {number}" for number in range(2, 7)]
    assert {"data", "forward and backward", "optimizer", "aten::mm", "Layer layers.0"} <= names
    assert any(name.startswith("gloo:") for name in names) == (world_size > 1)
    assert [path.name for path in run.glob("profile/*")] == ["rank-0.json.gz"]
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["profile"], summary["profile_steps"]) == (NAME, 5)
    parts = summary["profile_shares"]
    assert 0 < parts["compute"] <= 1
    assert (parts["communication"] + parts["hidden"] > 0) == (world_size > 1)
    assert parts["compute"] + parts["communication"] + parts["other"] == pytest.approx(1, abs=1e-3)
    assert summary["profile_operations"][0]["calls"] > 0
    assert summary["profile_operations"][0]["name"][:26] in ended[0].out
    assert "ui.perfetto.dev" in ended[0].out
    assert ended[0].err == ""
    assert summary["num_timed_steps"] == 0  # the first, and five in the trace
    if strategy == "ddp":  # a trace changes nothing that is learnt
        train([*argv, "--name=plain"], world_size, ok=True)
        first, second = (checkpoint.load_newest(tmp_path / name)[1] for name in ("run", "plain"))
        assert apart(first, second) == [0, 0]
        assert not (tmp_path / "plain" / "profile").exists()


@pytest.mark.process
def test_a_trace_keeps_within_an_epoch(train, tmp_path):
    """Seven steps an epoch: the steps 11 to 14 are in it, and no validation."""
    argv = ["single", *GPT, "--num-samples=28", "--epochs=3", "--profile", f"--runs-dir={tmp_path}", "--name=run"]
    train(argv, 1, ok=True)
    names = [event["name"] for event in events_of(tmp_path / "run")]
    assert steps_in(names) == [f"step {number}" for number in range(11, 15)]
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["profile_steps"], summary["num_timed_steps"]) == (4, 21 - 1 - 4 - 1)


def traced(profile, epochs):
    """The steps (from 1) that are timed, of epochs with so many steps."""
    times = StepTimes(torch.device("cpu"), profile=profile)
    timed, number = [], 0
    for num_steps in epochs:
        times.start()
        for _ in times.waiting(range(num_steps)):
            number += 1
            if times.data.counts:
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
    profile = Profile(tmp_path, sum(epochs), nn.Linear(1, 1), torch.device("cpu"), main=main)
    assert traced(profile, epochs) == timed
    assert profile.path.exists() == main
    if main:
        assert steps_in({event["name"] for event in events_of(tmp_path)})[0] == f"step {first}"


def test_a_trace_that_can_not_be_written_ends_no_run(tmp_path):
    (tmp_path / "profile").write_text("in the way")
    profile = Profile(tmp_path, 3, None, torch.device("cpu"), main=True)
    traced(profile, [3])
    assert "could not be written" in profile.problem


def averages(*events):
    """What torch's profiler says of its events, played: there is no GPU here, and compiling takes long."""
    names = ("key", "count", "self_cpu_time_total", "self_device_time_total", "device_type", "is_user_annotation")
    rows = [types.SimpleNamespace(**dict(zip(names, event, strict=True))) for event in events]
    return types.SimpleNamespace(key_averages=lambda: rows)


def test_operations_are_those_of_the_device():
    cpu, gpu = DeviceType.CPU, DeviceType.CUDA
    tracer = averages(
        ("step 11", 1, 9e6, 9e6, cpu, True),
        ("step 11", 1, 0, 9e6, gpu, True),
        ("aten::mm", 4, 2e6, 5e6, cpu, False),
        ("sgemm", 4, 0, 5e6, gpu, False),
        ("## Call CompiledFxGraph a", 2, 1e6, 0, cpu, False),
        ("## Call CompiledFxGraph b", 1, 2e6, 0, cpu, False),
    )
    assert operations(tracer, is_gpu=True) == [{"name": "sgemm", "calls": 4, "seconds": 5.0}]
    assert operations(tracer, is_gpu=False) == [
        {"name": "kernels of compiled graphs", "calls": 3, "seconds": 3.0},
        {"name": "aten::mm", "calls": 4, "seconds": 2.0},
    ]


def test_shares_of_a_trace(tmp_path):
    def event(name, begin, end, **more):
        return {"ph": "X", "name": name, "ts": begin, "dur": end - begin, **more}

    def told(events):
        path = tmp_path / "trace.json.gz"
        with gzip.open(path, "wt") as file:
            json.dump({"traceEvents": [*events, {"ph": "M", "name": "process_name"}]}, file)
        return shares(path)

    steps = [event("step 1", 0, 50), event("step 2", 50, 100)]
    work = [
        event("aten::mm", 0, 30),
        event("aten::copy_", 10, 40),
        event("aten::mm", 60, 70),
        event("aten::mm", 190, 195),
    ]
    talk = [event("gloo:all_reduce", 35, 65), event("gloo:all_reduce", 50, 60), event("nccl nothing", 70, 90)]
    assert told([*steps, *work, *talk]) == {"compute": 0.5, "communication": 0.2, "hidden": 0.1, "other": 0.3}
    kernels = [event("gemm", 200, 240, cat="kernel"), event("ncclDevKernel_AllReduce", 230, 300, cat="kernel")]
    assert told([*steps, *work, *kernels]) == {"compute": 0.4, "communication": 0.6, "hidden": 0.1, "other": 0.0}
    assert told(work) is None
