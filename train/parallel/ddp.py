"""Distributed data parallel: a replica on each rank, gradients averaged while they are computed."""

import inspect
import sys
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook, fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from muster.config import Options
from muster.errors import ExitCode, MusterError
from muster.train.distributed.world import World
from muster.train.health.faults import SharedFault
from muster.train.models import place
from muster.train.optim import Precision
from muster.train.parallel.strategy import ExactGradients, Gradients, Strategy, Sums, are_exact, send_as_one
from muster.units import plural

FIRST_STEPS = 2
"""Steps of a process after which DistributedDataParallel no longer moves parameters between buckets."""


class DDP(Strategy):
    """A replica of the model on each rank; gradients are averaged while they are computed."""

    def check(self) -> None:
        world, options = self.world, self.options
        if world.backend is None:
            return
        on_cpu = world.device.type == "cpu"
        if options.sync_bn and on_cpu:
            raise MusterError(
                "batch normalisation over all ranks is for GPUs: torch has no kernel for CPUs",
                seen=f"--sync-bn, {plural(world.world_size, 'process')} on CPUs",
                fix="leave it out, or a larger --batch-size: each rank normalises by its own samples",
            )
        if options.comm_hook == "powersgd" and on_cpu and torch.cuda.is_available():
            raise MusterError(
                "torch's PowerSGD can train on the CPU only where no GPU is visible",
                seen="--comm-hook=powersgd, --device=cpu on a machine with GPUs",
                fix="--comm-hook=bf16, or hide the GPUs: CUDA_VISIBLE_DEVICES=''",
            )

    def wrap(self, model: nn.Module, precision: Precision) -> nn.Module:
        """`model`, whole on each rank, in a DistributedDataParallel, which averages gradients."""
        world, options = self.world, self.options
        if options.sync_bn:
            model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
        model = place(model, world.device, precision.layout, options.seed)
        # The trainer averages batch normalisation's buffers before they are used, so no step needs to send them.
        # torch 2.15 has a new name for the switch and deprecates the old one.
        known = inspect.signature(DistributedDataParallel).parameters
        sends_buffers = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
        settings: dict[str, Any] = {
            "device_ids": [world.device] if world.device.type == "cuda" else None,
            "bucket_cap_mb": options.bucket_mb,
            "gradient_as_bucket_view": True,
            sends_buffers: False,
        }
        with world.status.connecting():  # it compares the ranks' shapes, and sends the weights of the first
            return DistributedDataParallel(model, **settings)

    def shard_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """`optimizer`; with `--zero1` (stage 1 of ZeRO, arXiv 1910.02054), that of each rank updates some weights only.

        No weight is split between ranks: any optimizer works, and computes the same as without `--zero1`.
        After each step a rank sends its weights, and gets the others'.
        """
        world, options = self.world, self.options
        if not options.zero1:
            return optimizer
        weights = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        parts = partition(weights, world.world_size)
        own = set(parts[world.rank])
        for group in optimizer.param_groups:
            group["params"] = [parameter for parameter in group["params"] if parameter in own]

        def stepped(*_: Any) -> None:
            with world.waits.running():
                broadcast_weights(parts)

        optimizer.register_step_post_hook(stepped)
        return optimizer

    def gradients(self, model: nn.Module) -> Gradients:
        """Gradients that are averaged by the reducer of `model`, or by a hook in its place.

        The reducer's waits for other ranks are measured; with `--sync-bn` none are, as those within layers can't be.
        """
        world, options = self.world, self.options
        assert isinstance(model, DistributedDataParallel)
        if options.comm_hook == "none" and are_exact(world, options):
            return ExactAverages(model, world, options)
        gradients: Gradients
        if options.comm_hook == "powersgd":
            gradients = PowerSGDGradients(options, world)
            model.register_comm_hook(gradients, PowerSGDGradients.reduce)
        elif options.comm_hook == "fp16":
            gradients = HalfGradients(options.accumulate, world)
            model.register_comm_hook(gradients, HalfGradients.reduce)
        else:
            gradients = Gradients(options.accumulate)
            if options.comm_hook == "bf16":
                model.register_comm_hook(None, bf16_compress_hook)
        gradients.waits = None if options.sync_bn else world.waits
        return gradients

    def unwrap(self, model: nn.Module) -> nn.Module:
        return model.get_submodule("module")

    def without_sync(self, model: nn.Module) -> AbstractContextManager[object]:
        assert isinstance(model, DistributedDataParallel)
        return model.no_sync()


