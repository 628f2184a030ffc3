"""From a source to batches on the training device."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, Dataset

from train.data import shm
from train.data.images import BadSample, Images, Source
from train.errors import FAILED, MusterError
from train.models import IGNORED
from train.options import Options
from train.order import Draw, TrainOrder, ValidOrder
from train.seeds import generator, seed_of
from train.world import World

PROBED = 10
"""Samples that are tried to learn how large one is."""


class Batch(NamedTuple):
    """What a loader hands over.

    Attributes:
        images: NCHW, or tokens NT; None where no sample of the batch could be read.
        labels: N, or NT.
        bad: name and reason of each sample that could not be read.
    """

    images: torch.Tensor | None
    labels: torch.Tensor | None
    bad: list[tuple[str, str]]


class Reader(Dataset[Batch]):
    """Reads draws into a batch.

    A sample that can't be read is named in the batch. In training, the next readable one takes its place, so that all
    ranks go on taking the same number of steps; in validation it is left out.
    """

    def __init__(self, images: Images, *, seed: int, replace: bool) -> None:
        self.images = images
        self.seed = seed
        self.replace = replace

    def __getitems__(self, draws: list[Draw]) -> Batch:
        try:
            whole = None if self.images.random else self.images.read_batch([draw.sample for draw in draws])
        except BadSample as error:
            return Batch(None, None, [(error.name, error.reason)])
        if whole is not None:
            return Batch(*whole, [])
        bad: list[tuple[str, str]] = []
        samples = [sample for draw in draws if (sample := self.read(draw, bad)) is not None]
        if not samples:
            return Batch(None, None, bad)
        return Batch(torch.stack([image for image, _ in samples]), torch.tensor([label for _, label in samples]), bad)

    def read(self, draw: Draw, bad: list[tuple[str, str]]) -> tuple[torch.Tensor, int] | None:
        """The sample, or the one in its place; what could not be read is added to `bad`."""
        for distance in range(len(self.images) if self.replace else 1):
            try:
                return self.read_seeded(Draw((draw.sample + distance) % len(self.images), draw.epoch))
            except BadSample as error:
                bad.append((error.name, error.reason))
        return None

    def read_seeded(self, draw: Draw) -> tuple[torch.Tensor, int]:
        """The sample, whose augmentation depends on its number and the epoch, and on no worker or rank."""
        if not self.images.random:
            return self.images.read(draw.sample)
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed_of(self.seed, "augment", draw.epoch, draw.sample))
            return self.images.read(draw.sample)


class Batches:
    """Batches of one rank, on its device, ready for the model.

    Args:
        order: chooses the samples.
        train: replaces bad samples, where they are skipped, instead of leaving them out.
    """

    def __init__(
        self, source: Source, order: TrainOrder | ValidOrder, options: Options, world: World, *, train: bool
    ) -> None:
        self.order = order
        self.train = train
        self.batch_size = options.batch_size
        self.device = world.device
        self.world = world
        self.stop = options.on_bad_sample == "stop"
        self.channels_last = options.channels_last
        self.source = source
        self.bad: dict[str, str] = {}
        self.num_bad = 0
        images = source.train if train else source.valid
        if source.on_device:
            images = images.to(world.device)  # type: ignore[attr-defined]
        self.reader = Reader(images, seed=options.seed, replace=train and not self.stop)
        num_workers = options.train_num_workers if train else options.valid_num_workers
        self.loader: DataLoader[Batch] | None = None
        if not source.on_device:
            self.loader = DataLoader(
                self.reader,
                batch_sampler=order,  # type: ignore[arg-type]
                num_workers=num_workers,
                collate_fn=identity,
                pin_memory=world.device.type == "cuda",
                persistent_workers=num_workers > 0,
                # Distinct for each rank, and each worker adds its number.
                generator=generator(options.seed, "workers", "train" if train else "valid", world.rank),
            )
        self.mean = torch.tensor(source.mean, device=world.device).mul(255).view(1, 3, 1, 1)
        self.std = torch.tensor(source.std, device=world.device).mul(255).view(1, 3, 1, 1)

    def __len__(self) -> int:
        return len(self.order)

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Images (NCHW, float) and labels (N), or tokens and targets (both NT), on the device.

        Batches of which nothing can be read are left out. In validation every rank gets as many as any other, the last
        perhaps with nothing to count in it: a model that is spread over the ranks computes on all of them or on none.

        Raises:
            MusterError: a sample can't be read, and bad samples stop the run.
        """
        self.num_bad = 0
        missing = 0 if isinstance(self.order, TrainOrder) else self.order.num_rounds
        for batch in self.loader if self.loader is not None else map(self.reader.__getitems__, self.order):
            if batch.bad:
                self.note(batch)
            if batch.images is not None and batch.labels is not None:
                missing -= 1
                yield self.prepare(batch.images), batch.labels.to(self.device, non_blocking=True)
        for _ in range(missing):
            yield self.nothing()

    def nothing(self) -> tuple[torch.Tensor, torch.Tensor]:
        """A batch of which no target counts."""
        size = self.source.size
        if self.source.unit == "tokens":
            empty = torch.zeros(1, size, dtype=torch.int64, device=self.device)
            return empty, torch.full_like(empty, IGNORED)
        targets_N = torch.full((1,), IGNORED, device=self.device)
        return self.prepare(torch.zeros(1, 3, size, size, dtype=torch.uint8)), targets_N

    def shm_need(self) -> shm.Need | None:
        """What the workers put into /dev/shm; None where there are none, or where the first samples can't be read."""
        if self.loader is None or self.loader.prefetch_factor is None:
            return None
        for sample in range(min(PROBED, len(self.reader.images))):
            try:
                image, _ = self.reader.read_seeded(Draw(sample, 0))
            except BadSample:
                continue
            targets_bytes = self.source.targets_of_sample * torch.int64.itemsize
            return shm.Need(
                option=f"--{'train' if self.train else 'valid'}-num-workers",
                num_workers=self.loader.num_workers,
                ahead=self.loader.prefetch_factor,
                batch_bytes=shm.bytes_of(self.batch_size * image.nbytes, self.batch_size * targets_bytes),
                num_batches=len(self),
            )
        return None

    def close(self) -> None:
        """Ends the workers. Left to the garbage collector, each may be waited for in vain for 5 s."""
        workers = getattr(self.loader, "_iterator", None)
        if workers is not None:
            workers._shutdown_workers()

    def note(self, batch: Batch) -> None:
        """Counts the bad samples of `batch`, or ends the run over them."""
        name, reason = batch.bad[0]
        if self.stop:
            raise MusterError(
                f"a sample can't be read: {reason}",
                seen=name,
                fix=self.source.fix_bad,
            )
        if self.train and batch.images is None:
            raise MusterError(
                f"not one training sample can be read: {reason}",
                seen=name,
                fix="see that the data are whole and that this user may read them",
                code=FAILED,
            )
        self.num_bad += len(batch.bad)
        self.bad.update(batch.bad)

    def prepare(self, images_NCHW: torch.Tensor) -> torch.Tensor:
        """`images_NCHW` on the device, as the model wants them. Bytes travel as bytes: a quarter of the traffic."""
        if self.source.unit == "tokens":
            return images_NCHW.to(self.device, non_blocking=True)
        layout = torch.channels_last if self.channels_last else torch.contiguous_format
        is_raw = images_NCHW.dtype == torch.uint8
        images_NCHW = images_NCHW.to(self.device, non_blocking=True)
        images_NCHW = images_NCHW.to(dtype=torch.float32, memory_format=layout)
        return images_NCHW.sub_(self.mean).div_(self.std) if is_raw else images_NCHW


