"""Distributed data parallel: a replica on each rank, gradients averaged while they are computed."""

import inspect
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from train.gradients import Gradients, ReducedGradients, are_exact
from train.models import place
from train.options import Options
from train.precision import Precision
from train.strategies import single
from train.world import World


def check(world: World, options: Options) -> None:
    """Any world will do."""


def share(world: World, options: Options) -> World:
    """A share of the data for each rank."""
    return world


def notes(world: World, options: Options) -> list[str]:
    """Nothing that a user should know before it trains."""
    return []


def wrap(model: nn.Module, world: World, options: Options, precision: Precision) -> nn.Module:
    """`model` with a reducer of gradients around it; without, in a world of one."""
    model = place(model, world.device, precision.layout, options.seed)
    if world.backend is None:
        return model
    # The loop averages batch normalisation's buffers before they are used, so no step needs to send them.
    # torch 2.15 has a new name for the switch and deprecates the old one.
    known = inspect.signature(DistributedDataParallel).parameters
    switch: Any = {"forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers": False}
    devices = [world.device] if world.device.type == "cuda" else None
    return DistributedDataParallel(model, device_ids=devices, gradient_as_bucket_view=True, **switch)


def gradients(model: nn.Module, world: World, options: Options) -> Gradients:
    """Averaged by the reducer, or by what takes its place where sums are exact."""
    if not isinstance(model, DistributedDataParallel):
        return single.gradients(model, world, options)
    if not are_exact(world, options.accumulate):
        return Gradients(options.accumulate)
    exact = ReducedGradients(model, world.world_size * options.accumulate)
    model.register_comm_hook(exact, ReducedGradients.reduce)
    return exact


def unwrap(model: nn.Module) -> nn.Module:
    """The module inside."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def without_sync(model: nn.Module) -> AbstractContextManager[object]:
    """Gradients stay on this rank until the first micro-batch outside of this context."""
    return model.no_sync() if isinstance(model, DistributedDataParallel) else nullcontext()
