"""fsdp: clipping, precision, files, offload, refusals. test_matrix.py compares its weights with the single process."""

import pytest
import torch
from torch import nn

from muster.config import Options, check
from muster.errors import MusterError
from muster.train.checkpoint import manager as checkpoint
from muster.train.distributed.world import World
from muster.train.optim import Precision
from muster.train.parallel import fsdp
from tests.train.comparing import DIGITS, LIMIT, STEPS, TEXT, apart, trained, vector


@pytest.mark.process
def test_gradients_are_really_clipped(train, tmp_path):
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
def test_each_rank_writes_its_part(train, tmp_path):
    trained(train, tmp_path, "fsdp", 2, [*TEXT, *STEPS, "--max-steps=1"], "run")
    files = sorted(path.name for path in checkpoint.saved(tmp_path / "run")[0].iterdir())
    assert files == ["index", "rank-00000", "rank-00001"]


def test_groups_of_one_rank_are_refused():
    with pytest.raises(MusterError, match="groups of two or more") as raised:
        fsdp.FSDP(World(world_size=4), Options(replicate=4)).check()
    assert "train ddp" in raised.value.fix
    fsdp.FSDP(World(world_size=4), Options(replicate=2)).check()
    fsdp.FSDP(World(), Options()).check()


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


def test_with_cpu_offload_statistics_stay_on_the_device(monkeypatch):
    # Batch normalisation computes with them there. The meta device stands for the GPU, and nothing is sharded.
    monkeypatch.setattr(fsdp, "open_mesh", lambda world, **sizes: {"shard": None})
    monkeypatch.setattr(fsdp, "shard", lambda *_: None)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
    precision = Precision(bf16=False, channels_last=False, fused=False)
    strategy = fsdp.FSDP(World(device=torch.device("meta")), Options(cpu_offload=True))
    model = strategy.wrap(model, precision)
    assert {parameter.device.type for parameter in model.parameters()} == {"cpu"}
    assert {name: buffer.device.type for name, buffer in model.named_buffers()} == {
        "1.running_mean": "meta", "1.running_var": "meta", "1.num_batches_tracked": "meta",
    }  # fmt: skip
    assert "1.running_mean" in model.state_dict()


@pytest.mark.full
@pytest.mark.process
@pytest.mark.parametrize(
    ("strategy", "several", "single"),
    [
        ("fsdp", ["--batch-size=2"], ["--batch-size=2", "--accumulate=2"]),
        ("tp", ["--batch-size=4"], ["--batch-size=4"]),
    ],
)
def test_exact_gradients_are_clipped_to_the_same_bits(train, tmp_path, strategy, several, single):
    argv = [*TEXT, *STEPS, "--optimizer=sgd", "--lr=0.1", "--clip-norm=0.05", "--max-steps=2", "--deterministic"]
    alone = trained(train, tmp_path, "single", 1, [*argv, *single], "single")
    weights, _ = apart(alone, trained(train, tmp_path, strategy, 2, [*argv, *several], "several"))
    assert weights == 0


@pytest.mark.process
def test_a_group_of_one_trains_as_the_single_process_with_exact_sums_too(train, tmp_path):
    argv = [*TEXT, *STEPS, "--optimizer=sgd", "--lr=0.1", "--accumulate=4", "--max-steps=2", "--deterministic"]
    single = trained(train, tmp_path, "single", 1, argv, "single")
    alone = trained(train, tmp_path, "fsdp", 1, [*argv, "--single-rank-group"], "alone")
    assert max(apart(single, alone)) < LIMIT
