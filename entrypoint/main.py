"""The entry points of `train` and `muster`, which handle Ctrl-C before anything else is loaded."""

# ruff: noqa: E402

# Ctrl-C is blocked for the milliseconds until it has a handler: Python's own prints a traceback. The module `signal`,
# without an underscore, would load others first.
import _signal  # pyright: ignore

_signal.pthread_sigmask(_signal.SIG_BLOCK, [_signal.SIGINT])  # pyright: ignore

import os
import sys

from muster import interruption

for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
    if getattr(sys, name) is None:  # closed, as by `train ddp >&-`: no file that is opened later may take its number
        os.set_inheritable(number := os.open(os.devnull, os.O_RDWR), True)
        setattr(sys, name, os.fdopen(number, mode))
interruption.start(" ".join([os.path.basename(sys.argv[0]), *sys.argv[1:2]]))


def train() -> None:
    """The command `train`."""
    from muster.entrypoint import cli

    cli.train()


def muster() -> None:
    """The command `muster`."""
    from muster.entrypoint import cli

    cli.muster()
