"""Mixup: each image with a share of another one, and its target likewise (arXiv 1710.09412)."""

import random

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from train.seeds import seed_of


def mix(
    images_NCHW: Tensor, labels_N: Tensor, num_classes: int, alpha: float, *seeds: int | str
) -> tuple[Tensor, Tensor]:
    """The images, mixed with those of the batch in reverse, and their targets: probabilities (NC) of the classes.

    Args:
        alpha: both parameters of the beta distribution that the share is drawn from; 1 is uniform.
        seeds: what the draw depends on.
    """
    share = random.Random(seed_of("mixup", *seeds)).betavariate(alpha, alpha)
    targets_NC = one_hot(labels_N, num_classes).to(images_NCHW.dtype)
    return torch.lerp(images_NCHW.flip(0), images_NCHW, share), torch.lerp(targets_NC.flip(0), targets_NC, share)
