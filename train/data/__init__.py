"""The sources of images and of tokens: one module each, with a function `open_source(options, folder) -> Source`.

A module that has to search its folder has a function `scan(options, folder)` besides: one rank calls it, and all ranks'
`open_source` gets what came of it.
"""

import difflib
from dataclasses import replace
from importlib import import_module
from types import ModuleType

from train.data.images import Source
from train.data.sharing import from_main
from train.data.stage import stage_data
from train.errors import MusterError
from train.faults import agree
from train.options import Options
from train.world import World

SOURCES = {
    **dict.fromkeys(("synthetic", "fake", "digits"), False),
    **dict.fromkeys(("cifar10", "imagefolder", "shards", "tokens"), True),
}
"""Each source, and whether a folder goes with it."""

OF_TOKENS = ("tokens", "synthetic")


def open_source(options: Options) -> Source:
    """The images or tokens that `--data` names, found by this rank alone.

    Raises:
        MusterError: there is no such source, it is not for this model, or its folder is not what it should be.
    """
    module, folder = module_of(options)
    return module.open_source(options, folder)


def open_shared(options: Options, world: World) -> Source:
    """The same on each of the ranks, of which one has searched the folder; of `--stage-to`'s copy, where there is one.

    Raises:
        SharedFault: on all ranks, as `open_source`.
    """
    agree(world, lambda: module_of(options))
    options, notes = stage_data(options, world)
    module, folder = module_of(options)
    if hasattr(module, "scan"):
        found = from_main(world, lambda: module.scan(options, folder))
        source: Source = agree(world, lambda: module.open_source(options, folder, found))
    else:
        source = agree(world, lambda: module.open_source(options, folder))
    return replace(source, notes=(*notes, *source.notes))


def module_of(options: Options) -> tuple[ModuleType, str]:
    """The module that knows the data of `--data`, and their folder.

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
    return import_module(f"train.data.{name}"), folder
