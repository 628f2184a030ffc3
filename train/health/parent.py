"""The process that started this one: where that is gone, nobody waits for a rank, and nobody ends it.

`Guard` watches from the first line until the rank's heartbeat does (heartbeat.py): loading torch takes seconds, from a
busy file system minutes, and to look for a store that has gone with the agent takes half an hour.
"""

import os
import socket
import threading
from collections.abc import Mapping

import psutil

from muster.errors import RESUME, ExitCode, MusterError
from muster.variables import LaunchVariable

LOOK_S = 1.0
"""Between two looks."""

GONE = "the process that started it, torchrun or the scheduler's, is gone"


class Guard:
    """Ends this process when the one that started it does, until it is closed; only launched ranks are watched.

    Attributes:
        parent: the process that started this one; None where this is no launched rank.
    """

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        self.parent = parent_of_rank(environ)
        self.rank = environ.get("RANK", "0")
        self.closed = threading.Event()
        if self.parent is not None:
            threading.Thread(target=self._watch, args=(self.parent,), name="guard", daemon=True).start()

    def close(self) -> None:
        """From now on another watches."""
        self.closed.set()

    def _watch(self, parent: int) -> None:
        while os.getppid() == parent:
            if self.closed.wait(LOOK_S):
                return
        # At once, and without clearing up: the main thread may hold any lock, and no other rank has heard of this one.
        os.write(2, f"{orphaned(self.rank, socket.gethostname(), parent)}\n".encode(errors="replace"))
        os._exit(ExitCode.FAILED)


def parent_of_rank(environ: Mapping[str, str]) -> int | None:
    """The process that started this rank of a world; None for a process that nobody launched.

    An agent names itself (entrypoint/agent/agent.py): one that was killed before this line was reached is known by it.
    """
    world_size = environ.get("WORLD_SIZE", "")
    if "TORCHELASTIC_RUN_ID" not in environ and not (world_size.isdecimal() and int(world_size) > 1):
        return None
    agent = environ.get(LaunchVariable.LAUNCH, "").rpartition(".")[2]
    return int(agent) if agent.isdecimal() and not psutil.pid_exists(int(agent)) else os.getppid()


def orphaned(rank: int | str, host: str, parent: int) -> MusterError:
    """Of a rank whose launcher, the process `parent`, has gone."""
    return MusterError(
        f"rank {rank} on {host} ends: {GONE}",
        seen=f"its parent was process {parent}, and is {os.getppid()}",
        fix=f"look for what ended it (memory? dmesg, the scheduler's accounting); {RESUME}",
        code=ExitCode.FAILED,
    )
