"""Data: from the source that `--data` names to batches on the training device.

A source is one module, imported when it is asked for: synthetic, fake, digits, cifar10, imagefolder, shards, tokens. It
has `open_source(options, folder) -> Source` (source.py). One that has to search its folder, or to read all of a file,
also has `scan(options, folder)`: rank 0 calls it, and `open_source` gets its result too. Image files are cropped and
decoded by images.py, or on the GPU by nvjpeg.py. reader.py makes batches in the loader's workers, for which shm.py
checks the room in /dev/shm; loader.py brings them to the device.
"""

from importlib import import_module
from types import ModuleType
from typing import Any

import torch.distributed as dist

from muster.config import Options
from muster.names import check_data
from muster.train.data.source import Source
from muster.train.distributed.world import World
from muster.train.health.faults import agree


def open_source(options: Options) -> Source:
    """The images or tokens that `--data` names, found by this rank alone; raises as `open_shared`."""
    return open_shared(options, World())


def open_shared(options: Options, world: World) -> Source:
    """The same on each of the ranks, of which one has searched the folder: a thousand would bring its server down.

    Raises:
        SharedFault: on all ranks, where there is no such source, it is not for this model, or its folder is not what it
            should be.
    """
    module, folder = agree(world, lambda: import_source(options))
    if not hasattr(module, "scan"):
        return agree(world, lambda: module.open_source(options, folder))
    found: list[Any] = [agree(world, lambda: module.scan(options, folder) if world.main else None)]
    if world.backend is not None:
        dist.broadcast_object_list(found, src=0, device=world.device)
    return agree(world, lambda: module.open_source(options, folder, found[0]))


def import_source(options: Options) -> tuple[ModuleType, str]:
    """The module that reads the data of `--data`, and their folder.

    Raises:
        MusterError: there is no such source, it is not for this model, or it needs a folder.
    """
    check_data(options.data, options.model)
    name, _, folder = options.data.partition(":")
    return import_module(f"muster.train.data.{name}"), folder
