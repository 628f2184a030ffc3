"""Layers cut over the ranks of a group: what test_matrix.py has no room for."""

import pytest

from muster.config import Options, check
from muster.errors import MusterError
from muster.train import checkpoint
from muster.train.distributed.world import World
from muster.train.parallel import tp
from tests.train.comparing import LIMIT, STEPS, TEXT, apart, trained


@pytest.mark.process
def test_groups_of_one_rank_are_single_processes(train, tmp_path):
    common = [*TEXT, *STEPS, "--optimizer=sgd", "--lr=0.01", "--max-steps=2"]
    whole = trained(train, tmp_path, "single", 1, [*common, "--accumulate=3"], "single")
    state = trained(train, tmp_path, "tp", 3, [*common, "--tensor-parallel=1"], "tp")
    assert max(apart(whole, state)) < LIMIT
    assert len(list((checkpoint.saved(tmp_path / "tp")[0]).glob("rank-*"))) == 3


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
        tp.TensorParallel(World(world_size=world_size), asked).check()
    assert wrong in raised.value.wrong
    assert fix in raised.value.fix
    tp.TensorParallel(World(world_size=2), Options(model="gpt-tiny")).check()


def test_images_are_refused():
    with pytest.raises(MusterError, match="cuts transformers") as raised:
        check("tp", Options())
    assert "train fsdp --model=resnet18" in raised.value.fix
