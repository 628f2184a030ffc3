"""Room in /dev/shm, through which the data loader's workers hand over their batches.

A worker that finds none loses its batch, and the trainer waits for that for ever (torch 2.10 and 2.15).
"""

import math
import os
import resource
import sys
from pathlib import Path

FOLDER = Path("/dev/shm")
AHEAD = 2
"""Batches that each worker makes before they are asked for: DataLoader's own default."""

IN_USE = 2
"""Batches that the trainer holds: one that it trains on, and the next, which it has already taken over."""

MARGIN = 1.1
"""A tenth more, for what else goes there: semaphores, and what NCCL and MPI pass between the ranks of a host."""


def needed(num_workers: int, batch_bytes: int, ranks: int) -> int:
    """Bytes for `num_workers` workers of each of `ranks` ranks on a host: all batches that are there at once."""
    return math.ceil((num_workers * AHEAD + IN_USE) * batch_bytes * ranks * MARGIN)


def workers_for(free: int, batch_bytes: int, ranks: int) -> int:
    """How many workers each of `ranks` ranks on a host can have, where `free` bytes are there."""
    batches = int(free / (batch_bytes * ranks * MARGIN))
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
