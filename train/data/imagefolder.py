"""A folder of image files, one subfolder a class."""

import os
import stat
from pathlib import Path
from typing import NamedTuple

import numpy as np
from torchvision.datasets.folder import IMG_EXTENSIONS, has_file_allowed_extension

from train.data.encoded import Encoded, Names, joined
from train.data.images import Images, Source, split
from train.data.sharing import Arrays
from train.errors import MusterError
from train.options import Options

VALID_SHARE = 0.1
LAYOUT = "FOLDER/CLASS/IMAGE.jpg, or FOLDER/train/CLASS/IMAGE.jpg and FOLDER/val/CLASS/IMAGE.jpg"


class Files(Encoded):
    """Image files with their classes.

    Args:
        paths: below `folder`.
        chosen_N: which of them are meant.
        labels_N: the class of each that is meant.
    """

    def __init__(
        self, folder: Path, paths: Names, chosen_N: np.ndarray, labels_N: np.ndarray, size: int, *, random: bool
    ) -> None:
        super().__init__(labels_N, size, random=random)
        self.folder = os.fsencode(folder)
        self.paths = paths
        self.chosen = chosen_N

    def path(self, index: int) -> bytes:
        """Where the file is."""
        return os.path.join(self.folder, self.paths[int(self.chosen[index])])

    def name(self, index: int) -> str:
        return os.fsdecode(self.path(index))

    def content(self, index: int) -> bytes:
        with open(self.path(index), "rb", buffering=0) as file:
            return file.read()


def halves_of(root: Path, seen: str, layout: str) -> list[Path]:
    """The folders with the training and the validation data; `root` alone, where it has no such folders.

    Raises:
        MusterError: it has one of the two.
    """
    halves = [root / "train", root / ("valid" if os.path.isdir(root / "valid") else "val")]
    present = [half for half in halves if os.path.isdir(half)]  # Path.is_dir raises where this user may not look
    if len(present) == 1:
        missing = next(half for half in halves if not os.path.isdir(half))
        raise MusterError(f"the data folder has {present[0].name}/ but no {missing.name}/", seen=seen, fix=layout)
    return present or [root]


def check_there(folder: Path, options: Options, layout: str) -> None:
    """Returns where `folder` is a folder.

    Raises:
        MusterError: it is not.
    """
    try:
        state = os.stat(folder)
    except FileNotFoundError:
        state = None
    except OSError as error:
        fix = "see that this user may read the folder, on every node"
        raise MusterError(f"the data folder can't be read: {error.strerror}", seen=str(folder), fix=fix) from error
    if state is None or not stat.S_ISDIR(state.st_mode):
        wrong = "the data folder does not exist" if state is None else "the data folder is a file"
        source = options.data.partition(":")[0]
        fix = f"--data={source}:FOLDER with {layout}; in a container, see that FOLDER is bound into it"
        raise MusterError(wrong, seen=f"--data={options.data} ({folder})", fix=fix)


class Found(NamedTuple):
    """The images below a folder, as torchvision's ImageFolder has them.

    Attributes:
        samples: path and class of each, by class, then by folder and name.
    """

    classes: list[str]
    samples: list[tuple[str, int]]


def identity(folder: str | Path) -> tuple[int, int]:
    """What tells a folder from all others, by whatever links one comes to it."""
    state = os.stat(folder)
    return state.st_dev, state.st_ino


def images_below(folder: Path) -> list[str]:
    """The paths of the images in a class's folder, and below it, by folder and name; links are followed.

    Raises:
        MusterError: a link leads back to a folder above it: its images would be found again without end.
        OSError: a folder can't be looked at.
    """

    def stop(error: OSError) -> None:
        raise error

    found: list[tuple[str, list[str]]] = []
    above: dict[str, tuple[tuple[int, int], ...]] = {os.path.dirname(folder): (identity(folder.parent),)}
    for place, _, names in os.walk(folder, onerror=stop, followlinks=True):
        own, before = identity(place), above[os.path.dirname(place)]
        if own in before:
            seen = f"{place} -> {os.path.realpath(place)}"
            raise MusterError("a link leads back to a folder above it", seen=seen, fix="remove the link")
        above[place] = (*before, own)
        found.append((place, names))
    return [
        os.path.join(place, name)
        for place, names in sorted(found)
        for name in sorted(names)
        if has_file_allowed_extension(name, IMG_EXTENSIONS)
    ]


