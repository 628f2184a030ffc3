"""Which samples lie where in a folder of tar files: found once, kept beside them, checked against them."""

import json
import os
import re
import tempfile
import zipfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np

from train.data.encoded import joined
from train.data.sharing import Arrays, packed, unpacked
from train.data.tar import MOST_DIGITS, Broken, Member, Reader, members
from train.errors import MusterError

KEPT = ".muster-index.npz"
VERSION = 1
IMAGES = ("jpg", "jpeg", "png", "webp", "bmp", "ppm", "pgm", "tif", "tiff", "gif")
CLASSES = ("cls", "json")
NUM_THREADS = 16
LAYOUT = (
    "tar files FOLDER/*.tar, or FOLDER/train/*.tar and FOLDER/val/*.tar, with NAME.jpg and NAME.cls of each sample; "
    "'train pack IMAGES FOLDER' makes them"
)

# webdataset's rule: a sample's name goes up to the first dot of the file's name.
PARTS = re.compile(r"((?:.*/)?[^./]+)\.([^/]*)")


class Sample(NamedTuple):
    """Where an image lies in its shard, and its class."""

    offset: int
    length: int
    label: int


def samples_of(shard: Path) -> list[Sample]:
    """The samples in `shard`, in its order.

    Raises:
        MusterError: it can't be read, it is no whole tar file, or a sample of it has no image or no class.
    """
    found: list[Sample] = []
    try:
        descriptor = os.open(shard, os.O_RDONLY)
    except OSError as error:
        fix = "see that this user may read the folder, on every node"
        raise MusterError(f"a shard can't be read: {error.strerror}", seen=str(shard), fix=fix) from error
    reader, name, parts = Reader(descriptor), "", dict[str, Member]()
    try:
        for member in members(reader):
            match = PARTS.fullmatch(member.name)
            if match is None or (member.name.startswith("__") and member.name.endswith("__")):
                continue  # hidden files, and what webdataset writes about a shard
            own, kind = match[1], match[2].lower()
            if own != name and parts:
                found.append(sample_of(shard, name, parts, reader))
                parts = {}
            if kind in parts:
                raise refusal("two files of one sample have one name", shard, member.name)
            name = own
            parts[kind] = member
        if parts:
            found.append(sample_of(shard, name, parts, reader))
    except Broken as error:
        fix = "make or copy the shard anew"
        raise MusterError(f"a shard is damaged: {error}", seen=str(shard), fix=fix) from error
    except OSError as error:
        raise MusterError(f"a shard can't be read: {error.strerror}", seen=str(shard), fix="see to its disk") from error
    finally:
        os.close(descriptor)
    return found


def table_of(shard: Path) -> np.ndarray:
    """The samples in `shard`, a row each: a million of them as Python's numbers would take half a gigabyte."""
    return np.array(samples_of(shard), np.int64).reshape(-1, len(Sample._fields))


def refusal(wrong: str, shard: Path, member: str) -> MusterError:
    """The error about a member of a shard."""
    return MusterError(wrong, seen=f"{shard}, {member}", fix=LAYOUT)


def sample_of(shard: Path, name: str, parts: dict[str, Member], reader: Reader) -> Sample:
    """The sample that the files `parts` are, by the ends of their names.

    Raises:
        MusterError: there is no image, no class, or none that is a number.
    """
    image = next((parts[kind] for kind in parts if kind in IMAGES), None)
    told = next((parts[kind] for kind in CLASSES if kind in parts), None)
    if image is None or told is None:
        wrong = "a sample has no image" if image is None else "a sample has no class"
        raise refusal(wrong, shard, f"{name}.* ({', '.join(sorted(parts))})")
    text = reader.read(told.offset, told.size)
    label = label_of(text, is_json=told.name.lower().endswith("json"))
    if label is None:
        raise refusal(f"a class is no number from 0 on: {text[:40]!r}", shard, told.name)
    return Sample(image.offset, image.size, label)


def label_of(text: bytes, *, is_json: bool) -> int | None:
    """The class that the content of a sample's file tells; None where it tells none."""
    if not is_json:
        text = text.strip()
        value = int(text) if text.isdigit() and len(text) <= MOST_DIGITS else -1
        return value if 0 <= value < 2**31 else None
    try:
        value = json.loads(text)
    except ValueError:
        return None
    if isinstance(value, dict):
        value = value.get("label", value.get("cls"))
    return value if type(value) is int and 0 <= value < 2**31 else None


def shards_in(folder: Path, seen: str) -> list[Path]:
    """The tar files in `folder`, by name.

    Raises:
        MusterError: there are none.
    """
    try:
        names = sorted(entry.name for entry in os.scandir(folder))
    except OSError as error:
        fix = "see that this user may read the folder, on every node"
        raise MusterError(f"the data folder can't be read: {error.strerror}", seen=str(folder), fix=fix) from error
    shards = [folder / name for name in names if name.endswith(".tar") and not name.startswith(".")]
    if not shards:
        pressed = [name for name in names if re.search(r"\.(tgz|tar\.\w+)$", name)]
        wrong = f"{pressed[0]} is compressed, and samples are read at their places" if pressed else "no tar files"
        fix = "uncompress the shards; JPEGs don't get smaller" if pressed else LAYOUT
        raise MusterError(f"{wrong}: the folder holds no shards", seen=f"{seen} ({folder})", fix=fix)
    return shards


def index_of(folder: Path, seen: str) -> tuple[Arrays, str | None]:
    """The places and classes of all samples in `folder`, and what the user should know of how they were found.

    Raises:
        MusterError: there are no shards, or one is not what it should be.
    """
    shards = shards_in(folder, seen)
    try:
        states = [os.stat(shard) for shard in shards]
    except OSError as error:
        fix = "see that this user may read the folder, on every node"
        raise MusterError(f"a shard can't be read: {error.strerror}", seen=str(error.filename), fix=fix) from error
    identity = {
        "version": np.array(VERSION),
        "names": joined([os.fsencode(shard.name) for shard in shards]),
        "sizes": np.array([state.st_size for state in states]),
        "times": np.array([state.st_mtime_ns for state in states]),
    }
    kept = load(folder / KEPT, identity)
    if kept is not None:
        return kept, None
    with ThreadPoolExecutor(NUM_THREADS) as pool:
        found = list(pool.map(table_of, shards))
    offset, length, label = np.concatenate(found).T
    index = identity | {
        "shard": np.repeat(np.arange(len(shards), dtype=np.int32), list(map(len, found))),
        "offset": offset.copy(),
        "length": length.copy(),
        "label": label.astype(np.int32),
    }
    try:
        keep(folder / KEPT, packed(index))
    except OSError as error:
        return index, f"the index of the shards can't be kept in {folder}: {error.strerror}; each run makes it anew"
    return index, None


def load(path: Path, identity: Arrays) -> Arrays | None:
    """The index kept at `path`; None where it is not there, damaged, or of other shards than `identity` tells."""
    try:
        index = unpacked(path.read_bytes())
    except (OSError, ValueError, EOFError, TypeError, RuntimeError, NotImplementedError, zipfile.BadZipFile):
        return None
    whole = {"shard", "offset", "length", "label", *identity} <= set(index)
    return index if whole and all(np.array_equal(index[name], identity[name]) for name in identity) else None


def keep(path: Path, content: bytes) -> None:
    """Puts `content` at `path`, whole or not at all; of several jobs that do so at once, one wins.

    Raises:
        OSError: it can't be written there.
    """
    descriptor, partial = tempfile.mkstemp(prefix=f"{path.name}.", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        os.chmod(partial, 0o644)
        os.replace(partial, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(partial)
        raise
