"""Random images made on the training device: what a step costs when data costs nothing."""

import torch

from train.data.images import InMemory, Source
from train.options import Options
from train.seeds import generator

NUM_PATTERNS = 64


class Synthetic(InMemory):
    """A small bank of random images that repeats: sample i shows pattern i modulo NUM_PATTERNS.

    So a sample depends on its number alone, and results don't depend on the world size.
    """

    def __init__(self, num_samples: int, images_NCHW: torch.Tensor, labels_N: torch.Tensor) -> None:
        super().__init__(images_NCHW, labels_N)
        self.num_samples = num_samples

    def __len__(self) -> int:
        return self.num_samples

    def read(self, index: int) -> tuple[torch.Tensor, int]:
        return super().read(index % NUM_PATTERNS)

    def read_batch(self, indices: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        chosen = torch.tensor([index % NUM_PATTERNS for index in indices], device=self.images.device)
        return self.images[chosen], self.labels[chosen]

    def to(self, device: torch.device) -> "Synthetic":
        """The same samples, on `device`."""
        return Synthetic(self.num_samples, self.images.to(device), self.labels.to(device))


def open_source(options: Options, folder: str) -> Source:
    """`--num-samples` images train, a tenth more validate."""
    size = options.image_size or 224
    drawn = generator(options.seed, "synthetic")
    images_NCHW = torch.randint(0, 256, (NUM_PATTERNS, 3, size, size), dtype=torch.uint8, generator=drawn)
    labels_N = torch.randint(0, options.num_classes, (NUM_PATTERNS,), generator=drawn)
    return Source(
        train=Synthetic(options.num_samples, images_NCHW, labels_N),
        valid=Synthetic(max(1, options.num_samples // 10), images_NCHW, labels_N),
        num_classes=options.num_classes,
        image_size=size,
        mean=(0.5, 0.5, 0.5),
        std=(0.29, 0.29, 0.29),
        on_device=True,
    )
