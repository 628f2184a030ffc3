"""The floating point operations of training on one sample, counted while the model computes without content."""

import torch
from torch.utils.flop_counter import FlopCounterMode

from train.models import gpt, images, loss_of
from train.options import Options

BATCH = 2
"""Samples that are counted: one alone can't be normalised where its features are one number."""


def count(options: Options, num_classes: int, size: int) -> float:
    """Operations of one sample (an image of `size` pixels a side, a sequence of `size` tokens), forth and back.

    They are those of the model: a multiplication and an addition are two, attention counts as if it were not causal,
    and what activation checkpointing computes again counts once (the model FLOPs of arXiv 2204.02311, appendix B).
    """
    with torch.device("meta"):
        if options.predicts_tokens:
            model = gpt.GPT(gpt.shape_of(options.model), num_classes)
            inputs = targets = torch.zeros(BATCH, size, dtype=torch.int64)
        else:
            model = images.construct(options.model, num_classes, images.arguments_for(options.model, size))
            inputs, targets = torch.empty(BATCH, 3, size, size), torch.zeros(BATCH, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter:
        loss_of(model(inputs), targets).backward()
    return counter.get_total_flops() / BATCH
