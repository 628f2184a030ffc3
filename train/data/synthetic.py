"""Random images or tokens, kept on the training device: for measuring steps without the cost of data."""

import torch

from muster.config import Options
from muster.train.data.sampler import generator
from muster.train.data.source import InMemory, Source
from muster.train.distributed.world import to_device
from muster.train.models.gpt import shape_of

NUM_PATTERNS = 64


class Synthetic(InMemory):
    """A small bank of random samples that repeats: sample i is pattern i modulo NUM_PATTERNS.

    So a sample depends on its index alone, and results don't depend on the world size.

    Args:
        images_NCHW: images, or tokens (NT).
        labels_N: classes, or next tokens (NT).
    """

    def __init__(self, num_samples: int, images_NCHW: torch.Tensor, labels_N: torch.Tensor) -> None:
        super().__init__(images_NCHW, labels_N)
        self.num_samples = num_samples
        self.num_targets = num_samples * labels_N[0].numel()

    def __len__(self) -> int:
        return self.num_samples

    def read(self, index: int) -> tuple[torch.Tensor, int]:
        return super().read(index % NUM_PATTERNS)

    def read_batch(self, indices: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        chosen = to_device([index % NUM_PATTERNS for index in indices], self.images.device)
        return self.images[chosen], self.labels[chosen]

    def to(self, device: torch.device) -> "Synthetic":
        """The same samples, on `device`."""
        return Synthetic(self.num_samples, self.images.to(device), self.labels.to(device))


def open_source(options: Options) -> Source:
    """Random images, or sequences for a model that predicts tokens: `--num-samples` train, a tenth as many validate."""
    drawn = generator(options.seed, "synthetic")
    if options.predicts_tokens:
        shape = shape_of(options.model)
        num_classes, size = options.vocab_size or shape.vocab, options.seq_len or shape.context
        texts_NT = torch.randint(0, num_classes, (NUM_PATTERNS, size + 1), generator=drawn)
        samples = texts_NT[:, :-1], texts_NT[:, 1:]
    else:
        num_classes, size = options.num_classes, options.pixels
        images_NCHW = torch.randint(0, 256, (NUM_PATTERNS, 3, size, size), dtype=torch.uint8, generator=drawn)
        samples = images_NCHW, torch.randint(0, num_classes, (NUM_PATTERNS,), generator=drawn)
    return Source(
        train=Synthetic(options.num_samples, *samples),
        valid=Synthetic(max(1, options.num_samples // 10), *samples),
        num_classes=num_classes,
        size=size,
        unit="tokens" if options.predicts_tokens else "images",
        mean=(0.5, 0.5, 0.5),
        std=(0.29, 0.29, 0.29),
        on_device=True,
    )
