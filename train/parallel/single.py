"""One process on one device: the reference for every other strategy."""

from muster.train.parallel.strategy import Strategy


class Single(Strategy):
    """One process, with the defaults of `Strategy`."""
