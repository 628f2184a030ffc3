"""Whether /dev/shm, through which the data loader's workers hand over their batches, has room for them."""

import math
import os
import resource
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from muster.errors import MusterError

FOLDER = Path("/dev/shm")
AHEAD = 2
"""Batches that each worker makes before they are asked for: DataLoader's own default."""

IN_USE = 2
"""Batches that the trainer holds: one that it trains on, and the next, which it has already taken over."""

MARGIN = 1.1
"""A tenth more, for what else goes there: semaphores, and what NCCL and MPI pass between the ranks of a host."""

MIB, GIB = 2**20, 2**30


@dataclass(frozen=True, kw_only=True)
class Need:
    """What the workers of one rank put into /dev/shm.

    Attributes:
        option: the option that gives their number.
        batch_bytes: of one batch.
        num_batches: batches of an epoch.
    """

    option: str
    num_workers: int
    batch_bytes: int
    num_batches: int

    def batches(self) -> int:
        """Batches that are there at once, at most."""
        return min(self.num_batches, self.num_workers * AHEAD + IN_USE)

    def needed(self, ranks: int) -> int:
        """Bytes for `ranks` such ranks."""
        return math.ceil(self.batches() * self.batch_bytes * ranks * MARGIN)

    def workers_for(self, free: int, ranks: int) -> int:
        """How many workers fit into `free` bytes."""
        batches = int(free / (self.batch_bytes * ranks * MARGIN))
        return max(0, (batches - IN_USE) // AHEAD)


def bytes_of(*sizes: int) -> int:
    """What tensors of `sizes` bytes take there, a file each: whole pages."""
    page = resource.getpagesize()
    return sum(-(-size // page) * page for size in sizes)


def room() -> int:
    """Bytes that are free; none where nothing may be written."""
    if not os.access(FOLDER, os.W_OK | os.X_OK):
        return 0
    state = os.statvfs(FOLDER)
    # A tmpfs without a limit has no size.
    return state.f_bavail * state.f_frsize if state.f_blocks else sys.maxsize


def check(needs: Sequence[Need], ranks: int) -> None:
    """Returns where the workers of all `ranks` on this host have room.

    Training and validation take turns, so the greater need counts. To be called before the first worker starts: one
    that finds no room loses its batch, and the trainer waits for that for ever (torch 2.10 and 2.15).

    Raises:
        MusterError: there is no /dev/shm, or it is too small.
    """
    free, needed = room(), max((need.needed(ranks) for need in needs), default=0)
    if needed <= free:
        return
    fewer = " ".join(f"{need.option}={need.workers_for(free, ranks)}" for need in needs if need.needed(ranks) > free)
    raise MusterError(
        f"{FOLDER} is too small for the data loader's workers, or this user may not write there",
        seen=f"{free / MIB:.1f} MiB free, {needed / MIB:.1f} MiB needed by the workers of {ranks} ranks on this host",
        # A GiB more than fits, for what is there already.
        fix=f"docker run --shm-size={math.ceil(needed / GIB) + 1}g, or docker run --ipc=host, or {fewer}",
    )
