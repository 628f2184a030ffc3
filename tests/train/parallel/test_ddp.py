"""ddp's options: compressed gradients, sizes of buckets, and options that can't be combined."""

import re
from dataclasses import asdict

import pytest

from muster.config import Options, check
from muster.errors import MusterError
from muster.train.checkpoint import manager as checkpoint
from muster.train.checkpoint.run_directory import differences
from muster.train.distributed.world import World
from muster.train.parallel.ddp import PowerSGDGradients
from tests.train.comparing import DIGITS, LIMIT, STEPS, TEXT, apart, trained, vector

# Each rank prints the type and the size of each tensor that it adds up with the others.
SPY = """
import os, torch.distributed as dist
out = os.fdopen(os.dup(1), "w", buffering=1)
add_up = dist.all_reduce
def spy(tensor, *args, **kwargs):
    print("sent", tensor.dtype, tensor.numel(), file=out)
    return add_up(tensor, *args, **kwargs)
dist.all_reduce = spy
"""
PARTS = [*TEXT, *STEPS, "--optimizer=sgd", "--lr=0.1", "--clip-norm=0.5"]


def sent(ended):
    """The type and the number of elements of each tensor that a rank has added up with the others."""
    return [(kind, int(count)) for kind, count in re.findall(r"^sent torch\.(\w+) (\d+)$", ended.out, re.MULTILINE)]


@pytest.fixture(scope="module")
def single(train, tmp_path_factory):
    """Four steps of the single process, over four micro-batches each."""
    return trained(
        train, tmp_path_factory.mktemp("single"), "single", 1, [*PARTS, "--max-steps=4", "--accumulate=4"], "run"
    )


HOOKS = {
    "bf16": ([], "bfloat16", 1e-2),
    "fp16": ([], "float16", 1e-3),
    # What the approximation of a step leaves out is sent with the next: it changes the momenta more than the weights.
    "powersgd": (["--powersgd-start=2"], "float32", 0.3),
}


@pytest.mark.process
@pytest.mark.parametrize("hook", HOOKS)
def test_smaller_gradients_train_nearly_as_whole_ones(train, single, tmp_path, hook):
    options, kind, limit = HOOKS[hook]
    argv = ["ddp", *PARTS, "--max-steps=4", "--accumulate=2", f"--comm-hook={hook}", *options]
    ended = train([*argv, "--name=run", f"--runs-dir={tmp_path}"], 2, ok=True, before=SPY)
    weights, momenta = apart(single, checkpoint.load_newest(tmp_path / "run")[1])
    print(f"{hook}: weights {weights:.1e}, momenta {momenta:.1e}")
    assert LIMIT < momenta < limit
    assert 0 < weights < limit / 100
    num_parameters = vector(single["model"]).numel()
    traffic = sum(count for sort, count in sent(ended[1]) if sort == kind)
    if hook == "powersgd":
        assert 2 * num_parameters < traffic < 2.5 * num_parameters  # two steps are whole, two are compressed
    else:
        assert traffic == 4 * num_parameters  # once a step, not once a micro-batch


SWITCHES = {
    "small buckets": (2, 2, ["--bucket-mb=1"]),
    "small buckets, hook": (2, 2, ["--bucket-mb=1", "--comm-hook=bf16"]),
}


@pytest.mark.process
@pytest.mark.parametrize("switch", SWITCHES)
def test_switches_change_nothing_that_is_learnt(train, single, tmp_path, switch):
    world_size, accumulate, options = SWITCHES[switch]
    argv = ["ddp", *PARTS, "--max-steps=4", f"--accumulate={accumulate}", *options]
    ended = train([*argv, "--name=run", f"--runs-dir={tmp_path}"], world_size, ok=True, before=SPY)
    differences = apart(single, checkpoint.load_newest(tmp_path / "run")[1])
    if "hook" in switch:
        assert LIMIT < differences[1] < HOOKS["bf16"][2]
        num_buckets = sum(count > 10_000 for _, count in sent(ended[1])) / 4  # of each of 4 steps
        assert num_buckets >= 2
    else:
        assert max(differences) < LIMIT


