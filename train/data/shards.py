"""Tar files of images (shards) in webdataset's format: few large files, which file systems of clusters handle best.

Samples are read by their offsets, in the order of the sampler, not of the files. The offsets are read from the headers
once, and kept in an index beside the shards, which is used only as long as it matches them.
"""

import itertools
import os
import re
import resource
import socket
import tarfile
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path
from typing import BinaryIO

import numpy as np

from muster.config import Options
from muster.errors import MusterError
from muster.paths import check_regular
from muster.train.data.imagefolder import choose_halves, find_folder, halves_in, refuse_mixed
from muster.train.data.images import EncodedImages
from muster.train.data.source import Source, left_out
from muster.units import listed

INDEX = ".muster-index.npz"
SAMPLE = np.dtype([("shard", np.int32), ("label", np.int32), ("offset", np.int64), ("length", np.int64)])
"""The number of a shard, a class, and where in the shard the bytes of the image lie."""

IMAGES = ("jpg", "jpeg", "png", "webp", "bmp", "ppm", "pgm", "tif", "tiff", "gif")
NUM_THREADS = 16
NUM_CHECKED = 16
"""Samples of each half that each rank compares with the shards on its host."""

WINDOW = 4096
"""Bytes of one read, which gets a header together with a small file after it, and the next header."""

LAYOUT = (
    "tar files FOLDER/*.tar, or FOLDER/train/*.tar and FOLDER/val/*.tar, with NAME.jpg and NAME.cls of each sample "
    "next to each other (tar --sort=name); 'train pack IMAGES FOLDER' makes them"
)
READABLE = "see that this user may read the folder, on every node"

# webdataset's rule: a sample's name goes up to the first dot of the file's name.
NAME_AND_KIND = re.compile(r"((?:.*/)?[^./]+)\.([^/]*)")


@dataclass(frozen=True)
class Found:
    """The samples in a folder of shards.

    Attributes:
        shards: paths relative to the folder.
        samples_N: an entry of dtype SAMPLE for each.
        num_train: the number of training samples, which come first; all of them where there is no train/ and val/.
        notes: what the user should know about how they were found, a line each.
    """

    shards: list[str]
    samples_N: np.ndarray
    num_train: int
    notes: tuple[str, ...]


@lru_cache(max(8, min(4096, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)))
def opened(path: str) -> BinaryIO:
    """The open file at `path`, from a cache that closes the least recently used ones. To be read by `os.pread` alone:
    forked processes share its position."""
    return open(path, "rb", buffering=0)


class Shards(EncodedImages):
    """Images in the tar files `shards`, at the places that `samples_N` (dtype SAMPLE) names."""

    def __init__(self, shards: list[str], samples_N: np.ndarray, size: int, *, random: bool) -> None:
        super().__init__(samples_N["label"], size, random=random)
        self.shards = shards
        self.samples = samples_N

    def header(self, index: int) -> tarfile.TarInfo:
        """The header of the image in the tar file itself.

        Raises:
            OSError: it can't be read.
            tarfile.TarError: it is another file, or damaged.
        """
        path, offset = self.shards[self.samples["shard"][index]], int(self.samples["offset"][index])
        header = os.pread(opened(path).fileno(), tarfile.BLOCKSIZE, offset - tarfile.BLOCKSIZE)
        return tarfile.TarInfo.frombuf(header, tarfile.ENCODING, "surrogateescape")

    def name(self, index: int) -> str:
        try:
            member = self.header(index).name
        except (OSError, tarfile.TarError):
            member = f"at byte {self.samples['offset'][index]}"
        return f"{self.shards[self.samples['shard'][index]]}, {member}"

    def check(self) -> None:
        """Raises MusterError where these shards are not those whose headers were read, perhaps on another host.

        Without this check, images would silently get the classes of others.
        """
        for index in np.linspace(0, len(self) - 1, NUM_CHECKED, dtype=int):
            expected = f"an image of {self.samples['length'][index]} bytes"
            try:
                found = f"an image of {self.header(index).size} bytes"
            except (OSError, tarfile.TarError) as error:
                found = str(error)
            if found != expected:
                wrong = "the shards are not those whose headers were read, perhaps on another host"
                place = f"{self.shards[self.samples['shard'][index]]} on {socket.gethostname()}"
                seen = f"{place}, at byte {self.samples['offset'][index]}: {found}; the headers said {expected}"
                fix = f"copy the same shards to every node; if they are the same already, remove {INDEX} beside them"
                raise MusterError(wrong, seen=seen, fix=fix)

    def content(self, index: int) -> bytes:
        shard, _, offset, length = self.samples[index].item()
        content = os.pread(opened(self.shards[shard]).fileno(), length, offset)
        if len(content) < length:
            raise ValueError("the shard is shorter than it was when its headers were read")
        return content


