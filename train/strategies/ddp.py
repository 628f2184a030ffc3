"""Distributed data parallel: a replica on each rank, gradients averaged while they are computed."""

from contextlib import AbstractContextManager

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from train.models import place
from train.options import Options
from train.parallel import replicas
from train.parallel.gradients import Gradients
from train.precision import Precision
from train.world import World


def check(world: World, options: Options) -> None:
    """Raises MusterError where these ranks can't do what `options` ask for."""
    replicas.check(world, options)


def notes(world: World, options: Options) -> list[str]:
    """What has no effect on a rank alone."""
    return replicas.notes(world, options)


def wrap(model: nn.Module, world: World, options: Options, precision: Precision) -> nn.Module:
    """`model`, whole on each rank, with what averages gradients around it."""
    model = place(replicas.prepare(model, options), world.device, precision.layout, options.seed)
    return DistributedDataParallel(model, **replicas.settings(world, options))


def divide(optimizer: Optimizer, world: World, options: Options) -> Optimizer:
    """`optimizer`; with `--zero1`, on each rank for some of the weights."""
    return replicas.divide(optimizer, world, options)


def gradients(model: nn.Module, world: World, options: Options) -> Gradients:
    """Averaged by the reducer, or by a hook in its place."""
    assert isinstance(model, DistributedDataParallel)
    return replicas.gradients(model, world, options)


def unwrap(model: nn.Module) -> nn.Module:
    """The module inside."""
    return model.get_submodule("module")


def without_sync(model: nn.Module) -> AbstractContextManager[object]:
    """Gradients stay on this rank until the first micro-batch outside of this context."""
    assert isinstance(model, DistributedDataParallel)
    return model.no_sync()
