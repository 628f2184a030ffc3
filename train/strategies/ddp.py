"""Distributed data parallel: a replica on each rank, gradients averaged while they are computed."""

import inspect
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from train.gradients import ExactGradients
from train.options import Options
from train.world import World


def check(world: World, options: Options) -> None:
    """Any world will do."""


def wrap(model: nn.Module, world: World) -> nn.Module:
    """`model` with a reducer of gradients around it; as it is in a world of one."""
    if world.backend is None:
        return model
    # The loop averages batch normalisation's buffers before they are used, so no step needs to send them.
    # torch 2.15 has a new name for the switch and deprecates the old one.
    known = inspect.signature(DistributedDataParallel).parameters
    switch: Any = {"forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers": False}
    devices = [world.device] if world.device.type == "cuda" else None
    return DistributedDataParallel(model, device_ids=devices, gradient_as_bucket_view=True, **switch)


def add_exactly(model: nn.Module, gradients: ExactGradients) -> bool:
    """Puts `gradients` in the reducer's place; False for a model in a world of one."""
    if not isinstance(model, DistributedDataParallel):
        return False
    model.register_comm_hook(gradients, ExactGradients.reduce)
    return True


def unwrap(model: nn.Module) -> nn.Module:
    """The module inside."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def without_sync(model: nn.Module) -> AbstractContextManager[object]:
    """Gradients stay on this rank until the first micro-batch outside of this context."""
    return model.no_sync() if isinstance(model, DistributedDataParallel) else nullcontext()
