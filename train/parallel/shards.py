"""What cutting a model over ranks needs besides the cut: memory, number types, gradients. For fsdp and tp."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy

from train.combinations import check_replicas
from train.models import place
from train.options import Options
from train.parallel.gradients import Gradients, SummedGradients
from train.precision import Precision
from train.world import World


def check(world: World, options: Options) -> None:
    """Raises MusterError where `--replicate` does not divide the world."""
    check_replicas(options, world.world_size)


def home_of(world: World, options: Options) -> torch.device:
    """Where a rank's part of the weights stays."""
    return torch.device("cpu") if options.cpu_offload else world.device


def prepare(model: nn.Module, world: World, options: Options) -> nn.Module:
    """`model` as it can be cut: in memory already, unless it is shapes only, in the order of its dimensions."""
    if next(model.parameters()).is_meta:
        return model
    return place(model, home_of(world, options), torch.contiguous_format, options.seed)


def settings(model: nn.Module, world: World, options: Options, precision: Precision) -> dict[str, Any]:
    """How `fully_shard` is to compute and to keep the parts of `model`."""
    is_cpu = world.device.type == "cpu"
    # In double precision on CPUs the sum does not depend on who adds what to what: see gradients.py.
    dtypes = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if precision.bf16 and not has_statistics(model) else None,
        reduce_dtype=torch.float64 if is_cpu else torch.float32,
    )
    offload = CPUOffloadPolicy(pin_memory=not is_cpu) if options.cpu_offload else OffloadPolicy()
    return {"mp_policy": dtypes, "offload_policy": offload}


def has_statistics(model: nn.Module) -> bool:
    """True where layers keep running statistics: batch normalisation has no kernel for these beside bf16 weights."""
    return any(buffer.is_floating_point() for buffer in model.buffers())


def gradients(model: nn.Module, world: World, options: Options) -> Gradients:
    """Averaged by what cuts; on CPUs it divides once, after the exact sum."""
    if world.device.type != "cpu":
        return Gradients(options.accumulate)
    for unit in model.modules():
        if isinstance(unit, FSDPModule):
            unit.set_gradient_divide_factor(world.num_shares * options.accumulate)
    return SummedGradients()


@contextmanager
def no_sync(model: FSDPModule) -> Iterator[None]:
    """A context in which gradients are not reduced."""
    model.set_requires_gradient_sync(False)
    yield
    model.set_requires_gradient_sync(True)
