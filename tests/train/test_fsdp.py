"""Weights cut over the ranks train as whole ones do, and their checkpoints load anywhere."""

import pytest
import torch

from tests.train.comparing import DIGITS, LIMIT, STEPS, TEXT, apart, trained, vector
from train import checkpoint
from train.combinations import check
from train.errors import MusterError
from train.options import Options

CASES = {
    "gpt": (TEXT, 4, {"4": (4, []), "2 x 2": (4, ["--replicate=2"]), "2, accumulate": (2, ["--accumulate=2"])}),
    # Norms of all gradients are about 2 at the start: this cuts every step.
    "gpt, cut gradients": ([*TEXT, "--clip-norm=0.05", "--optimizer=sgd", "--lr=1"], 2, {"2": (2, [])}),
    "gpt, odd sizes": (TEXT, 3, {"3": (3, [])}),
    "gpt, saving memory": (
        TEXT,
        2,
        {
            "offload": (2, ["--cpu-offload"]),
            "selective": (2, ["--activation-checkpoint=selective"]),
            "full": (2, ["--activation-checkpoint=full"]),
        },
    ),
    "resnet18": ([*DIGITS, "--lr=0.05"], 4, {"2, accumulate": (2, ["--accumulate=2"])}),
}


@pytest.mark.process
@pytest.mark.parametrize("case", CASES)
def test_three_steps_are_those_of_the_single_process(train, tmp_path, case):
    options, num_parts, splits = CASES[case]
    common = [*options, *STEPS]
    single = trained(train, tmp_path, "single", 1, [*common, "--max-steps=3", f"--accumulate={num_parts}"], "single")
    for number, (split, (world_size, more)) in enumerate(splits.items()):
        state = trained(train, tmp_path, "fsdp", world_size, [*common, "--max-steps=3", *more], f"fsdp{number}")
        differences = apart(single, state)
        print(f"{case}, {split}: weights {differences[0]:.1e}, moments {differences[1]:.1e}")
        assert max(differences) < LIMIT, split
        loss, other = (each["progress"]["history"][-1]["train_loss"] for each in (single, state))
        assert other == pytest.approx(loss, rel=1e-5)


@pytest.mark.process
def test_gradients_are_really_cut(train, tmp_path):
    common = [*TEXT, *STEPS, "--max-steps=1", "--optimizer=sgd", "--lr=1", "--momentum=0", "--weight-decay=0"]
    before = trained(train, tmp_path, "fsdp", 2, [*common, "--lr=0"], "still")
    after = trained(train, tmp_path, "fsdp", 2, [*common, "--clip-norm=0.05"], "cut")
    assert (vector(after["model"]) - vector(before["model"])).norm().item() == pytest.approx(0.05, rel=1e-3)


@pytest.mark.process
def test_bf16_trains_and_counts_each_token_once(train, summary_of, tmp_path):
    for options in (TEXT, DIGITS):
        name = options[0].partition("=")[2]
        argv = ["fsdp", *options, "--bf16", "--max-steps=4", f"--name={name}", f"--runs-dir={tmp_path}"]
        [ended, *_] = train(argv, 3, ok=True)
        assert "bf16" in ended.out
        summary = summary_of(tmp_path / name)
        assert 0 < summary["final_valid_loss"] < 100
        weights = checkpoint.load_newest(tmp_path / name)[1]["model"]
        assert all(tensor.dtype != torch.bfloat16 for tensor in weights.values())


@pytest.mark.process
def test_a_checkpoint_goes_on_in_any_world(train, tmp_path):
    """4 ranks -> 2 -> 3, and ddp -> fsdp -> single, are one run that never stopped."""
    common = [*TEXT, *STEPS, "--batch-size=1", "--keep-checkpoints=1"]
    # The same 12 micro-batches a step in all worlds.
    whole = trained(train, tmp_path, "single", 1, [*common, "--accumulate=12", "--max-steps=4"], "whole")
    for step, (strategy, world_size) in enumerate([("ddp", 4), ("fsdp", 2), ("fsdp", 3), ("single", 1)], start=1):
        argv = [*common, f"--accumulate={12 // world_size}", f"--max-steps={step}", *(["--resume"] if step > 1 else [])]
        state = trained(train, tmp_path, strategy, world_size, argv, "moved")
        assert (state["progress"]["step"], state["world_size"], state["strategy"]) == (step, world_size, strategy)
    assert max(apart(whole, state)) < LIMIT


@pytest.mark.process
def test_going_on_in_the_same_world_is_exact(train, tmp_path):
    common = [*TEXT, *STEPS, "--keep-checkpoints=2"]
    whole = trained(train, tmp_path, "fsdp", 2, [*common, "--max-steps=4"], "whole")
    trained(train, tmp_path, "fsdp", 2, [*common, "--max-steps=2"], "parts")
    files = sorted(path.name for path in (tmp_path / "parts" / "checkpoints" / "step-00000002").iterdir())
    assert files == ["index", "rank-00000", "rank-00001"]
    parts = trained(train, tmp_path, "fsdp", 2, [*common, "--max-steps=4", "--resume"], "parts")
    assert apart(whole, parts) == [0, 0]


@pytest.mark.process
def test_groups_that_do_not_come_out_are_refused(train, tmp_path):
    ended = train(["fsdp", *TEXT, "--replicate=2", f"--runs-dir={tmp_path}"], 3)
    assert [rank.code for rank in ended] == [2, 2, 2]
    assert "3 processes can't be divided into 2 groups" in ended[0].err
    assert "--replicate=1" in ended[0].err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("strategy", "options", "seen", "fix"),
    [
        ("ddp", {"replicate": 2}, "train ddp --replicate=2", "train fsdp"),
        ("single", {"cpu_offload": True}, "train single --cpu-offload", "train fsdp"),
        ("fsdp", {"activation_checkpoint": "full"}, "--activation-checkpoint=full", "gpt-tiny"),
    ],
)
def test_what_does_not_go_together(strategy, options, seen, fix):
    with pytest.raises(MusterError) as raised:
        check(strategy, Options(**options))
    assert raised.value.seen == seen
    assert fix in raised.value.fix
    check("fsdp", Options(replicate=2, cpu_offload=True))
