"""Ranks that train apart, and average their weights every some steps (post-local SGD, arXiv 1808.07217).

The first steps average gradients, as ddp does. After them nothing travels but the weights and moments, at each meeting:
then all ranks have the same state, and a checkpoint holds the whole of it.
"""

from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from train.options import Options
from train.parallel.gradients import Gradients, ReducedGradients
from train.parallel.hooks import HookedGradients
from train.world import World

MOST = 2**24
"""How many numbers are averaged at a time."""


class LocalGradients(Gradients):
    """Gradients that stay on their rank from a step on, and weights that are averaged instead.

    Args:
        averaged: how gradients are averaged before.
    """

    def __init__(self, averaged: HookedGradients | ReducedGradients, world: World, options: Options) -> None:
        super().__init__(averaged.accumulate)
        assert options.local_sgd is not None
        self.averaged = averaged
        self.world = world
        self.start, self.period = options.local_sgd_start, options.local_sgd
        self.apart = False

    def begin(self, optimizer: Optimizer, step: int) -> None:
        self.averaged.begin(optimizer, step)
        if (step - self.start) % self.period == 0:
            self.meet(optimizer)
        self.apart = step >= self.start

    def hold(self) -> None:
        self.averaged.hold()

    def finish(self) -> None:
        self.averaged.finish()

    def reduce(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:  # pyright: ignore[reportPrivateImportUsage]
        """What becomes of a bucket in this step, for DistributedDataParallel's communication hook."""
        if not self.apart:
            return self.averaged.reduce(bucket)
        kept: torch.futures.Future[Tensor] = torch.futures.Future()
        kept.set_result(self.averaged.keep(bucket))
        return kept

    def settle(self, optimizer: Optimizer) -> None:
        self.averaged.settle(optimizer)
        self.meet(optimizer)

    def is_settled(self, step: int) -> bool:
        return not self.apart or (step - self.start) % self.period == 0  # `begin` is about to do it

    def meet(self, optimizer: Optimizer) -> None:
        """Makes weights and moments their mean over all ranks, if these have been apart."""
        if self.apart:
            with self.world.waits.running():
                average(tensors_of(optimizer), self.world)
        self.apart = False


def tensors_of(optimizer: Optimizer) -> Iterator[Tensor]:
    """The weights that `optimizer` trains, and their moments."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            yield parameter
            for value in optimizer.state[parameter].values():
                if isinstance(value, Tensor) and value.shape == parameter.shape:
                    yield value


@torch.no_grad()
def average(tensors: Iterable[Tensor], world: World) -> None:
    """Makes each of `tensors` its mean over all ranks; on CPUs they are added up in double precision."""
    for some in parts_of(tensors):
        flat = torch.cat([tensor.flatten() for tensor in some])
        mean = world.all_reduce(flat.double() if flat.device.type == "cpu" else flat) / world.world_size
        for tensor, part in zip(some, mean.split([tensor.numel() for tensor in some]), strict=True):
            tensor.copy_(part.view(tensor.shape))


def parts_of(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """`tensors` in lists that have about `MOST` numbers each."""
    some: list[Tensor] = []
    for tensor in tensors:
        some.append(tensor)
        if sum(each.numel() for each in some) >= MOST:
            yield some
            some = []
    if some:
        yield some
