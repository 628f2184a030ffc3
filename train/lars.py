"""LARS: SGD with momentum whose steps are, weight by weight, in proportion to the weight (arXiv 1708.03888)."""

# torch's own optimizers are made of these functions, which have no public names.
# pyright: reportPrivateImportUsage=false

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

EPSILON = 1e-9


class LARS(Optimizer):
    """Layer-wise adaptive rates, for batches so large that one rate no longer fits all layers.

    Args:
        parameters: groups, of which those with `"adapt": False` (norms, biases) take the steps of plain SGD.
        trust: the length of a step, with a learning rate of 1, relative to the weight's.
    """

    def __init__(
        self, parameters: Any, lr: float, momentum: float = 0.9, weight_decay: float = 0.0, trust: float = 1e-3
    ) -> None:
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "trust": trust, "adapt": True}
        super().__init__(parameters, defaults)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One step; nothing in it waits for the device."""
        assert closure is None
        for group in self.param_groups:
            weights = [parameter for parameter in group["params"] if parameter.grad is not None]
            if not weights:
                continue
            gradients = [weight.grad for weight in weights]
            changes = torch._foreach_add(gradients, weights, alpha=group["weight_decay"])
            if group["adapt"]:
                for change, scale in zip(changes, scales(weights, gradients, group), strict=True):
                    change.mul_(scale)
            for weight, change in zip(weights, changes, strict=True):
                state = self.state[weight]
                if "momentum_buffer" not in state:
                    state["momentum_buffer"] = torch.zeros_like(weight)
                state["momentum_buffer"].mul_(group["momentum"]).add_(change)
            momenta = [self.state[weight]["momentum_buffer"] for weight in weights]
            torch._foreach_add_(weights, momenta, alpha=-group["lr"])


def scales(weights: list[Tensor], gradients: list[Tensor], group: dict[str, Any]) -> Tensor:
    """What each change is multiplied by, which is 1 for a weight, or a gradient, without length."""
    weight, gradient = norms(weights), norms(gradients)
    trusted = group["trust"] * weight / (gradient + group["weight_decay"] * weight + EPSILON)
    return torch.where((weight > 0) & (gradient > 0), trusted, 1.0)


def norms(tensors: list[Tensor]) -> Tensor:
    """The length of each tensor; of those that are cut over ranks, over all of their parts."""
    stacked = torch.stack(torch._foreach_norm(tensors))
    return stacked.full_tensor() if isinstance(stacked, DTensor) else stacked
