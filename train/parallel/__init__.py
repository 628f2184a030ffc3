"""How a model is spread over ranks: one file a strategy, and in it one subclass of `Strategy` (strategy.py).

To add one: a file here, and a line in `muster.config.STRATEGIES` with its name and what its help says. `train NAME`,
`train selftest` and the tests of parity find it there.
"""

from importlib import import_module

from muster.config import IN_ONE_PROCESS, Options
from muster.train.distributed.world import World
from muster.train.parallel.strategy import Strategy


class Alone(Strategy):
    """A strategy for several processes, where there is one: it trains as a single process does."""

    def __init__(self, meant: Strategy) -> None:
        super().__init__(meant.world, meant.options)
        self.meant = meant

    def check(self) -> None:
        self.meant.check()

    def notes(self) -> list[str]:
        return self.meant.notes()


def load(name: str, world: World, options: Options) -> Strategy:
    """The strategy called `name`, for this rank; where it is for several and there is one alone, as `single`."""
    module = import_module(f"{__name__}.{name}")
    (kind,) = (
        found
        for found in vars(module).values()
        if isinstance(found, type) and issubclass(found, Strategy) and found.__module__ == module.__name__
    )
    strategy = kind(world, options)
    is_alone = world.world_size == 1 and world.backend is None
    return Alone(strategy) if is_alone and name not in IN_ONE_PROCESS else strategy
