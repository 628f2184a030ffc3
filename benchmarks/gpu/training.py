"""A few steps of a training in this process, by any strategy in a group of one rank, from the same first weights.

Model, strategy, gradients and optimizer are the trainer's own; the batches are made beforehand. So one process can do
the same training on the CPU and on the GPU, and compare the results.
"""

import os
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from muster.config import Options
from muster.train import models, optim, parallel
from muster.train.distributed.world import World
from muster.train.optim import choose_precision
from muster.train.parallel.strategy import Sums, loss_of
from muster.train.reporting.metrics import Stopwatch
from muster.train.trainer import choose_kernels

Weights = dict[str, Tensor]
"""A model's parameters and buffers by name, whole, on the CPU, in double precision."""

CPU = torch.device("cpu")
NUM_CLASSES, NUM_TOKENS = 10, 256


@dataclass(frozen=True)
class Trained:
    """The result of a training.

    Attributes:
        before, after: the weights.
        losses: of each step.
        gradients: of the first step.
        peak_gib: the peak of the GPU's memory; 0 on a CPU.
    """

    before: Weights
    after: Weights
    losses: list[float]
    gradients: Weights = field(default_factory=dict)
    peak_gib: float = 0.0


def options_of(model: str, **others: Any) -> Options:
    """Options for a few steps in fp32 of `model`; `others` override them."""
    common = {"bf16": False, "warmup_steps": 0, "seed": 1, "batch_size": 4, "optimizer": "sgd"}
    is_transformer = model.startswith("gpt")
    own = {"lr": 0.1, "seq_len": 32, "clip_norm": 1.0} if is_transformer else {"lr": 0.01, "image_size": 32}
    return Options(**{"model": model, **common, **own, **others}).settled()  # type: ignore[arg-type]


def size_of(options: Options) -> int:
    return (options.seq_len or 128) if options.predicts_tokens else options.pixels


def batches_of(options: Options, num_steps: int) -> list[tuple[Tensor, Tensor]]:
    """The same inputs and targets at each call, on the CPU."""
    drawn = torch.Generator().manual_seed(options.seed)
    size, num_samples = size_of(options), options.batch_size
    found = []
    for _ in range(num_steps):
        if options.predicts_tokens:
            texts_NT = torch.randint(0, NUM_TOKENS, (num_samples, size + 1), generator=drawn)
            found.append((texts_NT[:, :-1].contiguous(), texts_NT[:, 1:].contiguous()))
        else:
            images_NCHW = torch.randn(num_samples, 3, size, size, generator=drawn)
            found.append((images_NCHW, torch.randint(0, NUM_CLASSES, (num_samples,), generator=drawn)))
    return found


@contextmanager
def group_of_one(device: torch.device, backend: str | None = None) -> Iterator[World]:
    """A world of this process alone, with a process group: over NCCL on a GPU, over gloo on a CPU."""
    backend = backend or ("nccl" if device.type == "cuda" else "gloo")
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group(backend, rank=0, world_size=1)
    try:
        yield World(device=device, backend=backend, local_world_size=1, waits=Stopwatch(device, is_counting=False))
    finally:
        dist.destroy_process_group()


def whole(tensor: Tensor) -> Tensor:
    """`tensor` in one piece, on the CPU, in double precision."""
    tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return tensor.detach().to(CPU, torch.float64, copy=True)


def weights_of(model: nn.Module) -> Weights:
    return {name: whole(tensor) for name, tensor in model.state_dict().items()}


def first_weights(options: Options) -> Mapping[str, Tensor]:
    """The weights with which every training of `options` begins, as they are drawn on the CPU."""
    torch.manual_seed(options.seed)
    model = models.build(options, classes_of(options), size_of(options))
    return models.place(model, CPU, torch.preserve_format, options.seed).state_dict()


def classes_of(options: Options) -> int:
    return NUM_TOKENS if options.predicts_tokens else NUM_CLASSES


