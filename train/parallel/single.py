"""One process, one device: what every other strategy is measured against."""

from muster.errors import MusterError
from muster.train.parallel.strategy import Strategy


class Single(Strategy):
    """One process. All that it does is what `Strategy` does by default."""

    def check(self) -> None:
        """Raises MusterError in a world of more than one: each rank would train a model of its own."""
        if self.world.world_size > 1:
            raise MusterError(
                "the strategy single is for one process",
                seen=f"WORLD_SIZE={self.world.world_size}",
                fix="'train ddp' trains one model with all processes; or start one process",
            )
