"""Fully sharded data parallel: each rank keeps a part of every weight and moment, and gathers what it needs."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from train.combinations import check_replicas
from train.gradients import Gradients, SummedGradients
from train.models import place, units_of
from train.options import Options
from train.precision import Precision
from train.strategies import single
from train.world import World, open_mesh


def check(world: World, options: Options) -> None:
    """Raises MusterError where `--replicate` does not divide the world."""
    check_replicas(options, world.world_size)


def share(world: World, options: Options) -> World:
    """A share of the data for each rank."""
    return world


def notes(world: World, options: Options) -> list[str]:
    """Nothing that a user should know before it trains."""
    return []


def wrap(model: nn.Module, world: World, options: Options, precision: Precision) -> nn.Module:
    """`model` cut over the ranks, layer by layer; whole, in a world of one."""
    if world.backend is None:
        return single.wrap(model, world, options, precision)
    if not next(model.parameters()).is_meta:
        model = place(model, home_of(world, options), torch.contiguous_format, options.seed)
    mesh = open_mesh(world, replicate=options.replicate, shard=world.world_size // options.replicate)
    shard(model, mesh if options.replicate > 1 else mesh["shard"], world, options, precision)
    # Now that each rank has its part alone to hold, the shapes get memory and weights.
    return place(model, home_of(world, options), torch.preserve_format, options.seed)


def shard(model: nn.Module, mesh: DeviceMesh, world: World, options: Options, precision: Precision) -> None:
    """Cuts `model` over the ranks of `mesh`; of two dimensions, the first replicates."""
    is_cpu = world.device.type == "cpu"
    # In double precision on CPUs the sum does not depend on who adds what to what: see gradients.py.
    dtypes = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if precision.bf16 and not has_statistics(model) else None,
        reduce_dtype=torch.float64 if is_cpu else torch.float32,
    )
    offload = CPUOffloadPolicy(pin_memory=not is_cpu) if options.cpu_offload else OffloadPolicy()
    for unit in [*units_of(model), model]:
        fully_shard(unit, mesh=mesh, mp_policy=dtypes, offload_policy=offload)


def home_of(world: World, options: Options) -> torch.device:
    """Where a rank's part of the weights stays."""
    return torch.device("cpu") if options.cpu_offload else world.device


def has_statistics(model: nn.Module) -> bool:
    """True where layers keep running statistics: batch normalisation has no kernel for these beside bf16 weights."""
    return any(buffer.is_floating_point() for buffer in model.buffers())


def gradients(model: nn.Module, world: World, options: Options) -> Gradients:
    """Averaged by what shards; on CPUs it divides once, after the exact sum."""
    if not isinstance(model, FSDPModule):
        return single.gradients(model, world, options)
    if world.device.type != "cpu":
        return Gradients(options.accumulate)
    for unit in model.modules():
        if isinstance(unit, FSDPModule):
            unit.set_gradient_divide_factor(world.num_shares * options.accumulate)
    return SummedGradients()


def unwrap(model: nn.Module) -> nn.Module:
    """`model` as it is: only with its hooks can it compute."""
    return model


def without_sync(model: nn.Module) -> AbstractContextManager[object]:
    """Gradients stay whole, on this rank, until the first micro-batch outside of this context."""
    return held_back(model) if isinstance(model, FSDPModule) else nullcontext()


@contextmanager
def held_back(model: FSDPModule) -> Iterator[None]:
    """A context in which gradients are not reduced."""
    model.set_requires_gradient_sync(False)
    yield
    model.set_requires_gradient_sync(True)
