"""How a model is spread over ranks: one module a strategy.

A strategy is a module with the functions of `Strategy`. A new one is a file here, and its name in
`train.options.STRATEGIES`.
"""

from contextlib import AbstractContextManager
from importlib import import_module
from typing import Protocol, cast

from torch import nn

from train.gradients import Gradients
from train.options import Options
from train.precision import Precision
from train.world import World


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

    def gradients(self, model: nn.Module, world: World, options: Options) -> Gradients:
        """How micro-batches are computed, and their gradients become those of a step."""
        ...

    def unwrap(self, model: nn.Module) -> nn.Module:
        """The module that `wrap` was given."""
        ...

    def without_sync(self, model: nn.Module) -> AbstractContextManager[object]:
        """A context for micro-batches whose gradients only add up on this rank."""
        ...


def load(name: str) -> Strategy:
    """The strategy called `name`."""
    return cast(Strategy, import_module(f"train.strategies.{name}"))
