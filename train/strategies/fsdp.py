"""Fully sharded data parallel: each rank keeps a part of every weight and moment, and gathers what it needs."""

from contextlib import AbstractContextManager

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from train.models import place, units_of
from train.options import Options
from train.parallel import shards
from train.parallel.gradients import Gradients
from train.precision import Precision
from train.world import World, open_mesh


def check(world: World, options: Options) -> None:
    """Raises MusterError where these ranks can't do what `options` ask for."""
    shards.check(world, options)


def wrap(model: nn.Module, world: World, options: Options, precision: Precision) -> nn.Module:
    """`model`, cut over the ranks layer by layer."""
    mesh = open_mesh(world, replicate=options.replicate, shard=world.world_size // options.replicate)
    model = shards.prepare(model, world, options)
    cut(model, mesh if options.replicate > 1 else mesh["shard"], world, options, precision)
    # Now that each rank has its part alone to hold, the shapes get memory and weights.
    return place(model, shards.home_of(world, options), torch.preserve_format, options.seed)


def cut(model: nn.Module, mesh: DeviceMesh, world: World, options: Options, precision: Precision) -> None:
    """Cuts `model` over the ranks of `mesh`; of two dimensions, the first replicates."""
    settings = shards.settings(model, world, options, precision)
    for unit in [*units_of(model), model]:
        fully_shard(unit, mesh=mesh, **settings)


def gradients(model: nn.Module, world: World, options: Options) -> Gradients:
    """Averaged by what cuts, while they are computed."""
    return shards.gradients(model, world, options)


def without_sync(model: nn.Module) -> AbstractContextManager[object]:
    """Gradients stay on this rank until the first micro-batch outside of this context."""
    assert isinstance(model, FSDPModule)
    return shards.no_sync(model)