def open_source(options: Options, found: Found) -> Source:
    """Opens the images that `scan` found on rank 0; without train/ and val/, a tenth validates, chosen by the seed."""
    root, size = find_folder(options, LAYOUT), options.pixels
    shards = [os.path.join(root, shard) for shard in found.shards]
    train, valid = choose_halves(len(found.samples_N), found.num_train, options.seed)
    halves = [Shards(shards, found.samples_N[of], size, random=of is train) for of in (train, valid)]
    for half in halves:
        half.check()
    return Source(
        train=halves[0],
        valid=halves[1],
        num_classes=int(found.samples_N["label"].max()) + 1,
        size=size,
        notes=found.notes,
    )


def scan(options: Options) -> Found:
    """The samples in the shards below the folder of `--data`.

    Raises:
        MusterError: there are no shards, one is damaged or not as LAYOUT says, or classes are missing.
    """
    root, seen = find_folder(options, LAYOUT), f"--data={options.data}"
    shards, parts, notes = list[str](), list[np.ndarray](), list[str]()
    for half in halves_in(root, seen, LAYOUT):
        names, samples_N, note = open_index(half, seen)
        samples_N["shard"] += len(shards)
        shards += [os.path.join(os.path.relpath(half, root), name) for name in names]
        parts.append(samples_N)
        notes += [note] if note else []
        packed = [name for name in os.listdir(half) if re.search(r"^[^.].*\.(tar\.(gz|bz2|xz|zst|lz4|Z)|tgz)$", name)]
        notes += left_out(len(packed), "compressed tar files")
    check_classes([part["label"] for part in parts], seen)
    return Found(shards, np.concatenate(parts), num_train=len(parts[0]), notes=tuple(notes))


def check_classes(labels: list[np.ndarray], seen: str) -> None:
    """Raises MusterError where a half is empty, the first (training) lacks a class, or there is one class only."""
    if not all(map(len, labels)):
        raise MusterError("the shards hold no samples", seen=seen, fix=LAYOUT)
    present, num_classes = np.unique(labels[0]), int(max(part.max() for part in labels)) + 1
    if num_missing := num_classes - len(present):
        # Searched among the first numbers only: a class may be a time stamp by mistake.
        missing = np.setdiff1d(np.arange(len(present) + 1), present)
        wrong = f"{num_missing} of {num_classes} classes have no training sample"
        fix = "number the classes from 0, without gaps; 'train pack IMAGES FOLDER' does so"
        raise MusterError(wrong, seen=f"{seen}, the first without: {missing[0]}", fix=fix)
    if num_classes < 2:
        raise MusterError("there is only one class, and training needs more", seen=f"{seen}, class 0", fix=LAYOUT)


def open_index(folder: Path, seen: str) -> tuple[list[str], np.ndarray, str | None]:
    """The names of the shards in `folder`, their samples, and a note for the user where the index can't be kept.

    To read a million headers takes a minute, and more from a file system over the network: they are read once, and
    again when any shard has another name, size or time.
    """
    try:
        names = sorted(name for name in os.listdir(folder) if name.endswith(".tar") and not name.startswith("."))
        states = [os.stat(folder / name) for name in names]
    except OSError as error:
        raise MusterError(f"the shards can't be read: {error.strerror}", seen=error.filename, fix=READABLE) from error
    if not names:
        raise MusterError("the folder holds no uncompressed tar files", seen=f"{seen} ({folder})", fix=LAYOUT)
    refuse_mixed({name: set(re.findall("[a-z]+", name.lower())) for name in names}, seen, LAYOUT)
    facts = [(name, state.st_size, state.st_mtime_ns) for name, state in zip(names, states, strict=True)]
    identity = blake2b(repr(facts).encode()).hexdigest()
    if (kept := load_index(folder / INDEX, identity)) is not None:
        return names, kept, None
    with ThreadPoolExecutor(NUM_THREADS) as pool:
        parts = list(pool.map(read_headers, [folder / name for name in names]))
    for number, part in enumerate(parts):
        part["shard"] = number
    samples_N = np.concatenate(parts)
    try:
        # Written in a temporary folder: other jobs may write the same index, and one of them wins.
        with tempfile.TemporaryDirectory(prefix=f"{INDEX}.", dir=folder) as own:
            np.savez(Path(own, INDEX), samples=samples_N, identity=identity)
            Path(own, INDEX).replace(folder / INDEX)
    except OSError as error:
        note = f"the index of the shards can't be kept in {folder}: {error.strerror}; each run makes it anew"
        return names, samples_N, note
    return names, samples_N, None


