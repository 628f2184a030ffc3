"""The interface between the sources and the loader: `Samples` with their labels, `Source`, and `open_source`."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist

from muster.config import Options, check_data
from muster.train.data.sampler import generator
from muster.train.distributed.world import World
from muster.train.health.faults import SharedFault, agree
from muster.units import plural


class BadSample(Exception):
    """A sample that can't be read: its file, or its position in the data, and the reason."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"{name}: {reason}")
        self.name = name
        self.reason = reason


class Samples(ABC):
    """Labelled images, by index; or sequences of tokens, whose labels are the tokens that follow."""

    random = False
    """Whether reading draws random numbers (augmentation)."""

    takes_time = False
    """Whether reading takes long enough to be worth worker processes."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def read(self, index: int) -> tuple[torch.Tensor, Any]:
        """The image (CHW: uint8, or float ready for the model) and its class; or tokens (T) and those that follow (T).

        Raises:
            BadSample: it can't be read.
        """

    def read_batch(self, indices: list[int]) -> tuple[torch.Tensor, torch.Tensor] | None:
        """The images (NCHW) and classes (N) of `indices`; None where they are read one by one."""
        return None


class InMemory(Samples):
    """Images that are one tensor in memory: reading a batch is one indexing operation.

    Args:
        images_NCHW: uint8.
        labels_N: int64.
    """

    def __init__(self, images_NCHW: torch.Tensor, labels_N: torch.Tensor) -> None:
        self.images = images_NCHW
        self.labels = labels_N

    def __len__(self) -> int:
        return len(self.labels)

    def read(self, index: int) -> tuple[torch.Tensor, int]:
        return self.images[index], int(self.labels[index])

    def read_batch(self, indices: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        chosen = torch.tensor(indices)
        return self.images[chosen], self.labels[chosen]


@dataclass(frozen=True, kw_only=True)
class Source:
    """Training and validation samples of one kind.

    Attributes:
        num_classes: the number of image classes, or the size of the vocabulary.
        size: pixels per side of an image, or tokens per sequence.
        unit: what rates count: images or tokens.
        fix_bad: the `fix:` line of the error about a sample that can't be read.
        mean, std: of each channel, on the scale 0 to 1; uint8 images are normalised by them on the device.
        on_device: whether the samples are kept on the training device, so that no DataLoader is needed.
        notes: what the user should know about how the data were found, a line each.
    """

    train: Samples
    valid: Samples
    num_classes: int
    size: int
    unit: str = "images"
    fix_bad: str = "repair or remove the file, or go on without it: --on-bad-sample=skip"
    mean: tuple[float, float, float] = (0.485, 0.456, 0.406)
    std: tuple[float, float, float] = (0.229, 0.224, 0.225)
    on_device: bool = False
    notes: tuple[str, ...] = ()

    @property
    def targets_of_sample(self) -> int:
        """The number of targets of one full sample: one class, or the next token at each of `size` positions."""
        return self.size if self.unit == "tokens" else 1

    @property
    def num_valid_targets(self) -> int:
        """The number of targets of all validation samples together."""
        return getattr(self.valid, "num_targets", len(self.valid))


def split(num_samples: int, valid_share: float, seed: int) -> tuple[list[int], list[int]]:
    """The indices that train and those that validate: disjoint, at least one validates, the same on every rank."""
    order = torch.randperm(num_samples, generator=generator(seed, "split")).tolist()
    num_valid = max(1, round(num_samples * valid_share))
    return order[num_valid:], order[:num_valid]


def left_out(number: int, what: str) -> tuple[str, ...]:
    """A note that `number` files are left out, and why (`what`); none for 0."""
    return (f"{plural(number, 'file')} left out: {what}",) if number else ()


def open_source(options: Options, world: World | None = None) -> Source:
    """Opens the source in `--data`; rank 0 alone searches its folder: a thousand would overload the file server.

    Args:
        world: all ranks, which call this together; None for a process alone.

    Raises:
        SharedFault: on all ranks, where there is no such source, it does not fit the model, its data are missing or
            not in the expected layout, or the nodes have different data.
    """
    world = world or World()
    agree(world, lambda: check_data(options.data, options.model))
    module = import_module("muster.train.data." + options.data.partition(":")[0])
    found: list[Any] = []
    if hasattr(module, "scan"):
        found.append(agree(world, lambda: module.scan(options) if world.main else None))
        if world.backend is not None:
            dist.broadcast_object_list(found, src=0, device=world.device)
    source: Source = agree(world, lambda: module.open_source(options, *found))
    # A node may have a file of its own under the same name.
    hosts = world.hosts_by(f"{len(source.train)} train and {len(source.valid)} validate")
    if len(hosts) > 1:
        seen = f"--data={options.data}: {'; '.join(f'{sizes} on {names}' for sizes, names in hosts.items())}"
        raise SharedFault("not all ranks have the same data", seen=seen, fix="copy the same files to all nodes")
    return source
