"""`train pack FOLDER OUT`: packs a folder of image files into a few tar files (shards), with the samples shuffled.

The format is webdataset's: the unchanged image file of each sample, and its class as a number. The same images, seed
and size of shards give the same bytes.
"""

from muster import interruption

if __name__ == "__main__":
    interruption.start("train pack")

import argparse
import io
import json
import os
import shlex
import shutil
import signal
import sys
import tarfile
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track

from muster.errors import ExitCode, MusterError, notify, one_line
from muster.train.checkpoint.storage import sync_folder
from muster.train.data.imagefolder import LAYOUT, ImageFiles, find_images, halves_in
from muster.train.data.sampler import generator
from muster.train.data.shards import open_index
from muster.train.data.source import BadSample

NUM_THREADS = 8
AHEAD = 128
"""Images that are read at a time."""

MB = 10**6
OVERHEAD = 4 * tarfile.BLOCKSIZE
"""Bytes that a sample needs in a tar file besides its image: two headers, a class, and padding to whole blocks."""


def pack(folder: Path, out: Path, shard_mb: int, seed: int) -> int:
    """Packs the images below `folder` into shards below `out`, which is made whole or not at all; returns their number.

    Raises:
        MusterError: no images, `out` exists, no room, or a file is no image, or can't be read or written.
    """
    out = Path(os.path.abspath(os.path.expanduser(out)))  # x/.. would make a folder x
    if os.path.lexists(out):
        fix = "another OUT, or remove the old one first"
        raise MusterError("the output exists already, and nothing is overwritten", seen=f"OUT={out}", fix=fix)
    root = Path(os.path.expanduser(folder))
    if not os.path.isdir(root):
        wrong = "the folder of the images does not exist, is a file, or can't be read"
        raise MusterError(wrong, seen=f"FOLDER={folder}", fix=f"{LAYOUT}; in a container, see that it is bound into it")
    found = find_images(root, f"FOLDER={folder}")
    images = ImageFiles(root, found.paths_N, found.labels_N, size=1, random=False)
    halves = {"train": range(found.num_train), "val": range(found.num_train, len(images))}
    if not halves["val"]:
        halves = {"": halves["train"]}
    if any(Path(os.path.realpath(out)).is_relative_to(os.path.realpath(half)) for half in halves_in(root, "", LAYOUT)):
        fix = "an OUT that is not below FOLDER"
        raise MusterError("OUT would count as a class of the images", seen=f"FOLDER={folder} OUT={out}", fix=fix)
    for note in found.notes:
        notify(f"note: {one_line(note)}")
    again = "and pack again: no shard was left behind"
    try:
        write_folder(out, images, halves, found.classes, shard_mb * MB, seed)
    except BadSample as error:
        wrong, fix = f"an image can't be read: {error.reason}", f"repair or remove the file, {again}"
        raise MusterError(wrong, seen=error.name, fix=fix) from error
    except OSError as error:
        wrong, fix = f"the shards can't be made: {error.strerror or error}", f"correct that, {again}"
        raise MusterError(wrong, seen=os.fsdecode(error.filename or out), fix=fix, code=ExitCode.FAILED) from error
    return len(images)


def write_folder(
    out: Path, images: ImageFiles, halves: dict[str, range], classes: list[str], limit: int, seed: int
) -> None:
    """Writes `out` under a hidden name, which no data source reads, and renames it when it is complete."""
    # Named before it exists: SIGTERM may come as soon as it does.
    home = next(parent for parent in out.parents if os.path.lexists(parent))
    partial = home / f".{out.name}.partial-{uuid.uuid4().hex[:8]}"
    try:
        partial.mkdir(mode=0o700)
        for name, numbers in halves.items():
            half = partial / name
            half.mkdir(exist_ok=True)
            order = torch.randperm(len(numbers), generator=generator(seed, "pack", name)).tolist()
            write_shards(half, images, [numbers[index] for index in order], limit)
            open_index(half, f"OUT={out}")  # reads what was written, and keeps the index beside it
        (partial / "classes.json").write_text(json.dumps(classes, indent=0) + "\n")
        partial.chmod(0o755)
        sync_folder(partial)
        out.parent.mkdir(parents=True, exist_ok=True)  # not before: a failure leaves no folder
        partial.rename(out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def write_shards(folder: Path, images: ImageFiles, order: list[int], limit: int) -> None:
    """Writes `images`, in this `order`, into shards of up to `limit` bytes, each with at least one image."""
    shown = track(read_ahead(images, order), "packing", len(order), console=Console(stderr=True))
    shard: tarfile.TarFile | None = None
    num_shards = 0
    try:
        for number, (name, content, label) in enumerate(shown):
            if shard is not None and shard.offset + len(content) + OVERHEAD > limit:
                close(shard)
                shard = None
            if shard is None:
                shard = tarfile.TarFile(folder / f"{num_shards:06}.tar", "x", format=tarfile.USTAR_FORMAT)
                num_shards += 1
            for end, part in ((Path(name).suffix.lower(), content), (".cls", b"%d" % label)):
                member = tarfile.TarInfo(f"{number:09}{end}")
                member.size = len(part)
                shard.addfile(member, io.BytesIO(part))
    finally:
        del shown  # which ends its threads: if one of them collected it as garbage, it would wait for itself
        if shard is not None:
            close(shard)


def close(shard: tarfile.TarFile) -> None:
    """Closes `shard`, and waits until it is on the disk."""
    shard.close()
    assert shard.name is not None
    with open(shard.name, "rb") as file:
        os.fsync(file)


def read_ahead(images: ImageFiles, order: list[int]) -> Iterator[tuple[str, bytes, int]]:
    """Path, bytes and class of each of `images`, in this `order`, which several threads read ahead.

    Raises:
        BadSample: a file can't be read, or is no image by its first bytes.
    """
    with ThreadPoolExecutor(NUM_THREADS) as pool:
        for start in range(0, len(order), AHEAD):
            some = order[start : start + AHEAD]
            for index, ((content, _), label) in zip(some, pool.map(images.read_encoded, some), strict=True):
                yield images.name(index), content, label


def end(number: int, _: object) -> None:
    """Handles a signal: exits, which removes the incomplete folder (`write_folder`)."""
    notify(f"muster: train pack was ended by {signal.Signals(number).name}: the same command starts it again")
    sys.exit(ExitCode.FAILED)


def main() -> None:
    """Runs the command `train pack`."""
    parser = argparse.ArgumentParser(prog="train pack")
    parser.add_argument("folder", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--shard-mb", type=int, required=True)
    parser.add_argument("--seed", type=int, required=True)
    asked = parser.parse_args()
    with interruption.command(parser.prog):
        signal.signal(signal.SIGTERM, end)
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as under nohup
            signal.signal(signal.SIGHUP, end)
        num_samples = pack(asked.folder, asked.out, asked.shard_mb, asked.seed)
        print(one_line(f"{asked.out}: {num_samples:,} images, for --data {shlex.quote(f'shards:{asked.out}')}"))


if __name__ == "__main__":
    main()
