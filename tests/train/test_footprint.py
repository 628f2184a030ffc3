"""What a plan counts on tensors without content, beside what real trainings really hold."""

import json

import pytest
import torch
from torch.utils._pytree import tree_leaves

from train import models
from train.arguments import parse
from train.combinations import Pipelines
from train.models import gpt, loss_of, place
from train.options import Options
from train.plan.footprint import extend, key_of
from train.plan.memory import Subject
from train.plan.needs import in_flight, need

TEXT = ["--model=gpt-tiny", "--data=synthetic", "--num-samples=64", "--batch-size=8"]
IMAGES = ["--data=synthetic", "--image-size=64", "--num-classes=10", "--num-samples=256"]

# Writes what rank R holds in the run's second step, or in NUM_STEPS from there on, into the folder RESULTS: the sizes
# of its tensors, and the most that a step has allocated at a time, by torch's profiler: of several steps the least.
WEIGH = """
import json, os, torch
from torch.distributed.tensor import DTensor
from train.loop import Loop
plain, peaks = Loop.step, []
def size(tensors):
    parts = (tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors)
    return sum(part.numel() * part.element_size() for part in parts)
def step(self, batches, sums):
    if not 1 <= self.progress.step <= int(os.environ["NUM_STEPS"]):
        return plain(self, batches, sums)
    found, weights, optimize = {}, list(self.model.parameters()), self.trained.optimizer.step
    def optimized():
        found["gradients"] = size(weight.grad for weight in weights)
        optimize()
    self.trained.optimizer.step = optimized
    with torch.profiler.profile(profile_memory=True, activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        plain(self, batches, sums)
    self.trained.optimizer.step = optimize
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    now = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    peaks.append(most)
    found["peak"] = min(peaks)
    values = [value for state in self.trained.optimizer.state.values() for value in state.values()]
    if self.trained.average is not None:
        values += self.trained.average.state.values()
    found |= {"weights": size(weights), "moments": size(value for value in values if value.dim())}
    with open(os.environ["RESULTS"] + "/" + str(self.world.rank), "w") as file:
        json.dump(found, file)
Loop.step = step
"""


@pytest.mark.process
@pytest.mark.once
@pytest.mark.parametrize(
    ("argv", "world_size"),
    [
        (["single", *TEXT, "--no-bf16", "--activation-checkpoint=full"], 1),
        (["single", *TEXT, "--bf16"], 1),
        (["single", *IMAGES, "--model=resnet18", "--no-bf16"], 1),
        (["ddp", *IMAGES, "--model=resnet18", "--no-bf16", "--optimizer=adamw"], 2),
        (["ddp", *TEXT, "--no-bf16", "--zero1", "--ema=0.99"], 2),
        (["fsdp", *TEXT, "--bf16"], 2),
        (["fsdp", *TEXT, "--no-bf16", "--accumulate=2"], 2),
        (["tp", *TEXT, "--no-bf16", "--activation-checkpoint=selective"], 2),
        (["tp", *TEXT, "--no-bf16", "--tensor-parallel=2"], 4),
        (["pipeline", *TEXT, "--no-bf16"], 2),
        (["pipeline", *TEXT, "--no-bf16", "--schedule=gpipe", "--microbatches=2"], 2),
        (["pipeline", *TEXT, "--no-bf16", "--schedule=zero-bubble"], 2),
    ],
)
def test_a_real_step_holds_what_was_counted(train, tmp_path, argv, world_size):
    # What tp's ranks have sent is let go of by gloo's threads, on a busy machine later than need be: all of its steps
    # hold the same, and of many the least is that. Other strategies hold more in their second step than later.
    num_steps = 20 if argv[0] == "tp" else 1
    name = [f"--runs-dir={tmp_path / 'runs'}", "--device=cpu", f"--max-steps={num_steps + 1}"]
    train(
        [*argv, *name], world_size, ok=True, before=WEIGH, env={"RESULTS": str(tmp_path), "NUM_STEPS": str(num_steps)}
    )
    ranks = [json.loads((tmp_path / str(rank)).read_text()) for rank in range(world_size)]
    real = {name: max(rank[name] for rank in ranks) for name in ranks[0]}
    strategy, options = parse([*argv, *name])
    told = need(Subject(options.settled(), is_gpu=False), strategy, options.settled(), world_size)
    for kind in ("weights", "gradients", "moments"):
        assert getattr(told, kind) == pytest.approx(real[kind], rel=0.01), kind
    # Gradients come while activations go: the most at a time lies between activations alone and all together.
    together = told.activations + told.working + told.gradients
    print(f"{' '.join(argv)}: {told.activations:.0f} <= {real['peak']} <= {together:.0f}")
    assert told.activations <= 1.05 * real["peak"]
    assert 0.9 * real["peak"] <= together <= 1.2 * real["peak"]


