"""torch's SGD on CPUs, whose fused kernel wants weights, gradients and momenta in the order of their memory."""

# torch's own optimizers are made of these functions, which have no public names.
# pyright: reportPrivateImportUsage=false

from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD


class FusedSGD(SGD):
    """SGD in one pass over the weights.

    torch 2.15 copies gradients that lie as channels_last before each step, which takes longer than the step; and where
    a gradient lies otherwise than its weight, it adds numbers to those of other places. Here the kernel gets each
    tensor as it lies in memory.
    """

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One step."""
        assert closure is None
        for group in self.param_groups:
            weights: list[Tensor] = [parameter for parameter in group["params"] if parameter.grad is not None]
            if not weights:
                continue
            momenta = [self.momentum_of(weight) for weight in weights] if group["momentum"] else []
            torch._fused_sgd_(
                [as_it_lies(weight, weight) for weight in weights],
                [as_it_lies(weight.grad, weight) for weight in weights if weight.grad is not None],
                [as_it_lies(momentum, weight) for momentum, weight in zip(momenta, weights, strict=bool(momenta))],
                weight_decay=group["weight_decay"],
                momentum=group["momentum"],
                lr=group["lr"],
                dampening=0.0,
                nesterov=False,
                maximize=False,
                is_first_step=False,
            )

    def momentum_of(self, weight: Tensor) -> Tensor:
        """The momentum of `weight`, in its layout; nothing before the first step."""
        state = self.state[weight]
        momentum = state.get("momentum_buffer")
        if momentum is None:
            momentum = state["momentum_buffer"] = torch.zeros_like(weight)
        elif not lie_alike(momentum, weight):  # from a checkpoint of a run with another layout
            momentum = state["momentum_buffer"] = like(momentum, weight)
        return momentum


def as_it_lies(tensor: Tensor, weight: Tensor) -> Tensor:
    """`tensor` with its dimensions in the order in which those of `weight` lie in memory."""
    tensor = tensor if lie_alike(tensor, weight) else like(tensor, weight)
    if weight.is_contiguous():
        return tensor
    return tensor.permute(sorted(range(weight.dim()), key=lambda place: -weight.stride(place)))


def lie_alike(one: Tensor, other: Tensor) -> bool:
    """True where both have their numbers in the same order in memory."""
    return one.stride() == other.stride() or (one.is_contiguous() and other.is_contiguous())


def like(tensor: Tensor, weight: Tensor) -> Tensor:
    """A copy of `tensor` in the layout of `weight`."""
    return torch.empty_like(weight).copy_(tensor)