def identity(batch: Any) -> Any:
    """`batch`: the reader has made a batch of it already."""
    return batch


def open_batches(source: Source, options: Options, world: World) -> tuple[Batches, Batches]:
    """The training and the validation batches of this rank.

    Raises:
        MusterError: the training samples don't fill one global batch, or /dev/shm does not hold the workers' batches.
    """
    order = TrainOrder(
        len(source.train),
        batch_size=options.batch_size,
        accumulate=options.accumulate,
        rank=world.data_rank,
        world_size=world.num_shares,
        seed=options.seed,
    )
    if order.num_steps == 0:
        raise MusterError(
            f"{len(source.train)} training samples don't fill one global batch of {order.global_batch}",
            seen=f"--batch-size={options.batch_size}, {world.world_size} processes, --accumulate={options.accumulate}",
            fix=fix_batch(len(source.train), options, world),
        )
    valid_order = ValidOrder(
        len(source.valid), batch_size=options.batch_size, rank=world.data_rank, world_size=world.num_shares
    )
    train = Batches(source, order, options, world, train=True)
    valid = Batches(source, valid_order, options, world, train=False)
    needs = [need for batches in (train, valid) if (need := batches.shm_need()) is not None]
    shm.check(needs, ranks=max(1, world.hosts.count(world.host)))
    return train, valid


def fix_batch(num_samples: int, options: Options, world: World) -> str:
    """What makes a global batch that `num_samples` fill."""
    largest = num_samples // (world.num_shares * options.accumulate)
    if largest:
        return f"--batch-size={largest} or less, or more samples, or fewer processes"
    if num_samples >= world.num_shares:
        return f"--batch-size=1 --accumulate={num_samples // world.num_shares} or less, or more samples"
    return f"more samples, or at most {num_samples} processes, with --batch-size=1"
