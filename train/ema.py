"""A moving average of the weights: smoother than the weights of any one step, and better on new data at large rates."""

# torch's own optimizers are made of these functions, which have no public names.
# pyright: reportPrivateImportUsage=false

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor


class MovingAverage:
    """The average of a model's weights and running statistics over the last steps; of a cut one, of this rank's parts.

    Args:
        model: as its strategy has wrapped it, before its first step.
        decay: what is left of the average at each step, once many are made.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.model = model
        self.decay = decay
        # What is kept here are the parts that a rank has of a cut weight, not what it gathers for a while.
        self.live = {**dict(model.named_parameters()), **{name: b for name, b in model.named_buffers() if is_float(b)}}
        self.state = {name: tensor.detach().clone() for name, tensor in self.live.items()}

    @torch.no_grad()
    def begin(self) -> None:
        """Makes the weights of now the average."""
        torch._foreach_copy_(local_parts(self.state), local_parts(self.live))

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Takes in the weights after `step` (from 0), which weigh more at first, when there is little to average."""
        decay = min(self.decay, (1 + step) / (10 + step))
        torch._foreach_lerp_(local_parts(self.state), local_parts(self.live), 1 - decay)

    @torch.no_grad()
    def swap(self) -> None:
        """Puts the average into the model, and the model's weights in its place; or back."""
        for average, weight in zip(local_parts(self.state), local_parts(self.live), strict=True):
            other = average.clone()
            average.copy_(weight)
            weight.copy_(other)
        for part in self.model.modules():
            if isinstance(part, FSDPModule):
                part.reshard()  # what was gathered before is no longer what the parts hold

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """A context in which the model has the averaged weights."""
        self.swap()
        try:
            yield
        finally:
            self.swap()


def is_float(tensor: Tensor) -> bool:
    """True where a mean of such tensors has a meaning."""
    return tensor.is_floating_point()


def local_parts(tensors: dict[str, Tensor]) -> list[Tensor]:
    """What this rank holds of each."""
    return [tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach() for tensor in tensors.values()]