def partition(parameters: list[Tensor], num_ranks: int) -> list[list[Tensor]]:
    """Divides `parameters` into `num_ranks` lists of about the same size: largest first, each to the smallest list."""
    parts: list[list[Tensor]] = [[] for _ in range(num_ranks)]
    sizes = [0] * num_ranks
    for parameter in sorted(parameters, key=lambda parameter: -parameter.numel()):
        rank = sizes.index(min(sizes))
        parts[rank].append(parameter)
        sizes[rank] += parameter.numel()
    return parts


def broadcast_weights(parts: list[list[Tensor]]) -> None:
    """Sends the weights `parts[r]` of each rank r to all, and frees all gradients: zero_grad frees only this rank's."""
    for rank, weights in enumerate(parts):
        if not weights:
            continue
        send_as_one(weights, partial(dist.broadcast, src=rank))
        for weight in weights:
            weight.grad = None


class ExactAverages(ExactGradients):
    """Gradients that stay on this rank until the end of a step, and are averaged in double precision then."""

    def __init__(self, model: DistributedDataParallel, world: World, options: Options) -> None:
        super().__init__(model, options.accumulate * world.world_size)
        self.model = model
        self.world = world

    def compute(self, model: nn.Module, inputs: Tensor, targets: Tensor, sums: Sums) -> None:
        with self.model.no_sync():
            super().compute(model, inputs, targets, sums)

    @torch.no_grad()
    def finish(self) -> None:
        held = [self.held[parameter] for parameter in self.parameters if parameter in self.held]
        with self.world.waits.running():
            send_as_one(held, dist.all_reduce)
        super().finish()

    def waits_s(self) -> float | None:
        return self.world.waits.total()


class HalfGradients(Gradients):
    """Gradients that are sent as fp16; it is an error if one is too large for that."""

    def __init__(self, divisor: int, world: World) -> None:
        super().__init__(divisor)
        self.world = world
        self.too_large = torch.zeros((), device=world.device)

    def reduce(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:  # pyright: ignore[reportPrivateImportUsage]
        """The mean of `bucket` over all ranks, for DistributedDataParallel.register_comm_hook."""
        low, high = torch.aminmax(bucket.buffer())
        largest = torch.maximum(-low, high)
        # The hook divides before it adds up, so a sum stays in range. NaN and inf are shown by the loss already.
        self.too_large += (largest > torch.finfo(torch.float16).max) & largest.isfinite()
        return fp16_compress_hook(None, bucket)  # pyright: ignore[reportArgumentType]

    def check(self) -> None:
        """Raises SharedFault, on all ranks, where a gradient of any was too large."""
        if self.world.all_reduce(self.too_large.clone()).item():
            raise SharedFault(
                f"gradients are too large for fp16, whose largest number is {torch.finfo(torch.float16).max:.0f}",
                seen="--comm-hook=fp16",
                fix="--comm-hook=bf16, which has the range of fp32",
                code=ExitCode.FAILED,
            )


class PowerSGDGradients(Gradients):
    """Gradients that are sent as products of two narrow matrices (PowerSGD) from step `start` on, uncompressed before.

    The error of the products is added to the next step's gradients. A resumed run begins without it.
    """

    def __init__(self, options: Options, world: World) -> None:
        super().__init__(options.accumulate)
        self.state = PowerSGDState(
            None,
            matrix_approximation_rank=options.powersgd_rank,
            start_powerSGD_iter=sys.maxsize,  # `begin` sets it
            # Without it a weight that has no gradient would become NaN. torch's own annotation is too narrow.
            orthogonalization_epsilon=1e-8,  # pyright: ignore[reportArgumentType]
            random_seed=options.seed % 2**32,  # NumPy's seeds have no more bits
        )
        self.start = options.warmup_steps if options.powersgd_start is None else options.powersgd_start
        self.world = world
        self.turns = 0

    def reduce(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:  # pyright: ignore[reportPrivateImportUsage]
        """The mean of `bucket` over all ranks, for DistributedDataParallel.register_comm_hook."""
        mean = powerSGD_hook(self.state, bucket)
        if self.world.device.type == "cpu":
            # A bucket takes three collectives, each begun when the one before ends: those of several buckets would mix,
            # in a different order on each rank.
            with self.world.waits.running():
                mean.wait()
        return mean

    def begin(self, step: int) -> None:
        if step >= self.start and self.turns >= FIRST_STEPS:
            self.state.start_powerSGD_iter = 0
        self.turns += 1
