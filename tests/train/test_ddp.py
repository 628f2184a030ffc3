"""What ddp can do besides: smaller gradients, moments dealt out, ranks that train apart, and its switches."""

import re
from dataclasses import asdict

import pytest
import torch

from tests.train.comparing import DIGITS, LIMIT, STEPS, TEXT, apart, trained, vector
from train import checkpoint, models, replicas, zero
from train.combinations import check
from train.errors import MusterError
from train.options import Options
from train.resume import differences
from train.world import World

# Each rank says what it adds up with the others.
SPY = """
import torch.distributed as dist
add_up = dist.all_reduce
def spy(tensor, *args, **kwargs):
    print("sent", tensor.dtype, tensor.numel())
    return add_up(tensor, *args, **kwargs)
dist.all_reduce = spy
"""
PARTS = [*TEXT, *STEPS, "--optimizer=sgd", "--lr=0.1", "--clip-norm=0.5"]


def sent(ended):
    """(type, numbers) of each tensor that a rank has added up with the others."""
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
    # What a step's products miss is sent with the next one's: the momenta lag, the weights follow.
    "powersgd": (["--powersgd-start=2", "--powersgd-rank=4"], "float32", 0.3),
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
        assert 2 * num_parameters < traffic < 2.5 * num_parameters  # two steps whole, two small
    else:
        assert traffic == 4 * num_parameters + (hook == "bf16")  # once a step, not once a micro-batch


