"""The files of a checkpoint: a writer and a reader for torch.distributed.checkpoint, without pickle.

Each rank writes one file of raw data, one tensor or chunk of a tensor after another. The file `index` holds, as
JSON, where each chunk lies, and all values that are no tensors. It is written last and has a checksum, as each chunk
has: so a folder with an index is complete, and later changes are detected.
"""

import json
import math
import os
import shutil
import zlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, BinaryIO, TypedDict

import msgspec
import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from muster.errors import MusterError
from muster.paths import check_regular, content_of


def write_atomically(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Writes the file at `path` by calling `write`, and puts it there in one rename after it has reached the disk.

    A file that was there before stays until then; where writing fails, no partial file is left behind.
    """
    partial = path.with_name(f".{path.name}.partial")
    try:
        with partial.open("wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
        sync_folder(path.parent)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def write_text(path: Path, text: str) -> None:
    """Writes `text` to `path`, completely or not at all."""
    write_atomically(path, lambda file: file.write(text.encode()))


def sync_folder(folder: Path) -> None:
    """Makes the names in `folder` survive a crash, on file systems that can."""
    descriptor = os.open(folder, os.O_RDONLY)
    with suppress(OSError):  # some network file systems have no such call for folders
        os.fsync(descriptor)
    os.close(descriptor)


INDEX = "index"
MAGIC = "muster checkpoint"
FORMAT = 2
UNREADABLE = "the checkpoint can't be read"

Count = Annotated[int, msgspec.Meta(ge=0)]


class Chunk(TypedDict):
    """A chunk of a tensor: its offsets and sizes in elements of the tensor, and its place in a file in bytes."""

    offsets: list[Count]
    sizes: list[Count]
    file: Annotated[str, msgspec.Meta(pattern="^rank-[0-9]+$")]
    start: Count
    length: Count
    crc32: Count


class Entry(TypedDict):
    """A tensor: its dtype, as torch names it, its shape, and its chunks, which cover it completely."""

    dtype: str
    shape: list[Count]
    chunks: list[Chunk]


class Index(TypedDict):
    """The content of a checkpoint's index: the state without its tensors, and the tensors by name."""

    plain: dict[str, Any]
    tensors: dict[str, Entry]


class Damaged(Exception):
    """A file of a checkpoint can't be read, or has changed. Ranks can send this to each other, unlike a MusterError."""


def unreadable(path: Path, reason: str) -> MusterError:
    """The error for a user whose checkpoint can't be read."""
    fix = "give the run's folder: its last undamaged checkpoint is used; if there is none, train with another --name"
    return MusterError(f"{UNREADABLE}: {reason}", seen=str(path), fix=fix)


def read_index(path: Path) -> dict[str, Any]:
    """Reads and checks the index of the checkpoint at `path`; returns an `Index`.

    Raises:
        MusterError: it is missing, damaged, of another program, or of another version of this one.
    """
    try:
        head, _, text = content_of(path / INDEX).partition(b"\n")
    except (FileNotFoundError, NotADirectoryError) as error:
        if path.exists():
            raise unreadable(path, f"it is no checkpoint of this program: no {INDEX}") from error
        fix = "a run's folder, or one of its checkpoints, on a file system that all nodes share"
        raise MusterError(f"{UNREADABLE}: there is no such checkpoint on this host", seen=str(path), fix=fix) from error
    except OSError as error:
        raise unreadable(path, f"{INDEX} can't be read ({error.strerror})") from error
    words = head.decode(errors="replace").split()
    if words[:2] != MAGIC.split():
        raise unreadable(path, f"{INDEX} has another header: it is no checkpoint of this program")
    if words[2:3] != [str(FORMAT)]:
        raise unreadable(path, f"{INDEX} has format {' '.join(words[2:3])}, this program reads {FORMAT}")
    if words[3:] != [f"{zlib.crc32(text):08x}"]:
        raise unreadable(path, f"{INDEX} has a wrong checksum")
    try:
        index: Any = msgspec.convert(json.loads(text), Index)  # msgspec's own JSON refuses NaN, as of a loss
        for name, entry in index["tensors"].items():
            check_parts(name, entry)
    except (ValueError, RecursionError) as error:
        raise unreadable(path, f"{INDEX} was not written by this program: {error}") from error
    return index


def check_parts(name: str, entry: Entry) -> None:
    """Raises ValueError where the chunks of `entry` can't be those of a tensor of its shape and dtype."""
    counts = [math.prod(chunk["sizes"]) for chunk in entry["chunks"]]
    is_whole = sum(counts) == math.prod(entry["shape"])
    for chunk, count in zip(entry["chunks"], counts, strict=True):
        box = zip(chunk["offsets"], chunk["sizes"], entry["shape"], strict=True)
        is_inside = all(start + size <= whole for start, size, whole in box)
        is_whole &= is_inside and chunk["length"] == count * dtype_of(entry).itemsize
    if not is_whole:
        raise ValueError(f"the chunks of {name} don't cover it")


def completed(value: Any) -> Future[Any]:
    """A completed future with the result `value`."""
    future: Future[Any] = Future()
    future.set_result(value)
    return future


class CheckpointWriter(StorageWriter):
    """Writes the tensors of a checkpoint into `folder`, then its index, by torch.distributed.checkpoint.

    Args:
        plain: the values that the index holds besides the tensors.
        begin: called on one rank before any rank writes.
        publish: called on one rank when all files are on the disk.
    """

    def __init__(
        self, folder: Path, plain: Mapping[str, Any], begin: Callable[[], None], publish: Callable[[], None]
    ) -> None:
        super().__init__()
        self.begin, self.publish = begin, publish
        self.folder = folder
        self.plain = plain
        self.rank = 0

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Does nothing: no state is kept from one checkpoint to the next."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self.rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        # Called on one rank, before any rank writes: removes what a killed process left here.
        self.begin()
        shutil.rmtree(self.folder, ignore_errors=True)
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        results: list[WriteResult] = []
        # Rank 0 writes at least the index. Others without data make no folder: on a disk of their own it would stay.
        if plan.items or self.rank == 0:
            # Does not make the run's folder: where its file system is gone, it would be made in the empty mount point.
            self.folder.parent.mkdir(exist_ok=True)
            self.folder.mkdir(exist_ok=True)
        if not plan.items:
            return completed(results)
        name, start = f"rank-{self.rank:05d}", 0
        with (self.folder / name).open("wb") as file:
            for item in plan.items:
                tensor = planner.resolve_data(item)
                assert isinstance(tensor, torch.Tensor)
                numbers = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
                file.write(numbers.data)
                place = {"file": name, "start": start, "length": len(numbers), "crc32": zlib.crc32(numbers.data)}
                results.append(WriteResult(item.index, len(numbers), place))
                start += len(numbers)
            file.flush()
            os.fsync(file.fileno())
        return completed(results)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        places = {result.index: result.storage_data for part in results for result in part}
        tensors: dict[str, Any] = {}
        for name, tensor in sorted(metadata.state_dict_metadata.items()):
            assert isinstance(tensor, TensorStorageMetadata), name
            chunks = [
                {"offsets": list(chunk.offsets), "sizes": list(chunk.sizes)}
                | places[MetadataIndex(name, chunk.offsets)]
                for chunk in tensor.chunks
            ]
            tensors[name] = {
                "dtype": str(tensor.properties.dtype).removeprefix("torch."),
                "shape": list(tensor.size),
                "chunks": chunks,
            }
        text = json.dumps({"plain": self.plain, "tensors": tensors})
        write_text(self.folder / INDEX, f"{MAGIC} {FORMAT} {zlib.crc32(text.encode()):08x}\n{text}")
        self.publish()

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return False


def read_chunk(folder: Path, chunk: Chunk, dtype: torch.dtype) -> torch.Tensor:
    """Reads `chunk` from its file in `folder`; returns a tensor on the CPU, of the chunk's sizes.

    Raises:
        Damaged: the file can't be read, is too short, or has another checksum there.
    """
    numbers = bytearray(chunk["length"])
    try:
        check_regular(folder / chunk["file"])
        with (folder / chunk["file"]).open("rb") as file:
            file.seek(chunk["start"])
            length = file.readinto(numbers)
    except OSError as error:
        raise Damaged(f"{chunk['file']} can't be read ({error.strerror})") from None
    if length != chunk["length"]:
        raise Damaged(f"{chunk['file']} is too short")
    if zlib.crc32(numbers) != chunk["crc32"]:
        raise Damaged(f"{chunk['file']} has a wrong checksum")
    flat = torch.frombuffer(numbers, dtype=dtype) if numbers else torch.empty(0, dtype=dtype)
    return flat.view(chunk["sizes"])


def dtype_of(entry: Entry) -> torch.dtype:
    """The dtype of a tensor in the index; ValueError where torch has none of this name."""
    dtype = getattr(torch, entry["dtype"], None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"torch has no dtype {entry['dtype']}")
    return dtype


class CheckpointReader(FileSystemReader):
    """torch's reader, for the files of CheckpointWriter: each rank reads the chunks that it needs from `folder`."""

    def __init__(self, folder: Path, tensors: Mapping[str, Entry]) -> None:
        super().__init__(folder)
        self.folder = folder
        self.tensors = tensors

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        described: dict[str, Any] = {}
        places: dict[MetadataIndex, Chunk] = {}
        for name, entry in self.tensors.items():
            chunks = [
                ChunkStorageMetadata(torch.Size(chunk["offsets"]), torch.Size(chunk["sizes"]))
                for chunk in entry["chunks"]
            ]
            properties = TensorProperties(dtype=dtype_of(entry))
            described[name] = TensorStorageMetadata(properties, torch.Size(entry["shape"]), chunks)
            places |= {MetadataIndex(name, chunk["offsets"]): chunk for chunk in entry["chunks"]}
        return Metadata(described, storage_data=places)

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        assert isinstance(planner, DefaultLoadPlanner)
        for item in plan.items:
            dtype = dtype_of(self.tensors[item.storage_index.fqn])
            chunk = read_chunk(self.folder, self.storage_data[item.storage_index], dtype)
            box = tuple(slice(at, at + size) for at, size in zip(item.storage_offsets, item.lengths, strict=True))
            planner.resolve_tensor(item).detach().copy_(chunk[box])
        return completed(None)
