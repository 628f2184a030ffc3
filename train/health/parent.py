"""A watch on the process that started this rank: when it is gone, nobody waits for the rank, and nobody ends it.

`Guard` watches from the first line on: loading torch takes seconds, from a busy file system minutes, and connecting to
a store that is gone with the agent takes half an hour.
"""

import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress

import psutil

from muster import interruption
from muster.errors import ExitCode, MusterError
from muster.variables import LaunchVariable

POLL_S = 1.0
"""Seconds between two checks."""

GONE = "the process that started it, torchrun or the scheduler's, is gone"


class Guard:
    """Ends this process when the one that started it does; only launched ranks are watched.

    Attributes:
        on_orphaned: reports the error, to other ranks too, and ends this process; None until it has met them.
    """

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        self.on_orphaned: Callable[[MusterError], None] | None = None
        if (parent := parent_of_rank(environ)) is not None:
            rank = environ.get("RANK", "0")
            threading.Thread(target=self._watch, args=(parent, rank), name="guard", daemon=True).start()

    def _watch(self, parent: int, rank: str) -> None:
        while os.getppid() == parent:
            time.sleep(POLL_S)
        error = MusterError(
            f"rank {rank} on {socket.gethostname()} ends: {GONE}",
            seen=f"its parent was process {parent}, and is {os.getppid()}",
            fix=f"look for what ended it (memory? dmesg, the scheduler's accounting); {interruption.current.advice}",
            code=ExitCode.FAILED,
        )
        if self.on_orphaned is not None:
            self.on_orphaned(error)
            return
        # At once, and without clearing up: the main thread may hold any lock, and no other rank has heard of this one.
        with suppress(OSError):  # the reader of standard error may be gone, too
            os.write(2, f"{error}\n".encode(errors="replace"))
        os._exit(ExitCode.FAILED)


def parent_of_rank(environ: Mapping[str, str]) -> int | None:
    """The id of the process that started this rank; None for a process that nobody launched as a rank.

    An agent passes its own id (entrypoint/agent/agent.py), which shows if it was killed before this line was reached.
    """
    world_size = environ.get("WORLD_SIZE", "")
    if "TORCHELASTIC_RUN_ID" not in environ and not (world_size.isdecimal() and int(world_size) > 1):
        return None
    agent = environ.get(LaunchVariable.LAUNCH, "").rpartition(".")[2]
    return int(agent) if agent.isdecimal() and not psutil.pid_exists(int(agent)) else os.getppid()
