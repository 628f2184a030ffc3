"""torchvision's FakeData: random images made on the CPU, through PIL and ToTensor as real ones would go."""

from functools import partial

import torch
from torchvision.datasets import FakeData
from torchvision.transforms import ToTensor

from muster.config import Options
from muster.train.data.source import Samples, Source


class Fake(FakeData, Samples):
    """torchvision's FakeData, the same images for the same `random_offset`."""

    takes_time = True

    def read(self, index: int) -> tuple[torch.Tensor, int]:
        image_CHW, label = self[index]
        return image_CHW, int(label)


def open_source(options: Options) -> Source:
    """Random images: `--num-samples` train, a tenth as many validate."""
    size, num_valid = options.pixels, max(1, options.num_samples // 10)
    images = partial(Fake, image_size=(3, size, size), num_classes=options.num_classes, transform=ToTensor())
    # torchvision seeds sample i by i + offset, in 64 bits; validation samples start where the training samples end.
    offset = options.seed * 1_000_003 % 2**63
    return Source(
        train=images(options.num_samples, random_offset=offset),
        valid=images(num_valid, random_offset=offset + options.num_samples),
        num_classes=options.num_classes,
        size=size,
    )
