"""The loader: reads the samples of a source, and brings them to the training device as batches."""

import hashlib
import math
import os
import resource
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, Dataset, default_collate

from muster import control_groups
from muster.config import Options
from muster.errors import ExitCode, MusterError
from muster.train.data.sampler import Draw, TrainSampler, ValidSampler, generator, seed_of
from muster.train.data.source import BadSample, Samples, Source
from muster.train.distributed.world import World
from muster.train.health.preemption import leave_signals_to_trainer
from muster.train.models import IGNORED
from muster.units import plural

AHEAD = 2
"""Batches that each worker makes before they are asked for (prefetch_factor): DataLoader's own default."""

PROBED = 10
"""Samples that are tried, until one can be read, to learn the size of a sample."""

Tensors = tuple[torch.Tensor, torch.Tensor]
"""Inputs and targets, on the device."""


class Batch(NamedTuple):
    """A batch as the DataLoader yields it.

    Attributes:
        inputs: images NCHW, or tokens NT, or encoded files for the device to decode; None where no sample of the
            batch could be read.
        labels: classes N, or next tokens NT; None with `inputs`.
        bad: name and reason of each sample that could not be read.
    """

    inputs: Any
    labels: torch.Tensor | None
    bad: list[tuple[str, str]]


class Reader(Dataset[Batch]):
    """Reads the samples of a batch.

    A sample that can't be read is named in the batch. In training, the next readable one takes its place, so that all
    ranks go on taking the same number of steps; in validation it is left out.
    """

    def __init__(self, samples: Samples, *, seed: int, replace: bool) -> None:
        self.samples = samples
        self.seed = seed
        self.replace = replace
        self.read_sample: Callable[[int], tuple[Any, Any]] = samples.read
        self.collate: Callable[[list[Any]], Any] = default_collate

    def __getitems__(self, draws: list[Draw]) -> Batch:
        whole = None if self.samples.random else self.samples.read_batch([draw.sample for draw in draws])
        if whole is not None:
            return Batch(*whole, [])
        bad: list[tuple[str, str]] = []
        with torch.random.fork_rng(devices=[], enabled=self.samples.random):
            pairs = [pair for draw in draws if (pair := self.read(draw, bad)) is not None]
        if not pairs:
            return Batch(None, None, bad)
        inputs, labels = self.collate(pairs)
        return Batch(inputs, labels, bad)

    def read(self, draw: Draw, bad: list[tuple[str, str]]) -> tuple[Any, Any] | None:
        """The sample of `draw`, or the one in its place, or None; samples that could not be read are added to `bad`.

        Its augmentation depends on the seed, the epoch and its index, not on the worker or the rank.
        """
        for distance in range(len(self.samples) if self.replace else 1):
            sample = (draw.sample + distance) % len(self.samples)
            if self.samples.random:
                torch.default_generator.manual_seed(seed_of(self.seed, "augment", draw.epoch, sample))
            try:
                return self.read_sample(sample)
            except BadSample as error:
                bad.append((error.name, error.reason))
        return None


def prefetch_to_device(
    batches: Iterable[Batch], place: Callable[[Batch], Tensors | None], side: torch.cuda.Stream
) -> Iterator[tuple[Batch, Tensors | None]]:
    """Yields each batch with its tensors, which `place` makes on the stream `side` while the batch before is in use."""
    waiting: tuple[Batch, Tensors | None, Any] | None = None
    for batch in batches:
        with torch.cuda.stream(side):
            following = batch, place(batch), side.record_event()
        if waiting is not None:
            yield wait_for_copy(*waiting)
        waiting = following
    if waiting is not None:
        yield wait_for_copy(*waiting)


def wait_for_copy(batch: Batch, tensors: Tensors | None, done: Any) -> tuple[Batch, Tensors | None]:
    """Makes the GPU's main stream, not the host, wait for the event `done`; returns `batch` and its `tensors`."""
    main = torch.cuda.current_stream()
    main.wait_event(done)
    for tensor in tensors or ():
        # They were allocated on the other stream: their memory must not be reused before the main one has used them.
        tensor.record_stream(main)
    return batch, tensors


