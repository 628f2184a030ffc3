"""A folder of image files, one subfolder a class."""

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

import numpy as np
from torchvision.datasets.folder import IMG_EXTENSIONS, has_file_allowed_extension

from muster.config import Options
from muster.errors import MusterError
from muster.train.data.images import EncodedImages
from muster.train.data.source import Source, left_out, split
from muster.units import listed

VALID_SHARE = 0.1
TRAINS = {"train", "training"}
VALIDATES = {"val", "valid", "validation", "test", "testing"}
MARKS = TRAINS | VALIDATES
LAYOUT = "FOLDER/CLASS/IMAGE.jpg, or FOLDER/train/CLASS/IMAGE.jpg and FOLDER/val/CLASS/IMAGE.jpg"


@dataclass(frozen=True)
class Found:
    """The images below a folder, in the order of torchvision's ImageFolder: by class, then by folder and name.

    Attributes:
        paths_N: relative to the folder, as bytes in one array: a list of a million strings would be copied into each
            forked worker, since reading them changes their reference counts.
        labels_N: the class of each image.
        num_train: the number of training images, which come first; all of them where there is no train/ and val/.
        notes: what the user should know about what was found, a line each.
    """

    paths_N: np.ndarray
    labels_N: np.ndarray
    classes: list[str]
    num_train: int
    notes: tuple[str, ...]


class ImageFiles(EncodedImages):
    """Image files at `paths_N`, relative to `folder`."""

    def __init__(self, folder: Path, paths_N: np.ndarray, labels_N: np.ndarray, size: int, *, random: bool) -> None:
        super().__init__(labels_N, size, random=random)
        self.folder = os.fsencode(folder)
        self.paths = paths_N

    def name(self, index: int) -> str:
        return os.fsdecode(os.path.join(self.folder, self.paths[index]))

    def content(self, index: int) -> bytes:
        with open(os.path.join(self.folder, self.paths[index]), "rb", buffering=0) as file:
            return file.read()


def halves_in(root: Path, seen: str, layout: str) -> list[Path]:
    """The folders with the training and the validation data; `root` alone, where it has no such folders.

    Raises:
        MusterError: it has one of the two.
    """
    # Without train/, validation/ may lie beside training/: `refuse_mixed` reports these.
    names = ("valid", "val", "validation") if os.path.isdir(root / "train") else ("valid",)
    halves = [root / "train", next((half for name in names if os.path.isdir(half := root / name)), root / "val")]
    present = [half for half in halves if os.path.isdir(half)]  # Path.is_dir raises where this user may not look
    if len(present) == 1:
        missing = next(half for half in halves if not os.path.isdir(half))
        wrong = f"the data folder has {present[0].name}/ but no {missing.name}/"
        fix = f"{layout}; or {present[0]} as FOLDER, of which a tenth validates; if that folder is a class, rename it"
        raise MusterError(wrong, seen=seen, fix=fix)
    return present or [root]


def refuse_mixed(names: dict[str, set[str]], seen: str, layout: str) -> None:
    """Raises MusterError where the words in `names` mark one of them as training data, another as validation data."""
    train = [name for name, words in names.items() if words & TRAINS]
    valid = [name for name in names if name not in train and names[name] & VALIDATES]
    if train and valid:
        wrong, seen = "training and validation data would be mixed", f"{seen}, with {train[0]} and {valid[0]}"
        raise MusterError(wrong, seen=seen, fix=layout)


def find_folder(options: Options, layout: str) -> Path:
    """The folder that `--data` names.

    Raises:
        MusterError: it is no folder, or can't be read.
    """
    source, _, folder = options.data.partition(":")
    root = Path(os.path.expanduser(folder))
    if not os.path.isdir(root):
        wrong = "the data folder does not exist, is a file, or can't be read"
        fix = f"--data={source}:FOLDER with {layout}; in a container, see that FOLDER is bound into it"
        raise MusterError(wrong, seen=f"--data={options.data} ({root})", fix=fix)
    return root


def entries_of(folder: str | Path) -> list[os.DirEntry[str]]:
    """The entries of `folder` except hidden ones: macOS leaves a `._NAME.jpg`, which is no image, beside each image."""
    return [entry for entry in os.scandir(folder) if not entry.name.startswith(".")]


def images_below(folder: str, above: tuple[str, ...], others: list[str]) -> Iterator[str]:
    """The paths of the images in a folder and below it; links are followed, hidden names are left out.

    Args:
        above: the real paths of the folders above this one.
        others: a list to which the paths of all other files are added.

    Raises:
        MusterError: a link leads back to a folder above it, or something that is no file has the name of an image.
        OSError: a folder can't be read.
    """
    if (real := os.path.realpath(folder)) in above:
        raise MusterError("a link leads back to a folder above it", seen=f"{folder} -> {real}", fix="remove the link")
    for entry in entries_of(folder):
        if entry.is_dir():
            yield from images_below(entry.path, (*above, real), others)
        elif has_file_allowed_extension(entry.name, IMG_EXTENSIONS):
            # A broken link is reported when it is read; a pipe would block its reader for ever.
            if not entry.is_file() and os.path.exists(entry.path):
                raise MusterError("something with the name of an image is no file", seen=entry.path, fix="remove it")
            yield entry.path
        else:
            others.append(entry.path)


