"""What `train` and `muster` begin with: Ctrl-C has its answer before anything else is loaded."""

# ruff: noqa: E402

# A Ctrl-C waits for the milliseconds until there is an answer to it: Python's own is a traceback. The module without an
# underscore would load others first.
import _signal  # pyright: ignore

_signal.pthread_sigmask(_signal.SIG_BLOCK, [_signal.SIGINT])  # pyright: ignore

import os
import sys

from muster import interruption

if sys.stdout:  # letters that the terminal's encoding lacks are written as escapes
    sys.stdout.reconfigure(errors="backslashreplace")  # pyright: ignore
interruption.start(" ".join([os.path.basename(sys.argv[0]), *sys.argv[1:2]]))


def train() -> None:
    """The command `train`."""
    from muster.entrypoint import cli

    cli.train()


def muster() -> None:
    """The command `muster`."""
    from muster.entrypoint import cli

    cli.muster()
