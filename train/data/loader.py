"""From a source to batches on the training device."""

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader

from train.data import decoders, shm, workers
from train.data.images import BadSample, Source
from train.data.prefetch import SideStream, ahead
from train.data.reader import Batch, Raw, RawReader, Reader
from train.errors import FAILED, MusterError
from train.faults import agree
from train.models import IGNORED
from train.options import Options
from train.order import Draw, TrainOrder, ValidOrder
from train.seeds import generator
from train.world import World

PROBED = 10
"""Samples that are tried to learn how large one is."""

AHEAD = 2
"""Batches that each worker makes before they are asked for: DataLoader's own default."""


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
        self.notes: list[str] = []
        self.bad: dict[str, str] = {}
        self.num_bad = 0
        images = source.train if train else source.valid
        if source.on_device:
            images = images.to(world.device)  # type: ignore[attr-defined]
        kind = Reader if options.decoder == "cpu" else RawReader
        self.reader = kind(images, seed=options.seed, replace=train and not self.stop)
        self.decoder = decoders.decoder_for(options, source.size, world.device)
        self.side = SideStream(world.device) if world.device.type == "cuda" and not source.on_device else None
        self.seed = options.seed
        self.loader: DataLoader[Batch] | None = None
        self.start_workers(0)
        self.mean = torch.tensor(source.mean, device=world.device).mul(255).view(1, 3, 1, 1)
        self.std = torch.tensor(source.std, device=world.device).mul(255).view(1, 3, 1, 1)

    def start_workers(self, num_workers: int) -> None:
        """Makes the loader anew, with so many processes; they start with the first epoch."""
        self.num_workers = num_workers
        if self.source.on_device:
            return
        self.loader = DataLoader(
            self.reader,
            batch_sampler=self.order,  # type: ignore[arg-type]
            num_workers=num_workers,
            collate_fn=identity,
            pin_memory=self.device.type == "cuda",
            prefetch_factor=AHEAD if num_workers else None,
            persistent_workers=num_workers > 0,
            # Distinct for each rank, and each worker adds its number.
            generator=generator(self.seed, "workers", "train" if self.train else "valid", self.world.rank),
            worker_init_fn=workers.begin,
        )

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
        for batch, placed in self.placed():
            if batch.bad:
                self.note(batch)
            if placed is not None:
                missing -= 1
                yield placed
        for _ in range(missing):
            yield self.nothing()

    def placed(self) -> Iterator[tuple[Batch, tuple[torch.Tensor, torch.Tensor] | None]]:
        """Each batch as it was read, and on the device; on GPUs the next is on its way by then."""
        batches = self.loader if self.loader is not None else map(self.reader.__getitems__, self.order)
        if self.side is not None:
            return ahead(batches, self.place, self.side)
        return ((batch, self.place(batch)) for batch in batches)

    def place(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor] | None:
        """`batch` on the device; None where nothing of it could be read."""
        if batch.images is None or batch.labels is None:
            return None
        return self.prepare(batch.images), batch.labels.to(self.device, non_blocking=True)

    def nothing(self) -> tuple[torch.Tensor, torch.Tensor]:
        """A batch of which no target counts."""
        size = self.source.size
        if self.source.unit == "tokens":
            empty = torch.zeros(1, size, dtype=torch.int64, device=self.device)
            return empty, torch.full_like(empty, IGNORED)
        targets_N = torch.full((1,), IGNORED, device=self.device)
        return self.prepare(torch.zeros(1, 3, size, size, dtype=torch.uint8)), targets_N

    def shm_need(self, num_workers: int) -> shm.Need | None:
        """What so many workers put into /dev/shm; None where there are none, or where no sample can be read."""
        if self.loader is None or not num_workers:
            return None
        for sample in range(min(PROBED, len(self.reader.images))):
            try:
                sample_bytes = self.reader.num_bytes(Draw(sample, 0))
            except BadSample:
                continue
            targets_bytes = self.source.targets_of_sample * torch.int64.itemsize
            return shm.Need(
                option=f"--{'train' if self.train else 'valid'}-num-workers",
                num_workers=num_workers,
                ahead=AHEAD,
                batch_bytes=shm.bytes_of(self.batch_size * sample_bytes, self.batch_size * targets_bytes),
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

    def prepare(self, images: torch.Tensor | Raw) -> torch.Tensor:
        """`images` on the device, as the model wants them. Bytes travel as bytes: a quarter of the traffic."""
        if isinstance(images, Raw):
            assert self.decoder is not None
            images_NCHW = self.decoder(images)
        else:
            images_NCHW = images
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


def open_agreed(source: Source, options: Options, world: World) -> tuple[Batches, Batches]:
    """The training and the validation batches of this rank, once all ranks have theirs.

    Raises:
        SharedFault: on all ranks, as `open_batches`.
    """
    cores = workers.cores_of(world)
    return agree(world, lambda: open_batches(source, options, world, cores))


def open_batches(source: Source, options: Options, world: World, cores: int = 1) -> tuple[Batches, Batches]:
    """The training and the validation batches of this rank.

    Args:
        cores: that this rank may use, for workers of which the user gave no number.

    Raises:
        MusterError: the training samples don't fill one global batch, `--decoder` does not fit, or /dev/shm does not
            hold the workers' batches.
    """
    decoders.refuse_unfit(options, source, world.device)
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
    ranks, needs = max(1, world.hosts.count(world.host)), list[shm.Need]()
    for batches, given in ((train, options.train_num_workers), (valid, options.valid_num_workers)):
        wanted = workers.automatic(source, world.device, cores) if given is None else given
        need = batches.shm_need(wanted)
        if need is not None and given is None:
            fitting = min(wanted, need.workers_for(shm.room(), ranks))
            if fitting < wanted:
                what = "training" if batches.train else "validation"
                batches.notes.append(
                    f"{fitting} instead of {wanted} workers a rank load {what} data: /dev/shm holds no more; "
                    "docker run --shm-size or --ipc=host makes it larger"
                )
            wanted = fitting
        elif need is not None:
            needs.append(need)
        batches.start_workers(wanted)
    shm.check(needs, ranks=ranks)
    return train, valid


def fix_batch(num_samples: int, options: Options, world: World) -> str:
    """What makes a global batch that `num_samples` fill."""
    largest = num_samples // (world.num_shares * options.accumulate)
    if largest:
        return f"--batch-size={largest} or less, or more samples, or fewer processes"
    if num_samples >= world.num_shares:
        return f"--batch-size=1 --accumulate={num_samples // world.num_shares} or less, or more samples"
    return f"more samples, or at most {num_samples} processes, with --batch-size=1"
