"""What --model, --data and --name may be, without torch: it takes seconds to load, and a wrong name must not wait."""

import difflib
import os
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path

from muster.errors import MusterError

TRANSFORMERS = ("gpt-tiny", "gpt-small", "gpt-124m", "gpt-1b", "gpt-8b")
"""The models of train/models/gpt.py."""

SOURCES = {
    **dict.fromkeys(("synthetic", "fake", "digits"), False),
    **dict.fromkeys(("cifar10", "imagefolder", "shards", "tokens"), True),
}
"""Each data source (train/data), and whether a folder goes with it."""

OF_TOKENS = ("tokens", "synthetic")


def is_transformer(model: str) -> bool:
    """True for a transformer of train/models/gpt.py, misspelt ones too; False for a classifier of images."""
    return model.lower().startswith("gpt")


def check_transformer(model: str) -> None:
    """Raises MusterError where there is no transformer called `model`."""
    if model not in TRANSFORMERS:
        near = difflib.get_close_matches(model.lower(), TRANSFORMERS, n=1, cutoff=0.3) or list(TRANSFORMERS)
        raise MusterError(
            f"there is no transformer called {model}",
            seen=f"--model={model}",
            fix=f"--model={near[0]}; there are: {', '.join(TRANSFORMERS)}",
        )


def check_classifier(model: str, known: Iterable[str]) -> None:
    """Raises MusterError where `model` is not among the `known` classifiers of images."""
    if model not in (names := list(known)):
        near = difflib.get_close_matches(model.lower(), names, n=3, cutoff=0.5)
        raise MusterError(
            f"there is no classification model called {model}",
            seen=f"--model={model}",
            fix=f"--model={' or '.join(near or ['resnet18', 'resnet50', 'vit_b_16'])}",
        )


def check_data(data: str, model: str) -> None:
    """Raises MusterError where `data` names no data source, not one for `model`, or lacks its folder."""
    name, _, folder = data.partition(":")
    if name not in SOURCES:
        near = difflib.get_close_matches(name, SOURCES, n=1) or list(SOURCES)
        raise MusterError(
            f"there is no data source called {name}",
            seen=f"--data={data}",
            fix=f"--data={' or '.join(near)}; there are: {', '.join(SOURCES)}",
        )
    if SOURCES[name] != bool(folder):
        wrong = f"the data source {name} needs a folder" if SOURCES[name] else f"the data source {name} has no folder"
        fix = f"--data={name}:FOLDER" if SOURCES[name] else f"--data={name}"
        raise MusterError(wrong, seen=f"--data={data}", fix=fix)
    if is_transformer(model) and name not in OF_TOKENS:
        fix = "--data=tokens:PATH of a text, of a folder with texts, or of a file of tokens; --data=synthetic"
        raise MusterError(f"{model} reads tokens, no images", seen=f"--data={data}", fix=fix)
    if name == "tokens" and not is_transformer(model):
        fix = "--model=gpt-tiny, or another gpt-..."
        raise MusterError(f"{model} reads images, no tokens", seen=f"--data={data}", fix=fix)


def check_run(name: str | None) -> None:
    """Raises MusterError where `name` is no name of a folder."""
    if name is not None and (name in ("", ".", "..") or "/" in name):
        raise MusterError("a run's name is one folder name", seen=f"--name={name}", fix="--name=NAME --runs-dir=FOLDER")


def check_here(model: str, data: str) -> None:
    """Raises MusterError where torchvision has no such model, or the data are not on this host."""
    known = classifiers()
    if known and not is_transformer(model):
        check_classifier(model, known)
    name, _, folder = data.partition(":")
    path = os.path.expanduser(folder)
    if folder and not os.path.exists(path):
        raise MusterError(
            "the data do not exist, or can't be looked at",
            seen=f"--data={data} ({path})",
            fix=f"--data={name}:PATH that exists; in a container, see that PATH is bound into it",
        )


def classifiers() -> list[str]:
    """The classifiers in torchvision's source files, which are read here, not run; empty where there are none.

    Source: https://docs.pytorch.org/vision/stable/models.html (its models are registered by `@register_model()`)
    """
    spec = find_spec("torchvision")
    folders = list((spec and spec.submodule_search_locations) or ())
    try:
        texts = [path.read_text(encoding="utf-8") for folder in folders for path in Path(folder, "models").glob("*.py")]
    except (OSError, UnicodeDecodeError):
        return []  # the ranks see it when they load torchvision
    registered = [part for text in texts for part in text.split("\n@register_model()\n")[1:]]
    return sorted(part.partition("def ")[2].partition("(")[0] for part in registered)
