"""Gradients that are made smaller on their way between ranks, by the hooks that torch has for it."""

import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.optim import Optimizer

from train.errors import FAILED
from train.faults import SharedFault
from train.options import Options
from train.parallel.gradients import Gradients
from train.world import World

FIRST_STEPS = 2
"""Steps of a process after which DistributedDataParallel no longer changes what is in which bucket."""


class HookedGradients(Gradients):
    """Gradients averaged bucket by bucket, by a hook of torch's.

    Args:
        hook: takes `state` and a bucket, and returns its mean over all ranks.
    """

    def __init__(self, accumulate: int, hook: Callable[..., torch.futures.Future[Tensor]], state: Any = None) -> None:
        super().__init__(accumulate)
        self.hook = hook
        self.state = state

    def reduce(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:  # pyright: ignore[reportPrivateImportUsage]
        """The mean over all ranks, for DistributedDataParallel's communication hook."""
        return self.hook(self.state, bucket)

    def keep(self, bucket: dist.GradBucket) -> Tensor:  # pyright: ignore[reportPrivateImportUsage]
        """The mean over this rank's micro-batches alone."""
        return bucket.buffer()


class HalfGradients(HookedGradients):
    """Gradients that travel as fp16, of which none may be too large for it."""

    def __init__(self, accumulate: int, world: World) -> None:
        super().__init__(accumulate, fp16_compress_hook)
        self.world = world
        self.too_large = torch.zeros((), device=world.device)

    def reduce(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:  # pyright: ignore[reportPrivateImportUsage]
        low, high = torch.aminmax(bucket.buffer())
        largest = torch.maximum(-low, high)
        # The hook divides before it adds up, so a sum stays in range. What is no number already is told by the loss.
        self.too_large += (largest > torch.finfo(torch.float16).max) & largest.isfinite()
        return super().reduce(bucket)

    def settle(self, optimizer: Optimizer) -> None:
        """Raises SharedFault, on all ranks, where a gradient of any was too large."""
        if self.world.all_reduce(self.too_large.clone()).item():
            raise SharedFault(
                f"gradients are too large for fp16, which ends at {torch.finfo(torch.float16).max:.0f}",
                seen="--comm-hook=fp16",
                fix="--comm-hook=bf16, which ends where fp32 does; the last checkpoint is from before: --resume",
                code=FAILED,
            )


class PowerGradients(HookedGradients):
    """Gradients that travel as products of two narrow matrices (PowerSGD), from a step on; before it as they are.

    What the products miss is added to the next step's gradients. A run that is continued begins without it.
    """

    def __init__(self, options: Options, world: World) -> None:
        state = PowerSGDState(
            None,
            matrix_approximation_rank=options.powersgd_rank,
            start_powerSGD_iter=sys.maxsize,  # `begin` knows when
            # Without it a weight that has no gradient would become no number. torch's own type for it is too narrow.
            orthogonalization_epsilon=1e-8,  # pyright: ignore[reportArgumentType]
            random_seed=options.seed,
        )
        super().__init__(options.accumulate, powerSGD_hook, state)
        self.start = options.warmup_steps if options.powersgd_start is None else options.powersgd_start
        self.world = world
        self.turns = 0

    def reduce(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:  # pyright: ignore[reportPrivateImportUsage]
        mean = super().reduce(bucket)
        if self.world.device.type == "cpu":
            # A bucket takes three rounds. gloo's threads would mix those of several buckets, on each rank differently.
            with self.world.waits.running():
                mean.wait()
        return mean

    def begin(self, optimizer: Optimizer, step: int) -> None:
        if step >= self.start and self.turns >= FIRST_STEPS:
            self.state.start_powerSGD_iter = 0
        self.turns += 1
