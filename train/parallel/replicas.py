"""What replicas on each rank need besides the model: how their gradients meet, who keeps which moments. For ddp."""

import inspect
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook, bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from train.errors import MusterError
from train.options import Options
from train.parallel import zero
from train.parallel.gradients import Gradients, ReducedGradients, are_exact
from train.parallel.hooks import HalfGradients, HookedGradients, PowerGradients
from train.parallel.local_sgd import LocalGradients
from train.world import World

OF_MANY = ("comm_hook", "zero1", "local_sgd", "sync_bn")
"""Options that mean nothing to a rank alone."""


def check(world: World, options: Options) -> None:
    """Raises MusterError where this hardware, or this torch, can't do what `options` ask for."""
    if world.backend is None:
        return
    on_cpu = world.device.type == "cpu"
    if options.sync_bn and on_cpu:
        raise MusterError(
            "batch normalisation over all ranks is for GPUs: torch has no kernel for CPUs",
            seen=f"--sync-bn, {world.world_size} processes on CPUs",
            fix="leave it out, or a larger --batch-size: each rank normalises by its own samples",
        )
    if options.comm_hook == "powersgd" and on_cpu and torch.cuda.is_available():
        raise MusterError(
            "torch's PowerSGD waits for a GPU where there is one, and trains on the CPU only where there is none",
            seen="--comm-hook=powersgd, --device=cpu on a machine with GPUs",
            fix="--comm-hook=bf16, or hide the GPUs: CUDA_VISIBLE_DEVICES=''",
        )
    if options.comm_hook == "bf16":
        try:
            dist.all_reduce(torch.ones(1, dtype=torch.bfloat16, device=world.device))
        except (RuntimeError, TypeError) as error:
            raise MusterError(
                "the network can't add up bf16 numbers here",
                seen=f"--comm-hook=bf16, {world.backend}, torch {torch.__version__}: {str(error).splitlines()[0]}",
                fix="--comm-hook=fp16, or leave it out",
            ) from error


def notes(world: World, options: Options) -> list[str]:
    """Which of the options have no effect on a rank alone."""
    given = [f"--{name.replace('_', '-')}" for name in OF_MANY if getattr(options, name) != getattr(Options(), name)]
    return [f"one process has nothing to do for {', '.join(given)}"] if world.backend is None and given else []


def prepare(model: nn.Module, options: Options) -> nn.Module:
    """`model`; with `--sync-bn`, such that each batch normalisation sees the samples of all ranks."""
    return nn.SyncBatchNorm.convert_sync_batchnorm(model) if options.sync_bn else model


def settings(world: World, options: Options) -> dict[str, Any]:
    """How DistributedDataParallel is to send and to keep gradients."""
    # The loop averages batch normalisation's buffers before they are used, so no step needs to send them.
    # torch 2.15 has a new name for the switch and deprecates the old one.
    known = inspect.signature(DistributedDataParallel).parameters
    return {
        "device_ids": [world.device] if world.device.type == "cuda" else None,
        "bucket_cap_mb": options.bucket_mb,
        "gradient_as_bucket_view": options.bucket_view,
        "static_graph": options.static_graph,
        "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers": False,
    }


def divide(optimizer: Optimizer, world: World, options: Options) -> Optimizer:
    """`optimizer`; with `--zero1`, for this rank's weights alone."""
    return zero.divide(optimizer, world) if options.zero1 else optimizer


def gradients(model: DistributedDataParallel, world: World, options: Options) -> Gradients:
    """As `averaged`, and with its waits for others counted; `--sync-bn` waits within layers too, where none is seen."""
    gradients = averaged(model, world, options)
    gradients.waits = None if options.sync_bn else world.waits
    return gradients


def averaged(model: DistributedDataParallel, world: World, options: Options) -> Gradients:
    """Averaged by the reducer of `model`; where it is to be done in another way, by a hook in its place."""
    exact = options.comm_hook == "none" and are_exact(world, options.accumulate)
    if options.comm_hook == "none" and options.local_sgd is None and not exact:
        return Gradients(options.accumulate)
    if exact:
        chosen = ReducedGradients(model, options.accumulate, world.world_size)
    elif options.comm_hook == "powersgd":
        chosen = PowerGradients(options, world)
    elif options.comm_hook == "fp16":
        chosen = HalfGradients(options.accumulate, world)
    else:
        chosen = HookedGradients(
            options.accumulate, bf16_compress_hook if options.comm_hook == "bf16" else allreduce_hook
        )
    if options.local_sgd is not None:
        chosen = LocalGradients(chosen, world, options)
    model.register_comm_hook(chosen, type(chosen).reduce)
    return chosen
