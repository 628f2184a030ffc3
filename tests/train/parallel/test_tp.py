"""Tensor parallelism: groups, precision, refusals and the loss, beside the combinations of test_matrix.py."""

import subprocess
import sys

import pytest

from muster.config import Options, check
from muster.errors import MusterError
from muster.train.checkpoint import manager as checkpoint
from muster.train.distributed.world import World
from muster.train.parallel import tp
from tests.train.comparing import LIMIT, STEPS, TEXT, apart, trained


@pytest.mark.process
def test_groups_of_one_rank_are_single_processes(train, tmp_path):
    common = [*TEXT, *STEPS, "--optimizer=sgd", "--lr=0.01", "--max-steps=2", "--clip-norm=1"]
    whole = trained(train, tmp_path, "single", 1, [*common, "--accumulate=3"], "single")
    state = trained(train, tmp_path, "tp", 3, [*common, "--tensor-parallel=1"], "tp")
    assert max(apart(whole, state)) < LIMIT
    [log] = (tmp_path / "tp").glob("logs/*/*/rank-0.log")
    assert "redistributing" not in log.read_text()  # torch's advice to the program's authors
    assert len(list((checkpoint.saved(tmp_path / "tp")[0]).glob("rank-*"))) == 3


@pytest.mark.process
def test_bf16(train, summary_of, tmp_path):
    train(["tp", *TEXT, "--bf16", "--max-steps=4", "--name=run", f"--runs-dir={tmp_path}"], 2, ok=True)
    assert 3 < summary_of(tmp_path / "run")["final_valid_loss"] < 6


@pytest.mark.parametrize(
    ("world_size", "options", "wrong", "fix"),
    [
        (4, {}, "2 key-value heads can't be divided by 4", "--tensor-parallel=2"),
        (4, {"tensor_parallel": 3}, "4 processes can't be divided by 3", "--tensor-parallel=2"),
        (2, {"seq_len": 31}, "31 tokens of a sequence can't be divided by 2", "--tensor-parallel=1"),
        (3, {"model": "gpt-small", "seq_len": 48}, "1024 columns of a feed-forward layer", "--tensor-parallel=1"),
    ],
)
def test_sizes_that_do_not_divide_evenly_are_refused(world_size, options, wrong, fix):
    asked = Options(**{"model": "gpt-tiny", **options})
    with pytest.raises(MusterError) as raised:
        tp.TensorParallel(World(world_size=world_size), asked).check()
    assert wrong in raised.value.wrong
    assert fix in raised.value.fix
    assert f"--seq-len={asked.seq_len or 128}" in raised.value.seen
    tp.TensorParallel(World(world_size=2), Options(model="gpt-tiny")).check()


def test_images_are_refused():
    with pytest.raises(MusterError, match="splits transformers") as raised:
        check("tp", Options())
    assert "train fsdp --model=resnet18" in raised.value.fix


CUT_LOSS = """
import torch, torch.distributed as dist, torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from muster.config import Options
from muster.train import models
from muster.train.models import IGNORED
from muster.train.parallel.strategy import loss_of, predictions_of
from muster.train.parallel.tp import ShardedLogits, shard

SIZE, NUM_TOKENS = 2, 7

def rank(number, path):
    dist.init_process_group("gloo", store=dist.FileStore(path, SIZE), rank=number, world_size=SIZE)
    mesh = init_device_mesh("cpu", (SIZE,))
    parts = ShardedLogits(mesh, NUM_TOKENS)
    torch.manual_seed(1)
    logits = 20 * torch.randn(3, 5, NUM_TOKENS) - 50
    logits[0, 0] = 3.0  # all alike: the first one counts
    targets = torch.randint(0, NUM_TOKENS, (3, 5))
    targets[1, 2] = IGNORED
    for smoothing in (0.0, 0.1):
        whole = logits.clone().requires_grad_()
        own = logits[..., parts.shard_start : parts.shard_start + parts.shard_size].clone().requires_grad_()
        expected, loss = loss_of(whole, targets, smoothing), parts.loss(own, targets, smoothing)
        (3 * expected).backward()
        (3 * loss).backward()
        torch.testing.assert_close(loss, expected)
        torch.testing.assert_close(own.grad, whole.grad[..., parts.shard_start : parts.shard_start + parts.shard_size])
    assert torch.equal(parts.predictions(own), predictions_of(logits))
    with torch.no_grad():
        assert parts.loss(own, torch.full_like(targets, IGNORED)).isnan()

    model = models.build(Options(model="gpt-tiny"), 5, 32)
    assert shard(model, mesh) is not None
    assert model(torch.zeros(2, 32, dtype=torch.long)).shape == (2, 32, 3 - number)
    tiny = models.build(Options(model="gpt-tiny"), 1, 32)
    assert shard(tiny, mesh) is None
    assert tiny(torch.zeros(2, 32, dtype=torch.long)).shape == (2, 32, 1)

if __name__ == "__main__":
    import sys
    mp.start_processes(rank, (sys.argv[1],), SIZE, start_method="fork")
"""


@pytest.mark.process
def test_the_loss_of_cut_logits_is_that_of_whole_ones_and_no_rank_has_all(tmp_path):
    argv = [sys.executable, "-c", CUT_LOSS, str(tmp_path / "store")]
    ended = subprocess.run(argv, capture_output=True, text=True, timeout=240, check=False)
    assert ended.returncode == 0, ended.stderr
