"""Replicas that share the work of the optimizer, or train apart for some steps."""

import re

import pytest
import torch

from tests.train.comparing import DIGITS, LIMIT, STEPS, TEXT, apart, trained, vector
from tests.train.test_ddp import PARTS, SPY, sent
from train import checkpoint
from train.parallel import zero
from train.world import World

# Each rank says how many bytes of moments it keeps when a checkpoint is saved.
WEIGH = """
import os
out = os.fdopen(os.dup(1), "w", buffering=1)
from train.state import Keeper
save = Keeper.save
def weighed(self, state, step):
    moments = [moment for kept in state["optimizer"]["state"].values() for moment in kept.values()]
    print("kept", sum(moment.nbytes for moment in moments), file=out)
    return save(self, state, step)
Keeper.save = weighed
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
    """4 ranks -> 2 -> 3 with --zero1, then without, by fsdp, back, and alone: one run that never stopped."""
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


def test_dealing_keeps_the_groups_of_an_optimizer():
    weights = [torch.nn.Parameter(torch.full((size,), 1.0)) for size in (6, 1, 4, 3, 2)]
    groups = [{"params": weights[:2], "weight_decay": 0.5}, {"params": weights[2:], "weight_decay": 0.0}]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    assert [[part.numel() for part in dealt] for dealt in zero.deal(weights, 3)] == [[6], [4, 1], [3, 2]]
    zero.divide(optimizer, World(rank=1, world_size=3))
    assert [[part.numel() for part in group["params"]] for group in optimizer.param_groups] == [[1], [4]]
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.5, 0.0]


# Each rank says, before each step, whether its weights are those of rank 0.
COMPARE = """
import os, torch, torch.distributed as dist
from train.parallel.local_sgd import LocalGradients
begin, out = LocalGradients.begin, os.fdopen(os.dup(1), "w", buffering=1)
def compared(self, optimizer, step):
    begin(self, optimizer, step)
    own = torch.cat([part.detach().flatten() for group in optimizer.param_groups for part in group["params"]])
    first = own.clone()
    dist.broadcast(first, src=0)
    print("step", step, "same" if torch.equal(own, first) else "apart", file=out)
LocalGradients.begin = compared
"""


def together(ended):
    """The steps that a rank began with the weights of rank 0."""
    return [int(step) for step in re.findall(r"^step (\d+) same$", ended.out, re.MULTILINE)]


@pytest.mark.process
@pytest.mark.parametrize(("world_size", "accumulate"), [(2, 1), (4, 1), (2, 2)])
def test_meeting_at_each_step_is_to_average_gradients(train, tmp_path, world_size, accumulate):
    argv = [*TEXT, *STEPS, "--optimizer=sgd", "--lr=0.1", "--max-steps=4"]
    single = trained(train, tmp_path, "single", 1, [*argv, f"--accumulate={world_size * accumulate}"], "single")
    argv += [f"--accumulate={accumulate}", "--local-sgd=1", "--local-sgd-start=1"]
    differences = apart(single, trained(train, tmp_path, "ddp", world_size, argv, "local"))
    print(f"weights {differences[0]:.1e}, momenta {differences[1]:.1e}")
    assert differences[0] > 0
    assert max(differences) < LIMIT


@pytest.mark.process
def test_ranks_train_apart_and_meet_where_it_was_said(train, tmp_path):
    local = ["ddp", *PARTS, "--local-sgd=3", "--local-sgd-start=2", f"--runs-dir={tmp_path}"]
    ended = train([*local, "--name=whole", "--max-steps=9"], 2, ok=True, before=COMPARE)
    # Gradients are averaged in steps 0 and 1; step 2 is the first of its own on each rank.
    assert together(ended[1]) == [0, 1, 2, 5, 8]
    # Stopped where they meet anyway, a run goes on to the bit, and stays in phase.
    train([*local, "--name=parts", "--max-steps=5"], 2, ok=True)
    ended = train([*local, "--name=parts", "--max-steps=9", "--resume"], 2, ok=True, before=COMPARE)
    assert together(ended[1]) == [5, 8]
    whole, parts = (checkpoint.load_newest(tmp_path / name)[1] for name in ("whole", "parts"))
    assert apart(whole, parts) == [0, 0]
    # Stopped elsewhere they meet once more, for the checkpoint.
    train([*local, "--name=odd", "--max-steps=4"], 2, ok=True)
    ended = train([*local, "--name=odd", "--max-steps=9", "--resume"], 2, ok=True, before=COMPARE)
    assert together(ended[1]) == [4, 5, 8]


@pytest.mark.process
def test_apart_only_weights_and_moments_travel(train, tmp_path):
    argv = ["ddp", *PARTS, "--max-steps=5", "--comm-hook=bf16", "--local-sgd=2", "--local-sgd-start=3"]
    ended = train([*argv, "--name=run", f"--runs-dir={tmp_path}"], 2, ok=True, before=SPY)
    num_parameters = vector(checkpoint.load_newest(tmp_path / "run")[1]["model"]).numel()
    traffic = {kind: sum(count for each, count in sent(ended[1]) if each == kind) for kind, _ in sent(ended[1])}
    assert set(traffic) == {"bfloat16", "float64"}
    assert traffic["bfloat16"] == 3 * num_parameters + 1
    # And what is counted: looks after steps 2 to 5 at most, the sums of the epoch and of validation, and a warning.
    assert 0 <= traffic["float64"] - 2 * num_parameters <= 4 * 5 + 3 + 4 + 1
