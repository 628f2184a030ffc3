"""How a model is spread over ranks: one module a strategy.

A strategy is a module with some of the functions of `Strategy`: what it leaves out is done as by `single`. A new one is
a file here, its name in `muster.config.STRATEGIES`, and lines for it there and in `muster.entrypoint.cli.HELP`.
"""

from contextlib import AbstractContextManager
from importlib import import_module
from types import SimpleNamespace
from typing import Protocol, cast

from torch import nn
from torch.optim import Optimizer

from muster.config import IN_ONE_PROCESS, Options
from muster.train.gradients import Gradients
from muster.train.precision import Precision
from muster.train.world import World


class Strategy(Protocol):
    """What the loop asks of a strategy."""

    def check(self, world: World, options: Options) -> None:
        """Raises MusterError where `world` is not one that this strategy can train in."""
        ...

    def share(self, world: World, options: Options) -> World:
        """`world`, with the share of the data that this rank trains on."""
        ...

    def notes(self, world: World, options: Options) -> list[str]:
        """What a user should know before it trains."""
        ...

    def wrap(self, model: nn.Module, world: World, options: Options, precision: Precision) -> nn.Module:
        """`model` with its first weights on its devices, such that gradients are those of the whole global batch."""
        ...

    def divide(self, optimizer: Optimizer, world: World, options: Options) -> Optimizer:
        """`optimizer`, before its first step, with what this rank is to do of it."""
        ...

    def gradients(self, model: nn.Module, world: World, options: Options) -> Gradients:
        """How micro-batches are computed, and their gradients become those of a step."""
        ...

    def unwrap(self, model: nn.Module) -> nn.Module:
        """The module that `wrap` was given."""
        ...

    def without_sync(self, model: nn.Module) -> AbstractContextManager[object]:
        """A context for micro-batches whose gradients only add up on this rank."""
        ...


def load(name: str, world: World) -> Strategy:
    """The strategy called `name`; where it is for several processes and there is one alone, that trains as `single`."""
    own, single = (vars(import_module(f"muster.train.strategies.{module}")) for module in (name, "single"))
    is_alone = world.world_size == 1 and world.backend is None
    if is_alone and name not in IN_ONE_PROCESS:
        own = {function: own[function] for function in ("check", "notes") if function in own}
    asked = [function for function in vars(Strategy) if not function.startswith("_")]
    found = {function: own.get(function, single[function]) for function in asked}
    return cast(Strategy, SimpleNamespace(**found | {"check": own.get("check", check_nothing)}))


def check_nothing(world: World, options: Options) -> None:
    """Any world will do."""