def load_index(path: Path, identity: str) -> np.ndarray | None:
    """The samples in the index at `path`; None where it is missing, damaged, or not of the shards of `identity`."""
    try:
        check_regular(path)
        with np.load(path, allow_pickle=False) as file:
            samples_N, is_theirs = file["samples"], str(file["identity"]) == identity
    except Exception:  # what is no archive, or a damaged one, makes zipfile and numpy raise nearly anything
        return None
    return samples_N if is_theirs and samples_N.dtype == SAMPLE else None


def read_headers(shard: Path) -> np.ndarray:
    """The samples in `shard`, of dtype SAMPLE, in the order of the file; the number of the shard is left at 0.

    Raises:
        MusterError: it can't be read, it is no whole tar file, or a sample of it has no image or no class.
    """
    samples: list[tuple[int, int, int, int]] = []
    try:
        check_regular(shard)
        with open(shard, "rb", buffering=WINDOW) as file:
            for name, members in itertools.groupby(find_members(file), key=lambda found: found[0]):
                parts: dict[str, tarfile.TarInfo] = {}
                for _, kind, member in members:
                    if kind in parts:
                        raise unfit("two files of one sample have the same suffix", shard, member.name)
                    parts[kind] = member
                samples.append(read_sample(file, shard, name, parts))
    except (tarfile.TarError, ValueError, OverflowError) as error:
        raise MusterError(f"a shard is damaged: {error}", seen=str(shard), fix="make or copy the shard anew") from error
    except OSError as error:
        raise MusterError(f"a shard can't be read: {error.strerror}", seen=str(shard), fix=READABLE) from error
    return np.array(samples, SAMPLE)


def find_members(file: BinaryIO) -> Iterator[tuple[str, str, tarfile.TarInfo]]:
    """Yields, for each file in the tar file, the name of its sample, its kind ("jpg"), and its header.

    Raises:
        tarfile.TarError: it is no tar file, it is damaged, or its end is missing.
    """
    end = os.fstat(file.fileno()).st_size
    with tarfile.open(fileobj=file, mode="r:") as tar:
        while (member := tar.next()) is not None:
            tar.members = []  # type: ignore[attr-defined]  # it would keep the headers of all
            if not member.isreg() or member.issparse():
                continue
            if not 0 <= member.size <= end - member.offset_data:
                reach = member.offset_data + member.size
                raise tarfile.ReadError(f"{member.name} should reach to byte {reach}, but the shard ends at {end}")
            match = NAME_AND_KIND.fullmatch(member.name)
            # Not hidden files, and not what webdataset writes about a shard.
            if match is not None and not (member.name.startswith("__") and member.name.endswith("__")):
                yield match[1], match[2].lower(), member
        # tarfile takes a damaged or missing header for the end, and ignores a second archive that cat has appended.
        # A true end is zeros: a record of them and a block at most.
        file.seek(tar.offset)
        rest = file.read(2 * tarfile.RECORDSIZE)
        if len(rest) < tarfile.BLOCKSIZE or any(rest):
            wrong = f"no header at byte {tar.offset}, and no end without data after it"
            raise tarfile.ReadError(f"{wrong}: was it cut off, or are several tar files joined in it?")


def read_sample(file: BinaryIO, shard: Path, name: str, parts: dict[str, tarfile.TarInfo]) -> tuple[int, int, int, int]:
    """The entry of dtype SAMPLE for the sample `name`, from the headers of its files, by kind (`parts`).

    Raises:
        MusterError: there is no image, no class, or none that is a number.
    """
    image = next((parts[kind] for kind in parts if kind in IMAGES), None)
    class_ = parts.get("cls")
    if image is None or class_ is None:
        wrong = f"a sample has no {'image' if image is None else 'class'} next to its other files"
        raise unfit(wrong, shard, f"{name}.* ({listed(sorted(parts))})")
    file.seek(class_.offset_data)
    text = file.read(class_.size)
    digits = text.strip()
    label = int(digits) if digits.isdigit() and len(digits) < 11 else -1  # int takes "1_0" for 10
    if not 0 <= label < 2**31:
        raise unfit(f"a class is not a whole number of at least 0: {text[:40]!r}", shard, class_.name)
    return 0, label, image.offset_data, image.size


def unfit(wrong: str, shard: Path, member: str) -> MusterError:
    return MusterError(wrong, seen=f"{shard}, {member}", fix=LAYOUT)