def read_folder(folder: Path, seen: str, others: list[str]) -> tuple[list[str], list[tuple[str, int]]]:
    """The classes below `folder`, and the path and class of each image.

    Args:
        seen: what the user typed, for errors.
        others: gets the paths of the files that are no images.

    Raises:
        MusterError: the folder can't be read, has no classes or a class without images, or a link leads back.
    """
    try:
        classes = sorted(entry.name for entry in entries_of(folder) if entry.is_dir())
        if not classes:
            state = "holds no subfolders, so no classes" if any(folder.iterdir()) else "is empty"
            raise MusterError(f"the data folder {state}", seen=f"{seen} ({folder})", fix=LAYOUT)
        # By folder, then by name.
        images = [
            sorted(images_below(os.path.join(folder, name), (os.path.realpath(folder),), others), key=os.path.split)
            for name in classes
        ]
    except OSError as error:
        place, fix = str(error.filename or folder), "see that this user may read it, on every node; or remove it"
        raise MusterError(f"the data folder can't be read: {error.strerror}", seen=place, fix=fix) from error
    if empty := [name for name, paths in zip(classes, images, strict=True) if not paths]:
        fix = f"put images ({' '.join(IMG_EXTENSIONS)}) into the folder of that class, or remove the folder"
        raise MusterError(f"no images in class {listed(empty, 5)}", seen=f"{seen} ({folder})", fix=fix)
    return classes, [(path, label) for label, paths in enumerate(images) for path in paths]


def scan(options: Options) -> Found:
    """The images below the folder of `--data`; raises MusterError as `find_images`, and where it is missing."""
    return find_images(find_folder(options, LAYOUT), f"--data={options.data}")


def find_images(root: Path, seen: str) -> Found:
    """The images below `root`.

    Args:
        seen: what the user typed, for errors.

    Raises:
        MusterError: `root` can't be read, a link leads back, or there are too few, empty, mixed or unequal classes.
    """
    halves = halves_in(root, seen, LAYOUT)
    others: list[str] = []
    found = [read_folder(half, seen, others) for half in halves]
    classes, train = found[0]
    if unknown := sorted(set(classes) ^ set(found[-1][0])):
        seen = f"only in one of them: {', '.join(unknown[:5])}{' ...' if len(unknown) > 5 else ''}"
        fix = f"give both the same subfolders below {root}"
        raise MusterError(f"train/ and {halves[1].name}/ don't have the same classes", seen=seen, fix=fix)
    if len(halves) == 1:
        # Names of halves differ in one word (training_set, test_set), of classes in more (express_train, test_tube).
        marked = {name: words for name in classes if (words := set(re.findall("[a-z]+", name.lower()))) & MARKS}
        for (one, own), (other, its) in combinations(marked.items(), 2):
            if len(own - its) == len(its - own) == 1:
                refuse_mixed({one: own - its, other: its - own}, seen, LAYOUT)
    if len(classes) < 2:
        raise MusterError("there is only one class, and training needs more", seen=f"classes: {classes[0]}", fix=LAYOUT)
    samples = [sample for _, half in found for sample in half]
    ends = listed(Path(path).suffix or path for path in others)
    return Found(
        paths_N=np.array([os.fsencode(os.path.relpath(path, root)) for path, _ in samples]),
        labels_N=np.array([label for _, label in samples], np.int32),
        classes=classes,
        num_train=len(train),
        notes=left_out(len(others), f"not named as images, {ends}"),
    )


def choose_halves(num_samples: int, num_train: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """The indices that train and that validate: the first `num_train` and the rest; if none is left, a random split."""
    if num_train < num_samples:
        return np.arange(num_train), np.arange(num_train, num_samples)
    train, valid = split(num_samples, VALID_SHARE, seed)
    return np.array(train), np.array(valid)


def open_source(options: Options, found: Found) -> Source:
    """Opens the images that `scan` found on rank 0; without train/ and val/, a tenth validates, chosen by the seed."""
    root, size = find_folder(options, LAYOUT), options.pixels
    train, valid = choose_halves(len(found.paths_N), found.num_train, options.seed)
    return Source(
        train=ImageFiles(root, found.paths_N[train], found.labels_N[train], size, random=True),
        valid=ImageFiles(root, found.paths_N[valid], found.labels_N[valid], size, random=False),
        num_classes=len(found.classes),
        size=size,
        notes=found.notes,
    )
