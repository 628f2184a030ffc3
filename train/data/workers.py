"""The processes that load data for a rank: how many, where the user does not say, and how each begins."""

import hashlib
import os
import sys
import time
from types import TracebackType

import torch

from train.data.encoded import Encoded
from train.data.fake import Fake
from train.data.images import Source
from train.notice import deafen
from train.world import World

MOST = 16

ORPHANED_S = 2.0
"""For so long a connection that broke may mean that the rank is about to be gone."""


def cores_of(world: World) -> int:
    """The cores that this rank may use, less those of ranks bound to the same ones; to be called on all ranks.

    Some launchers bind each rank to cores of its own, others all ranks of a host to the same.
    """
    own = sorted(os.sched_getaffinity(0))
    place = [world.host, hashlib.blake2b(repr(own).encode(), digest_size=8).hexdigest()]
    return max(1, len(own) // world.gather(place).count(place))


def automatic(source: Source, device: torch.device, cores: int) -> int:
    """The number of workers: none where reading is next to nothing, or where they would take the trainer's cores."""
    if device.type == "cpu" or not isinstance(source.train, Encoded | Fake):
        return 0
    return min(MOST, max(1, cores - 1))


def begin(worker: int) -> None:
    """Begins a worker: it is not told of warnings, and says nothing of a rank that ended while they spoke."""
    deafen()
    rank, told = os.getppid(), sys.excepthook

    def tell(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        # The kernel closes what a process has open before it gives its children another parent.
        end = time.monotonic() + ORPHANED_S
        while isinstance(error, OSError | EOFError) and time.monotonic() < end:
            if os.getppid() != rank:
                return
            time.sleep(0.01)
        told(kind, error, trace)

    sys.excepthook = tell
