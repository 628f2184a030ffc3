"""Random images, or tokens, made on the training device: what a step costs when data costs nothing."""

import torch

from muster.config import Options
from muster.train.data.sampler import generator
from muster.train.data.source import InMemory, Source
from muster.train.distributed.world import to_device
from muster.train.models.gpt import shape_of

NUM_PATTERNS = 64


class Synthetic(InMemory):
    """A small bank of random samples that repeats: sample i is pattern i modulo NUM_PATTERNS.

    So a sample depends on its number alone, and results don't depend on the world size.

    Args:
        images_NCHW: or tokens (NT).
        labels_N: or the tokens that follow (NT).
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


def open_tokens(options: Options) -> Source:
    """`--num-samples` sequences of the model's length train, a tenth more validate."""
    shape = shape_of(options.model)
    num_tokens, seq_len = options.vocab_size or shape.vocab, options.seq_len or shape.context
    drawn = generator(options.seed, "synthetic")
    texts_NT = torch.randint(0, num_tokens, (NUM_PATTERNS, seq_len + 1), generator=drawn)
    return Source(
        train=Synthetic(options.num_samples, texts_NT[:, :-1], texts_NT[:, 1:]),
        valid=Synthetic(max(1, options.num_samples // 10), texts_NT[:, :-1], texts_NT[:, 1:]),
        num_classes=num_tokens,
        size=seq_len,
        unit="tokens",
        on_device=True,
    )


def open_source(options: Options, folder: str) -> Source:
    """`--num-samples` images train, a tenth more validate; or sequences, for a model that predicts tokens."""
    if options.predicts_tokens:
        return open_tokens(options)
    size = options.pixels
    drawn = generator(options.seed, "synthetic")
    images_NCHW = torch.randint(0, 256, (NUM_PATTERNS, 3, size, size), dtype=torch.uint8, generator=drawn)
    labels_N = torch.randint(0, options.num_classes, (NUM_PATTERNS,), generator=drawn)
    return Source(
        train=Synthetic(options.num_samples, images_NCHW, labels_N),
        valid=Synthetic(max(1, options.num_samples // 10), images_NCHW, labels_N),
        num_classes=options.num_classes,
        size=size,
        mean=(0.5, 0.5, 0.5),
        std=(0.29, 0.29, 0.29),
        on_device=True,
    )
