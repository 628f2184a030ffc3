"""One process, one device: what every other strategy is measured against."""

from muster.train.parallel.strategy import Strategy


class Single(Strategy):
    """One process. All that it does is what `Strategy` does by default."""
