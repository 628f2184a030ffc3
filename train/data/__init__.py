"""The sources of images and of tokens: one module each, with a function `open_source(options, folder) -> Source`."""

import difflib
from importlib import import_module

from train.data.images import Source
from train.errors import MusterError
from train.options import Options

SOURCES = {"synthetic": False, "fake": False, "digits": False, "cifar10": True, "imagefolder": True, "tokens": True}
"""Each source, and whether a folder goes with it."""

OF_TOKENS = ("tokens", "synthetic")


def open_source(options: Options) -> Source:
    """The images or tokens that `--data` names.

    Raises:
        MusterError: there is no such source, it is not for this model, or its folder is not what it should be.
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
    return import_module(f"train.data.{name}").open_source(options, folder)
