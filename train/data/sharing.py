"""What one rank has found out about the data, told to all: a thousand that search a folder bring its server down."""

import io
from collections.abc import Callable, Mapping

import numpy as np
import torch
import torch.distributed as dist

from train.faults import agree
from train.world import World

Arrays = dict[str, np.ndarray]


def packed(arrays: Mapping[str, np.ndarray]) -> bytes:
    """`arrays` as the content of an .npz file, without pickles."""
    file = io.BytesIO()
    np.savez(file, **arrays)  # type: ignore[arg-type]
    return file.getvalue()


def unpacked(content: bytes) -> Arrays:
    """The arrays in the .npz file `content`; each is checked against its checksum.

    Raises:
        ValueError, OSError, zipfile.BadZipFile: it is damaged.
    """
    with np.load(io.BytesIO(content), allow_pickle=False) as file:
        return {name: file[name] for name in file.files}


def from_main(world: World, find: Callable[[], Arrays]) -> Arrays:
    """What `find` returns on rank 0, on all ranks; they pass it on to each other, and it is called once.

    Raises:
        SharedFault: on all ranks, where `find` raises a MusterError.
    """
    own = agree(world, lambda: find() if world.main else {})
    if world.backend is None:
        return own
    content = torch.frombuffer(bytearray(packed(own) if world.main else b"\0"), dtype=torch.uint8).to(world.device)
    length = torch.tensor([len(content)], device=world.device)
    dist.broadcast(length, 0)
    if not world.main:
        content = torch.empty(int(length), dtype=torch.uint8, device=world.device)
    dist.broadcast(content, 0)
    return own if world.main else unpacked(content.cpu().numpy().tobytes())
