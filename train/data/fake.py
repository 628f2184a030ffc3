"""torchvision's FakeData: random images made on the CPU, through PIL and ToTensor as real ones would go."""

import torch
from torchvision.datasets import FakeData
from torchvision.transforms import ToTensor

from muster.config import Options
from muster.train.data.source import Samples, Source


class Fake(Samples):
    """`num_samples` random images, the same for the same `offset`."""

    takes_time = True

    def __init__(self, num_samples: int, image_size: int, num_classes: int, offset: int) -> None:
        self.data = FakeData(
            num_samples, (3, image_size, image_size), num_classes, transform=ToTensor(), random_offset=offset
        )

    def __len__(self) -> int:
        return len(self.data)

    def read(self, index: int) -> tuple[torch.Tensor, int]:
        image, label = self.data[index]
        return image, int(label)


def open_source(options: Options) -> Source:
    """Random images: `--num-samples` train, a tenth more validate."""
    size = options.pixels
    # torchvision seeds sample i by i + offset, in 64 bits; validation samples start where the training samples end.
    offset = options.seed * 1_000_003 % 2**63
    return Source(
        train=Fake(options.num_samples, size, options.num_classes, offset),
        valid=Fake(max(1, options.num_samples // 10), size, options.num_classes, offset + options.num_samples),
        num_classes=options.num_classes,
        size=size,
    )