def read_folder(folder: Path, options: Options) -> Found:
    """The files below `folder` and their classes.

    Raises:
        MusterError: there is no folder, no class in it, a class without images, or a link that leads back.
    """
    try:
        check_there(folder, options, LAYOUT)
        if not any(entry.is_dir() for entry in folder.iterdir()):
            state = "holds no subfolders, so no classes" if any(folder.iterdir()) else "is empty"
            raise MusterError(f"the data folder {state}", seen=f"--data={options.data} ({folder})", fix=LAYOUT)
        classes = sorted(entry.name for entry in folder.iterdir() if entry.is_dir())
        images = [images_below(folder / name) for name in classes]
    except OSError as error:
        fix = "see that this user may read the folder, on every node"
        raise MusterError(f"the data folder can't be read: {error.strerror}", seen=str(folder), fix=fix) from error
    empty = [name for name, paths in zip(classes, images, strict=True) if not paths]
    if empty:
        raise MusterError(
            f"no images in class {', '.join(empty)}",
            seen=f"--data={options.data} ({folder})",
            fix="put images into the folder of that class, or remove the folder",
        )
    return Found(classes, [(path, label) for label, paths in enumerate(images) for path in paths])


def scan(options: Options, folder: str) -> Arrays:
    """Paths and classes of all images below `folder`, and how many of them are training images: all, if it is one.

    Raises:
        MusterError: the folder is missing, empty, or its two halves disagree on the classes.
    """
    root = Path(os.path.expanduser(folder))
    halves = halves_of(root, f"--data={options.data}", LAYOUT)
    found = [read_folder(half, options) for half in halves]
    unknown = sorted(set(found[0].classes) ^ set(found[-1].classes))
    if unknown:
        raise MusterError(
            f"train/ and {halves[1].name}/ don't have the same classes",
            seen=f"only in one of them: {', '.join(unknown[:5])}{' ...' if len(unknown) > 5 else ''}",
            fix=f"give both the same subfolders below {root}",
        )
    if len(found[0].classes) < 2:
        raise MusterError(
            "one class alone can't be told from others", seen=f"classes: {found[0].classes[0]}", fix=LAYOUT
        )
    samples = [sample for half in found for sample in half.samples]
    return {
        "paths": joined([os.fsencode(os.path.relpath(path, root)) for path, _ in samples]),
        "labels": np.array([label for _, label in samples], np.int32),
        "classes": joined([os.fsencode(name) for name in found[0].classes]),
        "num_train": np.array(len(found[0].samples)),
    }


def parts_of(num_samples: int, num_train: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """The numbers of the samples that train and that validate: the first and the rest, or by chance where all train."""
    if num_train < num_samples:
        return np.arange(num_train), np.arange(num_train, num_samples)
    train, valid = split(num_samples, VALID_SHARE, seed)
    return np.array(train), np.array(valid)


def open_source(options: Options, folder: str, found: Arrays | None = None) -> Source:
    """The images below `folder`: its `train/` and `val/`, or a tenth of one folder, chosen by the seed, validates.

    Args:
        found: what `scan` has found, perhaps on another host.

    Raises:
        MusterError: the folder is missing, empty, or its two halves disagree on the classes.
    """
    root = Path(os.path.expanduser(folder))
    if found is None:
        found = scan(options, folder)
    else:
        check_there(root, options, LAYOUT)
    paths, labels, size = Names(found["paths"]), found["labels"], options.pixels
    chosen = parts_of(len(paths), int(found["num_train"]), options.seed)
    halves: list[Images] = [
        Files(root, paths, part, labels[part], size, random=random)
        for part, random in zip(chosen, (True, False), strict=True)
    ]
    return Source(train=halves[0], valid=halves[1], num_classes=len(Names(found["classes"])), size=size)
