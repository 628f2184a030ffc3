"""Data: from the source that `--data` names to batches on the training device.

A source is one module, imported when it is asked for: synthetic, fake, digits, cifar10, imagefolder, shards, tokens. It
has `open_source(options, folder) -> Source` (source.py). One that has to search its folder also has
`scan(options, folder)`: rank 0 calls it, and `open_source` gets its result too. Image files are cropped and
decoded by images.py, or on the GPU by nvjpeg.py. reader.py makes batches in the loader's workers, for which shm.py
checks the room in /dev/shm; loader.py brings them to the device.
"""

import difflib
from importlib import import_module
from types import ModuleType
from typing import Any

import torch.distributed as dist

from muster.config import Options
from muster.errors import MusterError
from muster.train.data.source import Source
from muster.train.faults import agree
from muster.train.world import World

SOURCES = {
    **dict.fromkeys(("synthetic", "fake", "digits"), False),
    **dict.fromkeys(("cifar10", "imagefolder", "shards", "tokens"), True),
}
"""Each source, and whether a folder goes with it."""

OF_TOKENS = ("tokens", "synthetic")


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
    name, _, folder = options.data.partition(":")
    if name not in SOURCES:
        near = difflib.get_close_matches(name, SOURCES, n=1) or list(SOURCES)
        raise MusterError(
            f"there is no data source called {name}",
            seen=f"--data={options.data}",
            fix=f"--data={' or '.join(near)}; there are: {', '.join(SOURCES)}",
        )
    if SOURCES[name] != bool(folder):
        wrong = f"the data source {name} needs a folder" if SOURCES[name] else f"the data source {name} has no folder"
        fix = f"--data={name}:FOLDER" if SOURCES[name] else f"--data={name}"
        raise MusterError(wrong, seen=f"--data={options.data}", fix=fix)
    if options.predicts_tokens and name not in OF_TOKENS:
        fix = "--data=tokens:PATH of a text, of a folder with texts, or of a file of tokens; --data=synthetic"
        raise MusterError(f"{options.model} reads tokens, no images", seen=f"--data={options.data}", fix=fix)
    if name == "tokens" and not options.predicts_tokens:
        fix = "--model=gpt-tiny, or another gpt-..."
        raise MusterError(f"{options.model} reads images, no tokens", seen=f"--data={options.data}", fix=fix)
    return import_module(f"muster.train.data.{name}"), folder