class Batches:
    """Batches of one rank, on its device, ready for the model.

    Args:
        sampler: chooses the samples. Where bad ones are skipped, they are replaced in training, left out in validation.
    """

    def __init__(self, source: Source, sampler: TrainSampler | ValidSampler, options: Options, world: World) -> None:
        self.sampler = sampler
        self.train = train = isinstance(sampler, TrainSampler)
        self.options = options
        self.device = world.device
        self.world = world
        self.stop = options.on_bad_sample == "stop"
        self.source = source
        self.notes: list[str] = []
        self.bad: dict[str, str] = {}
        self.num_bad = 0
        samples = source.train if train else source.valid
        if source.on_device:
            samples = samples.to(world.device)  # type: ignore[attr-defined]
        self.reader, self.decode = Reader(samples, seed=options.seed, replace=train and not self.stop), None
        if options.decoder == "nvjpeg":
            from muster.train.data import nvjpeg  # here and not above: most runs need no decoder of JPEGs

            samples = nvjpeg.check(options, samples, world.device)
            self.reader.read_sample, self.reader.collate = samples.read_encoded, nvjpeg.collate
            self.decode = nvjpeg.decode
        on_side = world.device.type == "cuda" and not source.on_device
        self.side = torch.cuda.Stream(world.device) if on_side else None  # a second queue of work on the GPU
        self.loader: DataLoader[Batch] | None = None
        self.make_loader(0)
        self.mean = torch.tensor(source.mean, device=world.device).mul(255).view(1, 3, 1, 1)
        self.std = torch.tensor(source.std, device=world.device).mul(255).view(1, 3, 1, 1)

    def make_loader(self, num_workers: int) -> None:
        """Makes the DataLoader anew, with `num_workers` processes; they start with the first epoch."""
        self.num_workers = 0 if self.source.on_device else num_workers
        if self.source.on_device:
            return
        self.loader = DataLoader(
            self.reader,
            batch_sampler=self.sampler,  # type: ignore[arg-type]
            num_workers=num_workers,
            collate_fn=identity,
            pin_memory=self.device.type == "cuda",
            prefetch_factor=AHEAD if num_workers else None,
            persistent_workers=num_workers > 0,
            # A different seed on each rank, to which each worker adds its number.
            generator=generator(self.options.seed, "workers", "train" if self.train else "valid", self.world.rank),
            worker_init_fn=begin_worker,
        )

    def __iter__(self) -> Iterator[Tensors]:
        """Images (NCHW, float) and labels (N), or tokens and targets (both NT), on the device.

        Batches without a readable sample are left out. In validation all ranks get the same number of batches, the last
        perhaps without a target that counts: a model that is spread over the ranks computes on all of them or on none.

        Raises:
            MusterError: a sample can't be read, and bad samples stop the run; or no training sample can be read at all.
        """
        self.num_bad = 0
        missing = 0 if isinstance(self.sampler, TrainSampler) else self.sampler.num_rounds
        batches: Iterable[Any] = self.loader if self.loader is not None else map(self.reader.__getitems__, self.sampler)
        if self.side is None:
            placed = ((batch, self.place(batch)) for batch in batches)
        else:
            placed = prefetch_to_device(batches, self.place, self.side)
        try:
            for batch, tensors in placed:
                if batch.bad:
                    self.count_bad(batch)
                if tensors is not None:
                    missing -= 1
                    yield tensors
        except (ConnectionError, EOFError):  # a worker was killed while it handed a batch over
            time.sleep(5)  # until SIGCHLD comes, on which torch raises a RuntimeError about the worker
            raise
        for _ in range(missing):
            yield self.empty_batch()

    def place(self, batch: Batch) -> Tensors | None:
        """The tensors of `batch` on the device; None where no sample could be read, or a bad one ends the run."""
        if batch.inputs is None or batch.labels is None or (self.stop and batch.bad):
            return None
        return self.prepare(batch.inputs), batch.labels.to(self.device, non_blocking=True)

    def empty_batch(self) -> Tensors:
        """A batch of which no target counts."""
        size = self.source.size
        if self.source.unit == "tokens":
            empty = torch.zeros(1, size, dtype=torch.int64, device=self.device)
            return empty, torch.full_like(empty, IGNORED)
        targets_N = torch.full((1,), IGNORED, device=self.device)
        return self.prepare(torch.zeros(1, 3, size, size, dtype=torch.uint8)), targets_N

    def batch_bytes(self) -> int:
        """Bytes that a batch takes in /dev/shm; 0 without a DataLoader, or where no sample can be read."""
        if self.loader is None:
            return 0
        for sample in range(min(PROBED, len(self.reader.samples))):
            if (inputs := self.reader.__getitems__([Draw(sample, 0)]).inputs) is None:
                continue
            # Encoded files differ in size: assume twice this one's.
            sample_bytes = inputs.nbytes if self.decode is None else 2 * inputs.contents.nbytes
            targets_bytes = self.source.targets_of_sample * torch.int64.itemsize
            return shm_bytes(self.options.batch_size * sample_bytes, self.options.batch_size * targets_bytes)
        return 0

    def close(self) -> None:
        """Ends the workers. Left to the garbage collector, each may be waited for in vain for 5 s."""
        if (workers := getattr(self.loader, "_iterator", None)) is not None:
            workers._shutdown_workers()

    def count_bad(self, batch: Batch) -> None:
        """Counts the bad samples of `batch`, or raises MusterError where they end the run."""
        name, reason = batch.bad[0]
        if self.stop:
            raise MusterError(f"a sample can't be read: {reason}", seen=name, fix=self.source.fix_bad)
        if self.train and batch.inputs is None:
            wrong = f"not one training sample can be read: {reason}"
            fix = "see that the data are complete and that this user may read them"
            raise MusterError(wrong, seen=name, fix=fix, code=ExitCode.FAILED)
        self.num_bad += len(batch.bad)
        self.bad.update(batch.bad)

    def prepare(self, inputs: Any) -> torch.Tensor:
        """`inputs` of a batch on the device, as the model takes them: tokens, or normalised images (NCHW, float).

        uint8 images are copied as they are, a quarter of the traffic of float, and converted on the device.
        """
        if self.source.unit == "tokens":
            return inputs.to(self.device, non_blocking=True)
        images_NCHW = inputs
        if not isinstance(inputs, torch.Tensor):
            assert self.decode is not None
            images_NCHW = self.decode(inputs, self.source.size, self.device)
        layout = torch.channels_last if self.options.channels_last else torch.contiguous_format
        is_raw = images_NCHW.dtype == torch.uint8
        images_NCHW = images_NCHW.to(self.device, non_blocking=True)
        images_NCHW = images_NCHW.to(dtype=torch.float32, memory_format=layout)
        return images_NCHW.sub_(self.mean).div_(self.std) if is_raw else images_NCHW


