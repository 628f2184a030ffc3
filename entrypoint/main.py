"""What `train` and `muster` begin with: Ctrl-C has its answer before anything else is loaded."""

import os
import sys

from muster import interruption

interruption.start(" ".join([os.path.basename(sys.argv[0]), *sys.argv[1:2]]))


def train() -> None:
    """The command `train`."""
    from muster.entrypoint import cli

    try:
        cli.train()
    finally:
        interruption.finish()


def muster() -> None:
    """The command `muster`."""
    from muster.entrypoint import cli

    try:
        cli.muster()
    finally:
        interruption.finish()