@pytest.mark.parametrize(
    "options",
    [
        Options(model="gpt-tiny", batch_size=4, bf16=False),
        Options(model="gpt-tiny", batch_size=4, bf16=True),
        Options(model="gpt-tiny", batch_size=4, bf16=True, activation_checkpoint="full"),
        Options(model="resnet18", data="fake", image_size=64, batch_size=8, bf16=False),
        Options(model="vit_b_16", data="fake", image_size=64, batch_size=8, bf16=True, num_classes=10),
    ],
    ids=lambda options: f"{options.model} bf16={options.bf16} {options.activation_checkpoint}",
)
def test_what_autograd_saves_is_what_is_kept(options):
    subject = Subject(options.settled(), is_gpu=False)
    device = torch.device("cpu")
    model = models.build(options, subject.num_classes, subject.size)
    model = place(model, device, torch.channels_last, 0).train()
    inputs = targets = torch.zeros(options.batch_size, subject.size, dtype=torch.int64)
    if not options.predicts_tokens:
        targets = torch.zeros(options.batch_size, dtype=torch.int64)
        inputs = torch.zeros(options.batch_size, 3, subject.size, subject.size).to(memory_format=torch.channels_last)
    weights = {key_of(tensor) for tensor in [*model.parameters(), *model.buffers()]}
    held: dict[int, torch.Tensor] = {}

    def save(tensor):
        held[key_of(tensor)] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        gpt.rotation.cache_clear()
        with torch.autocast("cpu", torch.bfloat16, enabled=options.bf16):
            outputs = model(inputs)
            loss = loss_of(outputs, targets)
    for tensor in tree_leaves((inputs, outputs, loss)):
        held[key_of(tensor)] = tensor
    saved = sum(tensor.untyped_storage().nbytes() for key, tensor in held.items() if key not in weights)
    told = subject.footprint(options.batch_size, options.activation_checkpoint, 1, False)
    # With all computed again, the casts of weights are in the autocast's own cache and nowhere else.
    in_cache = told.copies if options.activation_checkpoint == "full" else 0
    assert told.kept - in_cache == pytest.approx(saved, rel=0.05)
    gpt.rotation.cache_clear()


def test_layers_are_all_alike():
    of = [Subject(Options(model=name, seq_len=128).settled(), is_gpu=True) for name in ("gpt-tiny", "gpt-small")]
    for subject in of:
        counted = subject.footprint(2, "selective", 1, True)
        halves = [subject.stage(2, "none", number, True, True) for number in (1, 2, 5)]
        assert extend(halves[0], halves[1], 5) == halves[2]
        assert 0 < counted.kept <= counted.peak


def test_computing_again_and_lower_precision_hold_less():
    subject = Subject(Options(model="gpt-1b").settled(), is_gpu=True)
    full, selective, none = (subject.footprint(1, level, 1, True).peak for level in ("full", "selective", "none"))
    assert full < selective < none < subject.footprint(1, "none", 1, False).peak
    assert subject.footprint(1, "none", 8, False).kept < 0.5 * subject.footprint(1, "none", 1, False).kept


def test_on_gpus_a_norm_keeps_its_input_and_nothing_else():
    options = Options(model="gpt-1b", bf16=False).settled()
    gpu, cpu = (Subject(options, is_gpu=is_gpu).stage(1, "none", 3, False, False).kept for is_gpu in (True, False))
    # On CPUs the product of the input and its scale too, of each of the two norms of three layers.
    of_norm = 4 * 4096 * 2048
    assert cpu - gpu == 3 * 2 * of_norm


def test_the_weights_of_the_8b():
    subject = Subject(Options(model="gpt-8b").settled(), is_gpu=True)
    # 2 * 128256 * 4096 + 32 * (4096 * (4096 + 2 * 1024 + 4096 + 3 * 14336) + 2 * 4096) + 4096
    assert subject.num_weights == 8_030_261_248
    told = need(subject, "fsdp", Options(model="gpt-8b", batch_size=1, activation_checkpoint="full"), 8)
    assert told.weights == told.gradients == told.moments / 2 == 4 * subject.num_weights / 8


@pytest.mark.parametrize(("optimizer", "momentum", "per_weight"), [("adamw", 0.9, 8), ("sgd", 0.9, 4), ("sgd", 0.0, 0)])
def test_moments_are_those_of_the_real_optimizer(optimizer, momentum, per_weight):
    options = Options(model="gpt-tiny", optimizer=optimizer, momentum=momentum)
    assert Subject(options.settled(), is_gpu=True).moment == per_weight


@pytest.mark.parametrize(
    ("schedule", "place", "flight"),
    [
        ("gpipe", 0, 8),
        ("gpipe", 3, 8),
        ("1f1b", 0, 4),
        ("1f1b", 3, 1),
        ("interleaved", 0, 5.5),
        ("interleaved", 3, 2.5),
    ],
)
def test_micro_batches_on_their_way(schedule, place, flight):
    plan = Pipelines.of(Options(schedule=schedule, microbatches=8), 4)
    assert in_flight(schedule, plan, place) == flight