@pytest.mark.process
def test_gradients_too_large_for_fp16_are_told(train, tmp_path):
    steep = "from muster.train import trainer\nfrom muster.train.parallel import strategy\n"
    steep += "loss_of = strategy.loss_of\ntrainer.SYNC_STEPS = 1\n"
    steep += "strategy.Gradients.criterion = staticmethod(lambda *given: 1e7 * loss_of(*given))"
    argv = ["ddp", *TEXT, *STEPS, "--optimizer=sgd", "--lr=1e-9", "--max-steps=4", f"--runs-dir={tmp_path}"]
    ended = train([*argv, "--comm-hook=fp16", "--name=fp16"], 2, before=steep)
    assert [rank.code for rank in ended] == [1, 1]
    assert "gradients are too large for fp16, whose largest number is 65504" in ended[0].err
    assert "--comm-hook=bf16" in ended[0].err
    assert "--resume" not in ended[0].err  # there is no checkpoint
    train([*argv, "--comm-hook=bf16", "--name=bf16"], 2, before=steep, ok=True)


def test_powersgd_takes_any_seed():
    asked = Options(comm_hook="powersgd", seed=20261125173536)
    assert PowerSGDGradients(asked, World()).start == asked.warmup_steps


@pytest.mark.process
def test_powersgd_says_what_a_stop_has_lost(train, tmp_path):
    argv = ["ddp", *PARTS, "--comm-hook=powersgd", "--powersgd-start=2", "--name=run", f"--runs-dir={tmp_path}"]
    ended = train([*argv, "--max-steps=4"], 2, ok=True)
    assert "PowerSGD" not in ended[0].out
    ended = train([*argv, "--max-steps=7", "--resume"], 2, ok=True, before=SPY)
    assert "note: PowerSGD begins anew" in ended[0].out
    # A process begins with two steps of plain averages, whatever the number of its first step.
    num_parameters = vector(checkpoint.load_newest(tmp_path / "run")[1]["model"]).numel()
    assert 2 * num_parameters < sum(count for _, count in sent(ended[1])) < 2.5 * num_parameters


LEARNING = {
    "bf16": (["--comm-hook=bf16"], 0.9),
    "fp16": (["--comm-hook=fp16"], 0.9),
    # With matrices of 4 columns in place of thousands, learning takes longer.
    "powersgd, moments dealt out": (["--comm-hook=powersgd", "--zero1"], 0.85),
}


@pytest.mark.long
@pytest.mark.process
@pytest.mark.once
@pytest.mark.parametrize("case", LEARNING)
def test_the_digits_are_learnt(train, summary_of, tmp_path, case):
    options, least = LEARNING[case]
    argv = ["ddp", "--data=digits", "--image-size=16", "--no-bf16", "--epochs=6", "--lr=0.02"]
    train([*argv, *options, "--name=run", f"--runs-dir={tmp_path}"], 2, ok=True)
    losses = [round(epoch["valid_loss"], 3) for epoch in summary_of(tmp_path / "run")["epochs"]]
    accuracy = summary_of(tmp_path / "run")["best_accuracy"]
    print(f"{case}: loss {losses}, accuracy {accuracy:.3f}")
    assert accuracy > least


@pytest.mark.process
def test_batch_normalisation_over_all_ranks_is_for_gpus(train, tmp_path):
    ended = train(["ddp", *DIGITS, "--sync-bn", f"--runs-dir={tmp_path}"], 2)
    assert [rank.code for rank in ended] == [2, 2]
    assert "torch has no kernel for CPUs" in ended[0].err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("strategy", "options", "seen", "fix"),
    [
        ("fsdp", {"zero1": True}, "train fsdp --zero1", "train ddp --zero1"),
        ("single", {"comm_hook": "bf16"}, "train single --comm-hook=bf16", "train ddp"),
        ("fsdp", {"bucket_mb": 9}, "train fsdp --bucket-mb=9", "train ddp --bucket-mb=9"),
        ("ddp", {"powersgd_rank": 2}, "--powersgd-rank=2", "--comm-hook=powersgd"),
    ],
)
def test_what_does_not_go_together(strategy, options, seen, fix):
    with pytest.raises(MusterError) as raised:
        check(strategy, Options(**options))
    assert raised.value.seen == seen
    assert fix in raised.value.fix


def test_what_goes_together():
    check("ddp", Options(comm_hook="powersgd", powersgd_start=5, sync_bn=True))
    check("ddp", Options(comm_hook="bf16", zero1=True, accumulate=2, bucket_mb=1))


def test_a_change_of_the_comm_hook_is_reported():
    def noted(before, now, num_ranks):
        old, new = (
            asdict(Options(**before).settled()),
            asdict(Options(**now).settled()) | {"accumulate": 2 // num_ranks},
        )
        return differences({"options": old | {"accumulate": 1}, "dp_size": 2}, new, World(world_size=num_ranks))

    assert noted({}, {"zero1": True, "bucket_mb": 9}, 1) == []
    assert "comm_hook none -> bf16" in noted({}, {"comm_hook": "bf16"}, 2)[0]
