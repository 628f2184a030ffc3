"""From the numbers of samples to a batch: what runs in the loader's workers."""

from typing import NamedTuple

import torch
from torch.utils.data import Dataset

from train.data.encoded import Encoded
from train.data.images import BadSample, Images
from train.data.pictures import Crop
from train.order import Draw
from train.seeds import seed_of


class Raw(NamedTuple):
    """Image files that are decoded on the device.

    Attributes:
        contents: their bytes, end to end: one tensor, since workers hand over each by a file of its own.
        lengths: of each.
        crops: what is used of each.
        names: what to call each when it is bad.
    """

    contents: torch.Tensor
    lengths: list[int]
    crops: list[Crop]
    names: list[str]


class Batch(NamedTuple):
    """What a loader hands over.

    Attributes:
        images: NCHW, or tokens NT, or files that are yet to be decoded; None where no sample of the batch could be
            read.
        labels: N, or NT.
        bad: name and reason of each sample that could not be read.
    """

    images: torch.Tensor | Raw | None
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
            self.reseed(draw)
            return self.images.read(draw.sample)

    def num_bytes(self, draw: Draw) -> int:
        """What the sample takes in a batch.

        Raises:
            BadSample: it can't be read.
        """
        return self.read_seeded(draw)[0].nbytes

    def reseed(self, draw: Draw) -> None:
        """Seeds what the augmentation of a sample is drawn from."""
        torch.default_generator.manual_seed(seed_of(self.seed, "augment", draw.epoch, draw.sample))


class RawReader(Reader):
    """Reads draws into a batch of files that are not decoded, with the crops that `Reader` would take."""

    def __getitems__(self, draws: list[Draw]) -> Batch:
        assert isinstance(self.images, Encoded)
        contents, crops, names = [], list[Crop](), list[str]()
        with torch.random.fork_rng(devices=[]):
            for draw in draws:
                self.reseed(draw)
                try:
                    content, crop = self.images.read_raw(draw.sample)
                except BadSample as error:
                    return Batch(None, None, [(error.name, error.reason)])
                contents.append(content)
                crops.append(crop)
                names.append(self.images.name(draw.sample))
        joined = torch.frombuffer(bytearray(b"".join(contents)), dtype=torch.uint8)
        labels_N = torch.tensor([int(self.images.labels[draw.sample]) for draw in draws])
        return Batch(Raw(joined, list(map(len, contents)), crops, names), labels_N, [])

    def num_bytes(self, draw: Draw) -> int:
        """Twice what this file has: others have more."""
        assert isinstance(self.images, Encoded)
        return 2 * len(self.images.content(draw.sample))
