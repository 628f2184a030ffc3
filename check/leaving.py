"""How a rank of doctor or bench ends: told, at once, and with the code of all ranks."""

import os
import signal

from train import console, faults, logs
from train.world import World


def leave(world: World | None, code: int, *, failed: bool) -> None:
    """Ends this process with `code`, once all that came may do without its store.

    It ends without destructors: those of a group that broke can hang, or abort the process.

    Args:
        world: None before the ranks have met.
        failed: whether some of the others may never come to their end.
    """
    if code:
        logs.leave_word(logs.TOLD)
    # The agent stops the other ranks of a node as soon as one has ended with a code: they are about to, with the same.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    faults.end_soon(code, 4 * faults.GRACE_S)
    if world is not None:
        faults.leave(world, world.store, failed=failed, main=world.main)
    console.flush()
    os._exit(code)
