"""The sources of images: one module each, with a function `open_source(options, folder) -> Source`."""

import difflib
from importlib import import_module

from train.data.images import Source
from train.errors import MusterError
from train.options import Options

SOURCES = {"synthetic": False, "fake": False, "digits": False, "cifar10": True, "imagefolder": True}
"""Each source, and whether a folder goes with it."""


def open_source(options: Options) -> Source:
    """The images that `--data` names.

    Raises:
        MusterError: there is no such source, or its folder is not what it should be.
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
    return import_module(f"train.data.{name}").open_source(options, folder)
