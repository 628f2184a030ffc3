"""Layers cut over the ranks of a group train as whole ones do."""

import pytest

from tests.train.comparing import LIMIT, STEPS, TEXT, apart, trained
from train import checkpoint
from train.combinations import check, check_tensor_parallel
from train.errors import MusterError
from train.options import Options


@pytest.fixture(scope="module")
def single(train, tmp_path_factory):
    """The state of the single process, by its number of micro-batches and its options."""
    known = {}

    def state(num_parts, *options):
        if (num_parts, options) not in known:
            argv = [*TEXT, *STEPS, *options, "--max-steps=3", f"--accumulate={num_parts}"]
            known[num_parts, options] = trained(train, tmp_path_factory.mktemp("single"), "single", 1, argv, "run")
        return known[num_parts, options]

    return state


# AdamW divides a gradient by its own size, and so makes much of the last bits of small ones.
SGD = ("--optimizer=sgd", "--lr=0.01")
CUT = ("--optimizer=sgd", "--lr=1", "--clip-norm=0.05")


@pytest.mark.process
@pytest.mark.parametrize(
    ("world_size", "num_parts", "same", "more"),
    [
        (2, 2, SGD, ["--accumulate=2"]),
        (4, 2, SGD, ["--tensor-parallel=2"]),
        (4, 4, CUT, ["--tensor-parallel=2", "--accumulate=2"]),
        (2, 2, SGD, ["--accumulate=2", "--activation-checkpoint=selective"]),
        (3, 3, SGD, ["--tensor-parallel=1"]),
    ],
)
def test_three_steps_are_those_of_the_single_process(train, single, tmp_path, world_size, num_parts, same, more):
    argv = [*TEXT, *STEPS, *same, *more, "--max-steps=3"]
    state = trained(train, tmp_path, "tp", world_size, argv, "run")
    expected = single(num_parts, *same)
    differences = apart(expected, state)
    print(f"{world_size} ranks {more}: weights {differences[0]:.1e}, moments {differences[1]:.1e}")
    assert max(differences) < LIMIT
    for key in ("train_loss", "train_accuracy", "valid_loss", "valid_accuracy"):
        results = [each["progress"]["history"][-1][key] for each in (expected, state)]
        assert results[1] == pytest.approx(results[0], rel=1e-5)


@pytest.mark.process
def test_a_checkpoint_goes_from_ddp_to_fsdp_to_tp_and_back(train, single, tmp_path):
    for step, (strategy, world_size) in enumerate([("ddp", 4), ("fsdp", 2), ("tp", 4), ("single", 1)], start=1):
        shares = 2 if strategy == "tp" else world_size
        argv = [*TEXT, *STEPS, *SGD, f"--accumulate={4 // shares}", f"--max-steps={step}", "--keep-checkpoints=1"]
        argv += ["--tensor-parallel=2"] if strategy == "tp" else []
        state = trained(train, tmp_path, strategy, world_size, [*argv, *(["--resume"] if step > 1 else [])], "moved")
        if step == 3:
            assert max(apart(single(4, *SGD), state)) < LIMIT
    assert state["progress"]["step"] == 4


@pytest.mark.process
def test_going_on_in_the_same_world_is_exact(train, tmp_path):
    common = [*TEXT, *STEPS, "--tensor-parallel=2"]
    whole = trained(train, tmp_path, "tp", 4, [*common, "--max-steps=4"], "whole")
    trained(train, tmp_path, "tp", 4, [*common, "--max-steps=2"], "parts")
    parts = trained(train, tmp_path, "tp", 4, [*common, "--max-steps=4", "--resume"], "parts")
    assert apart(whole, parts) == [0, 0]
    assert len(list((checkpoint.saved(tmp_path / "parts")[0]).glob("rank-*"))) == 4


@pytest.mark.process
def test_bf16(train, summary_of, tmp_path):
    train(["tp", *TEXT, "--bf16", "--max-steps=4", "--name=run", f"--runs-dir={tmp_path}"], 2, ok=True)
    assert 3 < summary_of(tmp_path / "run")["final_valid_loss"] < 6


@pytest.mark.parametrize(
    ("world_size", "options", "wrong", "fix"),
    [
        (4, {}, "2 heads of keys can't be divided by 4", "--tensor-parallel=2"),
        (4, {"tensor_parallel": 3}, "4 processes can't be divided by 3", "--tensor-parallel=2"),
        (2, {"seq_len": 31}, "31 tokens of a sequence can't be divided by 2", "--tensor-parallel=1"),
    ],
)
def test_what_does_not_come_out_even_is_refused(world_size, options, wrong, fix):
    asked = Options(model="gpt-tiny", **options)
    with pytest.raises(MusterError) as raised:
        check_tensor_parallel(asked, world_size, 2, asked.seq_len or 128)
    assert wrong in raised.value.wrong
    assert fix in raised.value.fix
    check_tensor_parallel(Options(model="gpt-tiny"), 2, 2, 128)


def test_images_are_refused():
    with pytest.raises(MusterError, match="cuts transformers") as raised:
        check("tp", Options())
    assert "train fsdp --model=resnet18" in raised.value.fix
