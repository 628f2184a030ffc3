"""`train pack FOLDER OUT`: a folder of image files becomes few tar files, with the samples mixed.

The format is webdataset's: of each sample the image as it is, and its class as a number. The same images, seed and size
of shards give the same bytes.
"""

import argparse
import io
import json
import os
import shutil
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from train.data.encoded import Names
from train.data.imagefolder import scan
from train.data.index import index_of
from train.data.progress import Progress
from train.data.tar import BLOCK
from train.errors import FAILED, MusterError
from train.files import sync_folder
from train.options import Options
from train.seeds import generator

NUM_THREADS = 8
AHEAD = 128
"""Images that are read at a time."""

MB = 10**6
OVERHEAD = 4 * BLOCK
"""Bytes that a tar file needs besides an image: two headers, a class, what fills a block."""


Sample = tuple[bytes, int]
"""Where an image is, and its class."""


def pack(folder: Path, out: Path, shard_mb: int, seed: int) -> int:
    """How many images are in the shards that are now below `out`, which is made whole or not at all.

    Raises:
        MusterError: there are no images, `out` exists, there is no room, or a file can't be read or written.
    """
    if os.path.lexists(out):
        fix = "another OUT, or remove the old one first"
        raise MusterError("there is something already, and nothing is overwritten", seen=f"OUT={out}", fix=fix)
    found = scan(Options(data=f"imagefolder:{folder}"), str(folder))
    paths, num_train = Names(found["paths"]), int(found["num_train"])
    root, labels = os.fsencode(folder), found["labels"].tolist()
    samples = [(os.path.join(root, paths[index]), labels[index]) for index in range(len(paths))]
    halves = {"": samples} if num_train == len(paths) else {"train": samples[:num_train], "val": samples[num_train:]}
    names = Names(found["classes"])
    classes = [os.fsdecode(names[index]) for index in range(len(names))]
    try:
        with ThreadPoolExecutor(NUM_THREADS) as pool:
            total = sum(pool.map(lambda sample: os.path.getsize(sample[0]), samples))
        out.parent.mkdir(parents=True, exist_ok=True)
        check_room(out, total + OVERHEAD * len(samples))
        write_folder(out, halves, classes, shard_mb * MB, seed, Progress("packed", total))
    except OSError as error:
        raise MusterError(
            f"the shards can't be made: {error.strerror or error}",
            seen=os.fsdecode(error.filename or out),
            fix="mend that, and pack again: nothing was left behind",
            code=FAILED,
        ) from error
    return len(samples)


def check_room(out: Path, needed: int) -> None:
    """Returns where the disk of `out` has room for `needed` bytes.

    Raises:
        MusterError: it has not.
    """
    free = shutil.disk_usage(out.parent).free
    if free < needed:
        raise MusterError(
            f"no room for the shards: {needed / 1e9:.2f} GB are needed, {free / 1e9:.2f} GB are free",
            seen=f"OUT={out}",
            fix="make room, or another OUT",
        )


def write_folder(
    out: Path,
    halves: dict[str, list[Sample]],
    classes: list[str],
    limit: int,
    seed: int,
    progress: Progress,
) -> None:
    """Makes `out` under another name, which is hidden and looks like no data, and gives it its own at the end."""
    partial = Path(tempfile.mkdtemp(prefix=f".{out.name}.partial-", dir=out.parent))
    done = 0

    def count(num_bytes: int) -> None:
        nonlocal done
        done += num_bytes
        progress.show(done)

    try:
        for name, samples in halves.items():
            half = partial / name
            half.mkdir(exist_ok=True)
            order = torch.randperm(len(samples), generator=generator(seed, "pack", name)).tolist()
            write_half(half, [samples[index] for index in order], limit, count)
            index_of(half, f"OUT={out}")  # reads what was written, and keeps the index beside it
        (partial / "classes.json").write_text(json.dumps(classes, indent=0) + "\n")
        partial.chmod(0o755)
        sync_folder(partial)
        partial.rename(out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    progress.end(done)


def write_half(folder: Path, samples: list[Sample], limit: int, count: Callable[[int], None]) -> None:
    """Puts `samples`, in this order, into shards of up to `limit` bytes; each has a sample at least."""
    shard: tarfile.TarFile | None = None
    num_shards = 0
    try:
        for number, (path, label, content) in enumerate(contents(samples)):
            if shard is not None and shard.offset + len(content) + OVERHEAD > limit:
                close(shard)
                shard = None
            if shard is None:
                name = folder / f"{num_shards:06}.tar"
                shard = tarfile.TarFile(name, "x", format=tarfile.USTAR_FORMAT)
                num_shards += 1
            suffix = os.path.splitext(os.fsdecode(path))[1].lower()
            for end, part in ((suffix, content), (".cls", b"%d" % label)):
                member = tarfile.TarInfo(f"{number:09}{end}")
                member.size = len(part)
                shard.addfile(member, io.BytesIO(part))
            count(len(content))
    finally:
        if shard is not None:
            close(shard)


def close(shard: tarfile.TarFile) -> None:
    """Ends `shard`, once it is on the disk."""
    shard.close()
    assert shard.name is not None
    descriptor = os.open(shard.name, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def contents(samples: list[Sample]) -> Iterator[tuple[bytes, int, bytes]]:
    """Path, class and bytes of each of `samples`, which several threads read ahead."""
    with ThreadPoolExecutor(NUM_THREADS) as pool:
        for start in range(0, len(samples), AHEAD):
            some = samples[start : start + AHEAD]
            for (path, label), content in zip(some, pool.map(read, [path for path, _ in some]), strict=True):
                yield path, label, content


def read(path: bytes) -> bytes:
    """The bytes of a file."""
    with open(path, "rb") as file:
        return file.read()


def main() -> None:
    parser = argparse.ArgumentParser(prog="train pack")
    parser.add_argument("folder", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--shard-mb", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    try:
        num_samples = pack(asked.folder, asked.out, asked.shard_mb, asked.seed)
    except MusterError as error:
        print(error, file=sys.stderr)
        sys.exit(error.code)
    print(f"{asked.out}: {num_samples:,} images, for --data shards:{asked.out}")


if __name__ == "__main__":
    main()
