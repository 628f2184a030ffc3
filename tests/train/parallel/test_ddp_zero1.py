"""`--zero1`: replicas that share the optimizer's work and moments."""

import re

import pytest
import torch

from muster.config import Options
from muster.train.checkpoint import manager as checkpoint
from muster.train.distributed.world import World
from muster.train.parallel import ddp
from tests.train.comparing import DIGITS, LIMIT, STEPS, TEXT, apart, trained

# Each rank prints how many bytes of moments it keeps when a checkpoint is saved.
WEIGH = """
import os
out = os.fdopen(os.dup(1), "w", buffering=1)
from muster.train.checkpoint.manager import CheckpointManager
save = CheckpointManager.save
def weighed(self, state, step):
    moments = [moment for kept in state["optimizer"]["state"].values() for moment in kept.values()]
    print("kept", sum(moment.nbytes for moment in moments), file=out)
    return save(self, state, step)
CheckpointManager.save = weighed
"""


def kept(ended):
    return int(re.search(r"^kept (\d+)$", ended.out, re.MULTILINE)[1])


CASES = {
    "gpt, adamw": ([*TEXT, *STEPS, "--max-steps=3", "--clip-norm=0.5"], 4, {"4": (4, 1), "2, accumulate": (2, 2)}),
    "resnet18, sgd": ([*DIGITS, *STEPS, "--max-steps=3", "--lr=0.05"], 3, {"3": (3, 1)}),
}


@pytest.mark.process
@pytest.mark.parametrize("case", CASES)
def test_moments_dealt_out_train_the_same_bits(train, tmp_path, case):
    options, num_parts, splits = CASES[case]
    options = [*options, "--deterministic"]
    alone = ["single", *options, f"--accumulate={num_parts}", "--name=single", f"--runs-dir={tmp_path}"]
    [ended] = train(alone, ok=True, before=WEIGH)
    whole, state = kept(ended), checkpoint.load_newest(tmp_path / "single")[1]
    for number, (world_size, accumulate) in enumerate(splits.values()):
        argv = ["ddp", "--zero1", *options, f"--accumulate={accumulate}", f"--name={number}", f"--runs-dir={tmp_path}"]
        shares = [kept(rank) / whole for rank in train(argv, world_size, ok=True, before=WEIGH)]
        print(f"{case}: rank by rank {', '.join(f'{share:.3f}' for share in shares)}")
        assert sum(shares) == pytest.approx(1, abs=1e-9)
        assert max(shares) < 1.1 / world_size
        assert apart(state, checkpoint.load_newest(tmp_path / f"{number}")[1]) == [0, 0]


@pytest.mark.process
def test_moments_dealt_out_go_on_in_any_world_and_strategy(train, tmp_path):
    """4, 2 and 3 ranks with --zero1, ddp without, fsdp, --zero1 again, single: equal to a run that never stopped."""
    common = [*TEXT, *STEPS, "--batch-size=1", "--keep-checkpoints=1"]
    whole = trained(train, tmp_path, "single", 1, [*common, "--accumulate=12", "--max-steps=7"], "whole")
    ways = [("ddp", 4, True), ("ddp", 2, True), ("ddp", 3, True), ("ddp", 2, False)]
    ways += [("fsdp", 2, False), ("ddp", 2, True), ("single", 1, False)]
    for step, (strategy, world_size, dealt) in enumerate(ways, start=1):
        argv = [*common, f"--accumulate={12 // world_size}", f"--max-steps={step}", *(["--resume"] if step > 1 else [])]
        argv += ["--zero1"] if dealt else []
        state = trained(train, tmp_path, strategy, world_size, argv, "moved")
        assert (state["progress"]["step"], state["options"]["zero1"]) == (step, dealt)
    differences = apart(whole, state)
    print(f"weights {differences[0]:.1e}, moments {differences[1]:.1e}")
    assert max(differences) < LIMIT


def test_sharding_keeps_the_parameter_groups_of_an_optimizer():
    weights = [torch.nn.Parameter(torch.full((size,), 1.0)) for size in (6, 1, 4, 3, 2)]
    groups = [{"params": weights[:2], "weight_decay": 0.5}, {"params": weights[2:], "weight_decay": 0.0}]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    assert [[part.numel() for part in dealt] for dealt in ddp.partition(weights, 3)] == [[6], [4, 1], [3, 2]]
    ddp.DDP(World(rank=1, world_size=3), Options(zero1=True)).shard_optimizer(optimizer)
    assert [[part.numel() for part in group["params"]] for group in optimizer.param_groups] == [[1], [4]]
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.5, 0.0]
