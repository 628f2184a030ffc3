"""One process, one device. The other strategies take from here what they leave out."""

from contextlib import AbstractContextManager, nullcontext

from torch import nn
from torch.optim import Optimizer

from muster.config import Options
from muster.errors import MusterError
from muster.train.gradients import ExactGradients, Gradients, are_exact
from muster.train.models import place
from muster.train.precision import Precision
from muster.train.world import World


def check(world: World, options: Options) -> None:
    """Raises MusterError in a world of more than one: each rank would train a model of its own."""
    if world.world_size > 1:
        raise MusterError(
            "the strategy single is for one process",
            seen=f"WORLD_SIZE={world.world_size}",
            fix="'train ddp' trains one model with all processes; or start one process",
        )


def share(world: World, options: Options) -> World:
    """A share of the data for each rank."""
    return world


def notes(world: World, options: Options) -> list[str]:
    """Nothing that a user should know before it trains."""
    return []


def wrap(model: nn.Module, world: World, options: Options, precision: Precision) -> nn.Module:
    """`model` on this process's device."""
    return place(model, world.device, precision.layout, options.seed)


def divide(optimizer: Optimizer, world: World, options: Options) -> Optimizer:
    """`optimizer` as it is: each rank steps all that it holds."""
    return optimizer


def gradients(model: nn.Module, world: World, options: Options) -> Gradients:
    """Added up here."""
    return ExactGradients(model, options.accumulate) if are_exact(world, options) else Gradients(options.accumulate)


def unwrap(model: nn.Module) -> nn.Module:
    """`model` as it is."""
    return model


def without_sync(model: nn.Module) -> AbstractContextManager[object]:
    """Nothing to hold back."""
    return nullcontext()
