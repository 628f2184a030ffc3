"""The training loops that users would otherwise choose, rewritten after their sources, each in a file of its own.

All get the same model, batch and data, and none spends time on loading: images lie normalised in memory, tokens in a
mapped file. So only the step is compared. A contender keeps what it does differently from others: its optimizer and
memory layout, what it prints and what it sums up.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module

import numpy as np
import torch
from torch import nn

Train = Callable[[int, int], None]
"""Trains: (number of the round, steps)."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """The model and the data for a contender.

    Attributes:
        model: the name, as torchvision and timm know it.
        build: makes a new model, on the CPU, with its first weights.
        size: pixels a side, or tokens of a sequence.
        num_classes: classes of an image, or different tokens.
        batch_size: samples of one rank in a step.
        images_NCHW, labels_N: this rank's normalised images and their labels; None where tokens are trained on.
        tokens_N: token numbers in a mapped file; None where images are trained on.
        shape: of a transformer: layers, heads and model dimension.
    """

    model: str
    build: Callable[[], nn.Module]
    size: int
    num_classes: int
    batch_size: int
    images_NCHW: torch.Tensor | None = None
    labels_N: torch.Tensor | None = None
    tokens_N: np.ndarray | None = None
    shape: tuple[int, int, int] = (0, 0, 0)

    def batches(self, number: int, num_steps: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """The batches of a round: slices of the images and labels in memory."""
        assert self.images_NCHW is not None
        assert self.labels_N is not None
        whole = len(self.labels_N) // self.batch_size
        for step in range(number * num_steps, (number + 1) * num_steps):
            part = slice(step % whole * self.batch_size, (step % whole + 1) * self.batch_size)
            yield self.images_NCHW[part], self.labels_N[part]


OF_IMAGES = {
    "PyTorch's DDP tutorial": "tutorial",
    "NCAR's ResNet example": "ncar",
    "JSC's recipe": "jsc",
    "timm's task": "timm_task",
}
OF_TOKENS = {"nanoGPT's loop, our model": "nanogpt", "nanoGPT's loop and model": "nanogpt_model"}


def build(module: str, work: Work) -> Train:
    """The contender in the file `module`, ready to train."""
    return import_module(f"contenders.{module}").build(work)
