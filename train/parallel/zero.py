"""Moments cut over replicas (stage 1 of ZeRO, arXiv 1910.02054): each rank steps some of the weights, and sends them.

A weight is on one rank as a whole: any optimizer will do, one that looks at a weight's norm too, and each number comes
out as it does without the cut.
"""

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from train.world import World


def deal(parameters: Iterable[Tensor], num_ranks: int) -> list[list[Tensor]]:
    """`parameters` in `num_ranks` lists of about the same size: the largest first, each to the least that there is."""
    parts: list[list[Tensor]] = [[] for _ in range(num_ranks)]
    sizes = [0] * num_ranks
    for parameter in sorted(parameters, key=lambda parameter: -parameter.numel()):
        rank = sizes.index(min(sizes))
        parts[rank].append(parameter)
        sizes[rank] += parameter.numel()
    return parts


def divide(optimizer: Optimizer, world: World) -> Optimizer:
    """`optimizer` for this rank's weights alone; after each step it sends them, and gets the others'."""
    parts = deal((parameter for group in optimizer.param_groups for parameter in group["params"]), world.world_size)
    own = set(parts[world.rank])
    for group in optimizer.param_groups:
        group["params"] = [parameter for parameter in group["params"] if parameter in own]

    def stepped(*_: Any) -> None:
        with world.waits.running():
            exchange(parts)

    optimizer.register_step_post_hook(stepped)
    return optimizer


@torch.no_grad()
def exchange(parts: list[list[Tensor]]) -> None:
    """Gives each rank the weights `parts[r]` of rank r, and lets go of their gradients, which no optimizer knows of."""
    for rank, weights in enumerate(parts):
        if not weights:
            continue
        flat = torch.cat([weight.flatten() for weight in weights])
        dist.broadcast(flat, src=rank)
        for weight, part in zip(weights, flat.split([weight.numel() for weight in weights]), strict=True):
            weight.copy_(part.view(weight.shape))
            weight.grad = None
