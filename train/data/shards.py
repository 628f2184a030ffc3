"""Tar files of images, as the webdataset library writes them: few files, which is what file systems of clusters want.

Samples are read at their places, in the order of train/order.py, and not in that of the files.
"""

import os
import resource
from collections import OrderedDict
from pathlib import Path

import numpy as np

from train.data.encoded import Encoded, Names
from train.data.imagefolder import check_there, halves_of, parts_of
from train.data.images import Images, Source
from train.data.index import LAYOUT, index_of
from train.data.sharing import Arrays
from train.data.tar import BLOCK, name_of
from train.errors import MusterError
from train.options import Options


class Descriptors:
    """Files that are opened when they are first read, in each process anew; those not read for long are closed."""

    def __init__(self) -> None:
        self.most = max(8, min(4096, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2))
        self.open: OrderedDict[bytes, int] = OrderedDict()

    def __getitem__(self, path: bytes) -> int:
        if path not in self.open:
            if len(self.open) >= self.most:
                os.close(self.open.popitem(last=False)[1])
            self.open[path] = os.open(path, os.O_RDONLY)
        self.open.move_to_end(path)
        return self.open[path]

    def __reduce__(self) -> tuple[type["Descriptors"], tuple[()]]:
        return Descriptors, ()  # another process has to open its own

    def __del__(self) -> None:
        for descriptor in self.open.values():
            os.close(descriptor)


class Shards(Encoded):
    """Images in tar files.

    Args:
        index: the places and classes of all samples.
        chosen_N: which of them are meant.
    """

    def __init__(self, root: Path, index: Arrays, chosen_N: np.ndarray, size: int, *, random: bool) -> None:
        super().__init__(index["label"][chosen_N], size, random=random)
        self.root = os.fsencode(root)
        self.shards = Names(index["names"])
        self.shard, self.offset, self.length = (index[name][chosen_N] for name in ("shard", "offset", "length"))
        self.files = Descriptors()

    def path(self, index: int) -> bytes:
        """The shard that holds the sample."""
        return os.path.join(self.root, self.shards[int(self.shard[index])])

    def name(self, index: int) -> str:
        path, offset = self.path(index), int(self.offset[index])
        try:
            member = name_of(os.pread(self.files[path], BLOCK, offset - BLOCK))
        except (OSError, IndexError):
            member = f"at byte {offset}"
        return f"{os.fsdecode(path)}, {member}"

    def content(self, index: int) -> bytes:
        length = int(self.length[index])
        content = os.pread(self.files[self.path(index)], length, int(self.offset[index]))
        if len(content) < length:
            raise OSError("the shard is shorter than it was when its headers were read")
        return content


def scan(options: Options, folder: str) -> Arrays:
    """The places and classes of all samples below `folder`, and how many of them train: all, if it has no halves.

    Raises:
        MusterError: there are no shards, one is not what it should be, or classes are missing.
    """
    root, seen = Path(os.path.expanduser(folder)), f"--data={options.data}"
    check_there(root, options, LAYOUT)
    halves = halves_of(root, seen, LAYOUT)
    found = [index_of(half, seen) for half in halves]
    indices = [index for index, _ in found]
    names = [
        os.path.join(os.fsencode(os.path.relpath(half, root)), name)
        for half, index in zip(halves, indices, strict=True)
        for name in Names(index["names"])
    ]
    first = len(Names(indices[0]["names"]))
    check_classes([index["label"] for index in indices], seen)
    shards = [index["shard"] + number * first for number, index in enumerate(indices)]
    whole = {name: np.concatenate([index[name] for index in indices]) for name in ("offset", "length", "label")}
    notes = [note.encode() for _, note in found if note is not None]
    return whole | {
        "shard": np.concatenate(shards),
        "names": np.frombuffer(b"".join(name + b"\0" for name in names), np.uint8),
        "num_train": np.array(len(shards[0])),
        "notes": np.frombuffer(b"".join(note + b"\0" for note in notes), np.uint8),
    }


def check_classes(labels: list[np.ndarray], seen: str) -> None:
    """Returns where the training samples, which come first, have all classes from 0 on.

    Raises:
        MusterError: there are none, or classes have no training sample.
    """
    if not all(map(len, labels)):
        raise MusterError("the shards hold no samples", seen=seen, fix=LAYOUT)
    present, num_classes = np.unique(labels[0]), int(max(part.max() for part in labels)) + 1
    num_missing = num_classes - len(present)
    if num_missing:
        # Counted up to where some must be missing: a class may be a time stamp by mistake.
        missing = np.setdiff1d(np.arange(min(num_classes, len(present) + 6)), present)
        numbers = ", ".join(map(str, missing[:5])) + (" ..." if num_missing > 5 else "")
        raise MusterError(
            f"{num_missing} of {num_classes} classes have no training sample",
            seen=f"{seen}, without: {numbers}",
            fix="number the classes from 0 on without gaps; 'train pack IMAGES FOLDER' does so",
        )
    if num_classes < 2:
        raise MusterError("one class alone can't be told from others", seen=f"{seen}, class 0", fix=LAYOUT)


def open_source(options: Options, folder: str, found: Arrays | None = None) -> Source:
    """The images in the shards below `folder`: its `train/` and `val/`, or a tenth of one folder, chosen by the seed.

    Args:
        found: what `scan` has found, perhaps on another host.

    Raises:
        MusterError: there are no shards, one is not what it should be, or classes are missing.
    """
    root = Path(os.path.expanduser(folder))
    if found is None:
        found = scan(options, folder)
    else:
        check_there(root, options, LAYOUT)
    num_train = int(found["num_train"])
    chosen = parts_of(len(found["label"]), num_train, options.seed)
    halves: list[Images] = [
        Shards(root, found, part, options.pixels, random=random)
        for part, random in zip(chosen, (True, False), strict=True)
    ]
    return Source(
        train=halves[0],
        valid=halves[1],
        num_classes=int(found["label"].max()) + 1,
        size=options.pixels,
        notes=tuple(note.decode() for note in Names(found["notes"])),
    )
