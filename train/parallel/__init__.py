"""The strategies, which spread a model over ranks: a file for each, with one subclass of `Strategy` (strategy.py).

To add one: a file here, and a line in `muster.config.STRATEGIES` with its name and what its help says. `train NAME`,
`train selftest` and the tests of parity find it there.
"""

from muster.train.parallel.strategy import Strategy as Strategy, load as load
