"""Gradients of many micro-batches added up such that the sum does not depend on who adds what to what.

In fp32 the order of a sum decides its last bit, and rings, trees and a single process that accumulates all have orders
of their own. A ResNet at its start can turn a last bit into another path within ten steps. Added up in double precision
and rounded once, the sum is the same for all of them: then 4 ranks, 2 ranks that accumulate 2, and 1 process that
accumulates 4 train the same weights, bit for bit.

This is done on CPUs only, where one compares and debugs. It costs twice the bytes on the network.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim import Optimizer

from train.metrics import Sums
from train.models import logits_of, loss_of
from train.stopwatch import Mark, Stopwatch
from train.world import World


class Gradients:
    """How the loop adds up one step's micro-batches: here as the parameters do by themselves.

    Args:
        accumulate: micro-batches of a step on this rank.

    Attributes:
        smoothing: the share of each target that goes to all classes alike, in training.
        criterion: (outputs, targets, smoothing) -> what is trained on.
        waits: takes how long the end of a backward pass waits for other ranks; None where it is no such wait, or not
            only there.
    """

    smoothing = 0.0
    criterion: Callable[..., Tensor] = staticmethod(loss_of)
    waits: Stopwatch | None = None

    def __init__(self, accumulate: int) -> None:
        self.accumulate = accumulate

    def loss(self, outputs: Tensor | tuple[Tensor, ...], targets: Tensor) -> Tensor:
        """What is trained on: the mean over `targets`."""
        return self.criterion(outputs, targets, self.smoothing)

    def begin(self, optimizer: Optimizer, step: int) -> None:
        """Called before each step; `step` of them are done in all."""

    def compute(
        self, model: nn.Module, inputs: Tensor, targets: Tensor, autocast: AbstractContextManager[object], sums: Sums
    ) -> None:
        """One micro-batch, forth (within `autocast`) and back; its loss goes into `sums`."""
        with autocast:
            outputs = model(inputs)
            loss = self.loss(outputs, targets)
        scaled = loss / self.accumulate
        if self.waits is None:
            scaled.backward()
        else:
            go_back(scaled, self.waits)
        sums.add(loss, logits_of(outputs), targets)

    def waits_s(self) -> float | None:
        """Seconds of all counted steps in which this rank waited for others; None where that is not known."""
        return None if self.waits is None else self.waits.total()

    def evaluate(self, model: nn.Module, inputs: Tensor, targets: Tensor, sums: Sums) -> None:
        """The loss of a batch, into `sums`."""
        outputs = model(inputs)
        sums.add(loss_of(outputs, targets), logits_of(outputs), targets)

    def hold(self) -> None:
        """Called after each micro-batch but the last."""

    def finish(self) -> None:
        """Called after the last micro-batch, when the strategy has done its part: the gradients are complete then."""

    def report(self) -> dict[str, Any]:
        """What the summary should tell of how they were computed; called on all ranks, after the last step."""
        return {}

    def settle(self, optimizer: Optimizer) -> None:
        """Called before the weights are looked at, for validation and checkpoints: all ranks have the same then."""

    def is_settled(self, step: int) -> bool:
        """Whether `settle` after `step` steps in all leaves training as it is."""
        return True

    def clip(self, model: nn.Module, largest: float) -> None:
        """Shortens all gradients together to the norm `largest`, over all ranks that hold parts of them."""
        parameters = [parameter for parameter in model.parameters() if parameter.grad is not None]
        norm = get_total_norm([parameter.grad for parameter in parameters if parameter.grad is not None])
        if isinstance(norm, DTensor):
            norm = norm.full_tensor()
        clip_grads_with_norm_(parameters, largest, norm)


def go_back(loss: Tensor, waits: Stopwatch) -> None:
    """The backward pass from `loss`; what comes after this rank's own part of it is counted by `waits`.

    What is to be called at the end of a backward pass is called in the order in which it was asked for: this asks at
    the first gradient, DistributedDataParallel (which then waits for the buckets) at the last.
    """
    computed: list[Mark | None] = []

    def begun(_: Tensor) -> None:
        engine: Any = torch.autograd.Variable._execution_engine  # pyright: ignore[reportAttributeAccessIssue]
        engine.queue_callback(lambda: computed.append(waits.begin()))

    loss.register_hook(begun)
    loss.backward()
    waits.end(computed[0] if computed else None)


class SummedGradients(Gradients):
    """For a strategy that sums, and divides by the number of all micro-batches, by itself."""

    def __init__(self) -> None:
        super().__init__(1)


class ExactGradients(SummedGradients):
    """The gradients of one step's micro-batches, in double precision.

    Attributes:
        num_parts: micro-batches of a step over all ranks: the sum is divided by it.
    """

    def __init__(self, model: nn.Module, num_parts: int) -> None:
        super().__init__()
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.num_parts = num_parts
        self.held: dict[Tensor, Tensor] = {}

    @torch.no_grad()
    def hold(self) -> None:
        """Takes the gradients of a micro-batch out of the parameters, and adds them to what is held."""
        for parameter in self.parameters:
            if parameter.grad is None:
                continue
            if parameter in self.held:
                self.held[parameter] += parameter.grad
            else:
                self.held[parameter] = parameter.grad.double()
            parameter.grad.zero_()

    @torch.no_grad()
    def finish(self) -> None:
        """Puts the mean over all micro-batches into the parameters."""
        for parameter in self.parameters:
            if parameter.grad is not None:
                total = parameter.grad.double()
                if parameter in self.held:
                    total += self.held[parameter]
                parameter.grad.copy_(total / self.num_parts)
        self.held.clear()


class ReducedGradients(ExactGradients):
    """The same where each rank has some of the micro-batches, and DistributedDataParallel calls a hook.

    Args:
        num_own: micro-batches of a step on this rank.
    """

    def __init__(self, model: nn.Module, num_own: int, world_size: int) -> None:
        super().__init__(model, num_own * world_size)
        self.num_own = num_own

    def finish(self) -> None:
        """Nothing: the hook has done it."""

    def reduce(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:  # pyright: ignore[reportPrivateImportUsage]
        """The mean over all micro-batches of all ranks, for DistributedDataParallel's communication hook."""
        buffer, total = bucket.buffer(), self.total(bucket)
        done = dist.all_reduce(total, async_op=True)
        if done is None:
            raise RuntimeError("this rank is not part of the process group")

        def mean(future: torch.futures.Future[Any]) -> Tensor:
            # gloo's future resolves to a list of one tensor.
            value = future.value()
            return buffer.copy_((value[0] if isinstance(value, list) else value) / self.num_parts)

        return done.get_future().then(mean)

    def keep(self, bucket: dist.GradBucket) -> Tensor:  # pyright: ignore[reportPrivateImportUsage]
        """The mean over this rank's micro-batches alone."""
        return bucket.buffer().copy_(self.total(bucket) / self.num_own)

    def total(self, bucket: dist.GradBucket) -> Tensor:  # pyright: ignore[reportPrivateImportUsage]
        """The sum over this rank's micro-batches."""
        total = bucket.buffer().double()
        start = 0
        for parameter in bucket.parameters():
            held = self.held.pop(parameter, None)
            if held is not None:
                # The buffer holds a gradient in the order of its parameter's memory, channels_last or not, whatever
                # strides bucket.gradients() tells.
                part = total[start : start + parameter.numel()]
                part.as_strided(parameter.size(), parameter.stride()).add_(held)
            start += parameter.numel()
        return total


def are_exact(world: World, accumulate: int) -> bool:
    """True where gradients are to be added up exactly: on CPUs; not of two parts, which have but one order."""
    return world.device.type == "cpu" and world.world_size * accumulate > 2