SWITCHES = {
    "static graph": (4, 1, ["--static-graph"]),
    "static graph, hook": (4, 1, ["--static-graph", "--comm-hook=bf16"]),
    "no view": (2, 2, ["--no-bucket-view"]),
    "no view, hook": (2, 2, ["--no-bucket-view", "--comm-hook=bf16"]),
    "small buckets": (2, 2, ["--bucket-mb=1"]),
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
    else:
        assert differences == [0, 0]
    num_buckets = sum(count > 10_000 for _, count in sent(ended[1])) / 4
    assert num_buckets >= 2 if switch == "small buckets" else 1 <= num_buckets < 2


# Each rank says how many bytes of moments it keeps when a checkpoint is saved.
WEIGH = """
from train.state import Keeper
save = Keeper.save
def weighed(self, state, step):
    moments = [moment for kept in state["optimizer"]["state"].values() for moment in kept.values()]
    print("kept", sum(moment.nbytes for moment in moments))
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
import torch, torch.distributed as dist
from train.local_sgd import LocalGradients
begin = LocalGradients.begin
def compared(self, optimizer, step):
    begin(self, optimizer, step)
    own = torch.cat([part.detach().flatten() for group in optimizer.param_groups for part in group["params"]])
    first = own.clone()
    dist.broadcast(first, src=0)
    print("step", step, "same" if torch.equal(own, first) else "apart")
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
    assert 2 * num_parameters <= traffic["float64"] < 2 * num_parameters + 10  # and what is counted


@pytest.mark.process
def test_gradients_too_large_for_fp16_are_told(train, tmp_path):
    steep = "from train import gradients\nloss_of = gradients.loss_of\n"
    steep += "gradients.loss_of = lambda outputs, targets: 1e7 * loss_of(outputs, targets)"
    argv = ["ddp", *TEXT, *STEPS, "--optimizer=sgd", "--lr=1e-9", "--max-steps=2", f"--runs-dir={tmp_path}"]
    ended = train([*argv, "--comm-hook=fp16", "--name=fp16"], 2, before=steep)
    assert [rank.code for rank in ended] == [1, 1]
    assert "gradients are too large for fp16, which ends at 65504" in ended[0].err
    assert "--comm-hook=bf16" in ended[0].err
    train([*argv, "--comm-hook=bf16", "--name=bf16"], 2, before=steep, ok=True)


@pytest.mark.process
def test_powersgd_says_what_a_stop_has_lost(train, tmp_path):
    argv = ["ddp", *PARTS, "--comm-hook=powersgd", "--powersgd-start=2", "--name=run", f"--runs-dir={tmp_path}"]
    ended = train([*argv, "--max-steps=4"], 2, ok=True)
    assert "PowerSGD" not in ended[0].out
    ended = train([*argv, "--max-steps=7", "--resume"], 2, ok=True, before=SPY)
    assert "note: PowerSGD begins anew" in ended[0].out
    # A process begins with two steps by averages, whatever the step.
    num_parameters = vector(checkpoint.load_newest(tmp_path / "run")[1]["model"]).numel()
    assert 2 * num_parameters < sum(count for _, count in sent(ended[1])) < 2.5 * num_parameters


LEARNING = {
    "bf16": ["--comm-hook=bf16"],
    "fp16": ["--comm-hook=fp16"],
    "powersgd, moments dealt out": ["--comm-hook=powersgd", "--zero1"],
    "apart": ["--local-sgd=4", "--local-sgd-start=20"],
}


@pytest.mark.process
@pytest.mark.parametrize("case", LEARNING)
def test_the_digits_are_learnt(train, summary_of, tmp_path, case):
    argv = ["ddp", "--data=digits", "--image-size=16", "--no-bf16", "--epochs=6", "--lr=0.02", *LEARNING[case]]
    train([*argv, "--name=run", f"--runs-dir={tmp_path}"], 2, ok=True)
    losses = [round(epoch["valid_loss"], 3) for epoch in summary_of(tmp_path / "run")["epochs"]]
    accuracy = summary_of(tmp_path / "run")["best_accuracy"]
    print(f"{case}: loss {losses}, accuracy {accuracy:.3f}")
    assert accuracy > 0.9


def test_batch_normalisation_over_all_ranks_has_the_same_tensors():
    plain = models.build(Options(), 10, 32)
    names = list(plain.state_dict())
    synced = replicas.prepare(plain, Options(sync_bn=True))
    kinds = {type(module) for module in synced.modules()}
    assert torch.nn.SyncBatchNorm in kinds
    assert torch.nn.BatchNorm2d not in kinds
    assert list(synced.state_dict()) == names


@pytest.mark.process
def test_batch_normalisation_over_all_ranks_is_for_gpus(train, tmp_path):
    ended = train(["ddp", *DIGITS, "--sync-bn", f"--runs-dir={tmp_path}"], 2)
    assert [rank.code for rank in ended] == [2, 2]
    assert "torch has no kernel for CPUs" in ended[0].err
    assert not list(tmp_path.iterdir())


@pytest.mark.process
def test_a_network_without_bf16_is_told(train, tmp_path):
    lacking = """
import torch, torch.distributed as dist
add_up = dist.all_reduce
def without(tensor, *args, **kwargs):
    if tensor.dtype == torch.bfloat16:
        raise RuntimeError("Invalid scalar type")
    return add_up(tensor, *args, **kwargs)
dist.all_reduce = without
"""
    ended = train(["ddp", *TEXT, "--comm-hook=bf16", f"--runs-dir={tmp_path}"], 2, before=lacking)
    assert [rank.code for rank in ended] == [2, 2]
    assert "the network can't add up bf16 numbers here" in ended[0].err
    assert "Invalid scalar type" in ended[0].err
    assert "--comm-hook=fp16" in ended[0].err


@pytest.mark.process
def test_a_rank_alone_says_what_it_has_no_use_for(train, tmp_path):
    argv = ["ddp", *TEXT, "--max-steps=1", "--zero1", "--comm-hook=bf16", "--name=run", f"--runs-dir={tmp_path}"]
    [ended] = train(argv, ok=True)
    assert "note: one process has nothing to do for --comm-hook, --zero1" in ended.out


@pytest.mark.parametrize(
    ("strategy", "options", "seen", "fix"),
    [
        ("fsdp", {"zero1": True}, "train fsdp --zero1", "train ddp --zero1"),
        ("single", {"comm_hook": "bf16"}, "train single --comm-hook=bf16", "train ddp"),
        ("fsdp", {"bucket_view": False}, "train fsdp --no-bucket-view", "train ddp --no-bucket-view"),
        ("ddp", {"powersgd_rank": 2}, "--powersgd-rank=2", "--comm-hook=powersgd"),
        ("ddp", {"local_sgd_start": 9}, "--local-sgd-start=9", "--local-sgd=8"),
        ("ddp", {"local_sgd": 4, "zero1": True}, "--zero1 --local-sgd=4", "leave out --zero1"),
        ("ddp", {"local_sgd": 4, "ema": 0.9}, "--ema=0.9 --local-sgd=4", "leave out --ema"),
        ("ddp", {"local_sgd": 4, "comm_hook": "fp16"}, "--comm-hook=fp16 --local-sgd=4", "--local-sgd-start=100"),
        (
            "ddp",
            {"local_sgd": 4, "local_sgd_start": 20, "comm_hook": "powersgd"},
            "--comm-hook=powersgd --local-sgd=4 --local-sgd-start=20",
            "--local-sgd-start=120",
        ),
        ("ddp", {"static_graph": True, "accumulate": 2}, "--accumulate=2 --static-graph", "--batch-size=64"),
        ("ddp", {"sync_bn": True, "device": "cpu"}, "--sync-bn --device=cpu", "leave out"),
        ("ddp", {"sync_bn": True, "model": "gpt-tiny"}, "--model=gpt-tiny --sync-bn", "leave out"),
    ],
)
def test_what_does_not_go_together(strategy, options, seen, fix):
    with pytest.raises(MusterError) as raised:
        check(strategy, Options(**options))
    assert raised.value.seen == seen
    assert fix in raised.value.fix


def test_what_goes_together():
    check("ddp", Options(comm_hook="powersgd", powersgd_start=5, local_sgd=4, local_sgd_start=20, sync_bn=True))
    check("ddp", Options(comm_hook="bf16", zero1=True, ema=0.9, accumulate=2, static_graph=False, bucket_mb=1))


def test_a_change_of_how_ranks_meet_is_told():
    def noted(before, now, num_ranks):
        old, new = asdict(Options(**before)), asdict(Options(**now)) | {"accumulate": 2 // num_ranks}
        return differences({"options": old | {"accumulate": 1}, "num_shares": 2}, new, World(world_size=num_ranks))

    assert noted({}, {"zero1": True, "static_graph": True, "bucket_mb": 9}, 1) == []
    assert "comm_hook none -> bf16" in noted({}, {"comm_hook": "bf16"}, 2)[0]
    assert "ranks 2 -> 1" in noted({"local_sgd": 4}, {"local_sgd": 4}, 1)[0]
    assert noted({"local_sgd": 4}, {"local_sgd": 4}, 2) == []