def identity(batch: Any) -> Any:
    """`batch` unchanged: Reader has collated it already."""
    return batch


def begin_worker(worker: int) -> None:
    """Prepares a worker: leaves signals to its rank, and hides the errors that follow when the rank has ended."""
    leave_signals_to_trainer()
    show = sys.excepthook

    def show_unless_lost(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        # Errors of multiprocessing's thread that hands batches over; a rank that is alive reports them itself.
        if not isinstance(error, OSError | EOFError):
            show(kind, error, trace)

    sys.excepthook = show_unless_lost


def open_batches(source: Source, options: Options, world: World, cores: int = 1) -> tuple[Batches, Batches]:
    """The training and the validation batches of this rank.

    Args:
        cores: how many this rank may use; they limit the workers where the user gave no number.

    Raises:
        MusterError: the training samples don't fill one global batch, `--decoder` does not fit, or /dev/shm does not
            hold the workers' batches.
    """
    share = {"batch_size": options.batch_size, "rank": world.dp_rank, "world_size": world.dp_size}
    sampler = TrainSampler(len(source.train), **share, accumulate=options.accumulate, seed=options.seed)
    if sampler.num_steps == 0:
        wrong = f"{len(source.train)} training samples don't fill one global batch of {sampler.global_batch}"
        sizes = f"--batch-size={options.batch_size}, {plural(world.world_size, 'process')}"
        fix = "a smaller --batch-size or --accumulate, fewer processes, or more samples"
        raise MusterError(wrong, seen=f"{sizes}, --accumulate={options.accumulate}", fix=fix)
    samplers = sampler, ValidSampler(len(source.valid), **share)
    train, valid = (Batches(source, chooser, options, world) for chooser in samplers)
    choose_num_workers(train, valid, options, world, cores)
    return train, valid


SHM = Path("/dev/shm")
IN_USE = 2
"""Batches that the trainer holds: one that it trains on, and the next, which it has already taken over."""

MARGIN = 1.1
"""A tenth more, for what else lies in /dev/shm: semaphores, and what NCCL and MPI pass between ranks of a host."""

MIB = 2**20
MAX_WORKERS = 16
"""The most workers of a rank, where the user gives no number."""


def choose_num_workers(train: Batches, valid: Batches, options: Options, world: World, cores: int) -> None:
    """Gives both loaders the workers that the user asks for, or else as many as the cores and /dev/shm allow.

    Raises:
        MusterError: /dev/shm does not hold the batches of as many workers as the user asks for.
    """
    ranks, free = max(1, world.hosts.count(world.host)), free_shm()
    for batches, given in ((train, options.train_num_workers), (valid, options.valid_num_workers)):
        wanted = choose_workers(batches.source, world.device, cores) if given is None else given
        batch_bytes = batches.batch_bytes() if wanted else 0
        fitting = wanted
        while fitting and shm_needed(fitting, batch_bytes, ranks) > free:
            fitting -= 1
        if fitting < wanted and given is not None:
            asked = shm_needed(wanted, batch_bytes, ranks)
            raise MusterError(
                f"{SHM} is too small for the data loader's workers, or this user may not write there",
                seen=f"{free / MIB:.1f} MiB free, {asked / MIB:.1f} MiB needed by the workers of {ranks} ranks here",
                # A GiB more than needed, for what is there already.
                fix=f"docker run --shm-size={math.ceil(asked / 1024 / MIB) + 1}g, or docker run --ipc=host, "
                f"or --{'train' if batches.train else 'valid'}-num-workers={fitting}",
            )
        if fitting < wanted:
            batches.notes.append(
                f"{fitting} instead of {wanted} workers a rank load {'training' if batches.train else 'validation'} "
                "data: /dev/shm holds no more; docker run --shm-size or --ipc=host makes it larger"
            )
        batches.make_loader(fitting)


def count_cores(world: World) -> int:
    """The number of cores for this rank: an equal share of those that it may use; to be called on all ranks.

    Some launchers bind each rank to cores of its own, others all ranks of a host to the same.
    """
    cores = sorted(os.sched_getaffinity(0))
    place = [world.host, hashlib.blake2b(repr(cores).encode(), digest_size=8).hexdigest()]
    places = world.gather(place)
    num_ranks = sum(host == world.host for host, _ in places)
    usable = control_groups.usable(len(cores) * num_ranks) // num_ranks
    return max(1, min(len(cores) // places.count(place), usable))


def choose_workers(source: Source, device: torch.device, cores: int) -> int:
    """The number of workers: 0 where reading takes almost no time, or where training itself needs the cores (CPU)."""
    if device.type == "cpu" or not source.train.takes_time:
        return 0
    return min(MAX_WORKERS, max(1, cores - 1))


def shm_needed(num_workers: int, batch_bytes: int, ranks: int) -> int:
    """Bytes of all batches that are in /dev/shm at once, with `num_workers` workers for each of `ranks` ranks."""
    return math.ceil((num_workers * AHEAD + IN_USE) * batch_bytes * ranks * MARGIN)


def shm_bytes(*sizes: int) -> int:
    """Bytes that tensors of `sizes` bytes take in /dev/shm: each is a file of whole pages."""
    page = resource.getpagesize()
    return sum(-(-size // page) * page for size in sizes)


def free_shm() -> int:
    """Free bytes in /dev/shm; 0 where this process may not write there."""
    if not os.access(SHM, os.W_OK | os.X_OK):
        return 0
    state = os.statvfs(SHM)
    # A tmpfs without a limit has no size.
    return state.f_bavail * state.f_frsize if state.f_blocks else sys.maxsize