@torch.no_grad()
def fill(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Copies `weights` into `model`; if it is sharded, then over a group of one rank, so its shards are complete."""
    for name, tensor in model.state_dict().items():
        own = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        own.copy_(weights[name])


def train(
    options: Options,
    world: World,
    strategy: str = "single",
    *,
    num_steps: int = 3,
    build_optimizer: Callable[[nn.Module], Optimizer] | None = None,
    scaler: "torch.amp.GradScaler | None" = None,
    weights: Mapping[str, Tensor] | None = None,
    dtype: torch.dtype = torch.float32,
) -> Trained:
    """Trains `num_steps` steps.

    Args:
        build_optimizer: makes the optimizer in place of the trainer's own.
        scaler: scales the loss; the model computes in fp16 then.
        weights: the first weights; by default those of `first_weights`.
        dtype: of the weights.
    """
    device = world.device
    choose_kernels(options, world)
    parts = parallel.load(strategy, world, options)
    precision = choose_precision(options, world)
    torch.manual_seed(options.seed)
    model = parts.wrap(models.build(options, classes_of(options), size_of(options)), precision)
    inner = parts.unwrap(model)
    fill(inner, weights or first_weights(options))
    inner.to(dtype)
    before = weights_of(inner)
    steps = build_optimizer(inner) if build_optimizer else optim.build(options, model, fused=precision.fused)
    gradients = parts.gradients(model)
    gradients.autocast = precision.autocast(device)
    model.train()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    losses, first = [], Weights()
    for number, (inputs, targets) in enumerate(batches_of(options, num_steps)):
        sums = Sums(device)
        inputs = inputs.to(device, dtype if inputs.is_floating_point() else inputs.dtype)
        if inputs.dim() == 4:
            inputs = inputs.contiguous(
                memory_format=precision.layout if precision.channels_last else torch.contiguous_format
            )
        targets = targets.to(device)
        gradients.begin(number)
        if scaler is not None:
            with torch.autocast(device.type, torch.float16):
                loss = loss_of(model(inputs), targets)
            scaler.scale(loss).backward()
            sums.add(loss, torch.zeros_like(targets), targets)
            scaler.unscale_(steps)
        else:
            gradients.compute(model, inputs, targets, sums)
            gradients.finish()
        if options.clip_norm is not None:
            gradients.clip(model, options.clip_norm)
        if not number:
            first = {name: whole(own.grad) for name, own in inner.named_parameters() if own.grad is not None}
        if scaler is not None:
            scaler.step(steps)
            scaler.update()
        else:
            steps.step()
        steps.zero_grad(set_to_none=True)
        losses.append(float(sums.values[0] / sums.values[2]))
    peak = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else 0.0
    return Trained(before, weights_of(inner), losses, first, peak)


def flat(weights: Weights) -> Tensor:
    return torch.cat([weights[name].flatten() for name in sorted(weights)])


def distance(one: Weights, other: Weights) -> float:
    """The norm of the difference of the tensors, relative to the norm of the first ones."""
    mine, its = flat(one), flat({name: other[name] for name in one})
    return float((mine - its).norm() / mine.norm())


def updates_apart(one: Trained, other: Trained) -> float:
    """The distance between the changes of the weights in `one` and in `other`, relative to those in `one`.

    Weights hardly change in a few steps: two that are close may have been changed in opposite directions.
    """
    changed = [{name: run.after[name] - run.before[name] for name in run.before} for run in (one, other)]
    return distance(*changed)


def compare(one: Trained, other: Trained) -> dict[str, float]:
    """The figures that compare `other` with `one`."""
    losses = [abs(mine - its) / abs(mine) for mine, its in zip(one.losses, other.losses, strict=True)]
    return {"updates_apart": updates_apart(one, other), "losses_apart": max(losses)}


def device_of(name: str) -> torch.device:
    return torch.device("cuda", 0) if name == "cuda" else CPU
