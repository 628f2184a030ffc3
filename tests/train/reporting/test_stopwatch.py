"""Waiting between ranks: the shares of a step's time, and the rank that delays the others."""

import json

import pytest
import torch
from torch import nn

from muster.train.distributed.world import World
from muster.train.parallel.strategy import timed_backward
from muster.train.reporting.metrics import Stopwatch
from muster.train.reporting.summary import compare_ranks
from tests.train.comparing import TEXT

SLOW = """
import os, time
from muster.train.models import gpt
compute = gpt.FeedForward.forward
def slow(self, x):
    if self.training and os.environ.get("RANK") == "1":
        time.sleep(0.05)
    return compute(self, x)
gpt.FeedForward.forward = slow
"""

LATE = """
import os, time
from muster.train.data.loader import Reader
read = Reader.__getitems__
def late(self, draws):
    if os.environ.get("RANK") == "1":
        time.sleep(0.2)
    return read(self, draws)
Reader.__getitems__ = late
"""

STEPS = ["--max-steps=6", "--batch-size=4", "--num-samples=64", "--data=synthetic", "--no-bf16"]


def summary_of(train, tmp_path, strategy, world_size, options, before):
    argv = [strategy, "--model=gpt-tiny", "--seq-len=32", *STEPS, *options, "--name=run", f"--runs-dir={tmp_path}"]
    train(argv, world_size, ok=True, before=before)
    return json.loads((tmp_path / "run" / "summary.json").read_text())


def test_the_time_after_a_ranks_own_backward_pass_counts_as_waiting():
    model = nn.Linear(4, 4)
    outputs = model(torch.randn(2, 4))
    loss = outputs.square().sum()
    loss.backward(retain_graph=True)
    expected = model.weight.grad.clone()
    model.zero_grad()
    waits = Stopwatch(torch.device("cpu"))
    pause = torch.futures.Future()

    def reduce(_):
        # DistributedDataParallel queues such a callback at its last bucket, and waits in it for the other ranks.
        torch.autograd.Variable._execution_engine.queue_callback(lambda: pause.set_result(waits.seconds))

    model.bias.register_hook(reduce)
    timed_backward(loss, waits)
    assert pause.wait() == 0  # the callback ran before the wait was added up
    assert waits.seconds > 0
    assert torch.equal(model.weight.grad, expected)
    paused = Stopwatch(torch.device("cpu"), is_counting=False)
    timed_backward(nn.Linear(4, 4)(torch.randn(2, 4)).sum(), paused)
    assert paused.seconds == 0


WAYS = {
    "ddp": ("ddp", 2, []),
    "exact": ("ddp", 2, ["--accumulate=2", "--deterministic"]),
    "bf16": ("ddp", 2, ["--comm-hook=bf16"]),
    "powersgd": ("ddp", 2, ["--comm-hook=powersgd", "--powersgd-start=2"]),
    "zero1": ("ddp", 2, ["--zero1"]),
    "pipeline": ("pipeline", 2, ["--microbatches=4"]),
}


@pytest.mark.process
@pytest.mark.parametrize("way", WAYS)
def test_the_rank_that_computes_slowly_is_named(train, tmp_path, way):
    strategy, world_size, options = WAYS[way]
    summary = summary_of(train, tmp_path, strategy, world_size, options, SLOW)
    slowest, of_ranks = summary["slowest_rank"], summary["ranks"]
    assert (slowest["rank"], slowest["host"]) == (1, summary["hosts"][0])
    assert slowest["ratio"] > 1.05
    assert slowest["seconds"] == of_ranks[1]["busy_s"] > of_ranks[0]["busy_s"]
    assert [rank["rank"] for rank in of_ranks] == [0, 1]
    shares = summary["shares"]
    assert sum(shares.values()) == pytest.approx(1, abs=1e-3)
    assert 0 < shares["communication"] < 1
    assert summary["peak_memory_gib"] == max(rank["peak_memory_gib"] for rank in of_ranks)


@pytest.mark.process
def test_the_rank_whose_data_come_late_is_named(train, tmp_path):
    # synthetic data are made on the device, by no reader
    summary = summary_of(train, tmp_path, "ddp", 2, TEXT, LATE)
    assert summary["slowest_rank"]["rank"] == 1
    assert summary["ranks"][1]["data_wait_s"] > max(0.2, summary["ranks"][0]["data_wait_s"])
    assert summary["shares"]["data"] > 0


@pytest.mark.process
@pytest.mark.parametrize("strategy", ["fsdp", "tp"])
def test_strategies_whose_waits_are_unknown_name_no_slowest_rank(train, tmp_path, strategy):
    summary = summary_of(train, tmp_path, strategy, 2, [], "")
    assert summary["slowest_rank"] is None
    assert summary["shares"]["communication"] is None
    assert summary["shares"]["data"] + summary["shares"]["compute"] == pytest.approx(1, abs=1e-3)
    assert [rank["busy_s"] for rank in summary["ranks"]] == [None, None]


@pytest.mark.process
def test_a_rank_alone_waits_for_nobody(train, tmp_path):
    summary = summary_of(train, tmp_path, "single", 1, [], "")
    assert summary["slowest_rank"] is None
    assert summary["shares"]["communication"] == 0
    assert len(summary["ranks"]) == 1


def test_the_slowest_is_measured_by_the_rank_in_the_middle():
    world = World(world_size=4, hosts=("a", "a", "b", "b"), backend="gloo")
    owns = [
        {"step_s": 1.0, "data_wait_s": 0.1, "waits_s": waits, "busy_s": 1 - waits, "peak_memory_gib": 1.0}
        for waits in (0.5, 0.5, 0.1, 0.5)
    ]
    told = compare_ranks(world, owns)
    assert told["slowest_rank"] == {"rank": 2, "host": "b", "seconds": 0.9, "median_s": 0.5, "ratio": 1.8}
    assert told["shares"] == {"data": 0.1, "compute": 0.5, "communication": 0.4}
