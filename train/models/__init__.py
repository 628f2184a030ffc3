"""The models, by name: torchvision's classifiers of images, and transformers of our own over tokens."""

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from muster.config import Options
from muster.train.models import gpt

AUXILIARY_WEIGHT = 0.3
"""Weight of an auxiliary classifier's loss (inception_v3, googlenet), as in the papers that introduced them."""

IGNORED = -100
"""A target that counts nowhere: what fills up a batch."""


def build(options: Options, num_classes: int, size: int) -> nn.Module:
    """The model `--model` for `num_classes` classes (or tokens), and images of `size` pixels or sequences of `size`.

    A transformer has shapes only, on the meta device, until `place` gives it memory: the whole of a large one may fit
    on no single device.

    Raises:
        MusterError: there is no such model, or it does not take data of that size.
    """
    if options.predicts_tokens:
        return gpt.build(options, num_classes, size)
    # Here and not above: torchvision takes 0.3 s to load, and a transformer needs nothing of it.
    from muster.train.models import images

    return images.build(options, num_classes, size)


def place(model: nn.Module, device: torch.device, layout: torch.memory_format, seed: int) -> nn.Module:
    """`model` on `device` with its first weights, which depend on the seed alone.

    Args:
        layout: how the weights of convolutions lie in memory.
    """
    if isinstance(model, gpt.GPT):
        model.to_empty(device=device)
        model.initialise(seed)
        return model
    return model.to(device, memory_format=layout)  # type: ignore[call-overload]


def units_of(model: nn.Module) -> list[nn.Module]:
    """The parts of `model` that follow one another: a transformer's layers, the blocks of a classifier of images.

    They are the members of its lists and dictionaries of modules that have weights, without the parts of parts.
    """
    units: list[nn.Module] = []
    for child in model.children():
        if isinstance(model, nn.Sequential | nn.ModuleList | nn.ModuleDict) and any(True for _ in child.parameters()):
            units.append(child)
        else:
            units += units_of(child)
    return units


def loss_of(
    outputs: torch.Tensor | tuple[torch.Tensor, ...], targets: torch.Tensor, smoothing: float = 0.0
) -> torch.Tensor:
    """The mean cross-entropy over all targets, with the auxiliary classifiers of models that have them.

    Args:
        targets: classes (N) or tokens (NT).
        smoothing: the share of each target that goes to all classes alike.
    """
    if isinstance(outputs, torch.Tensor):
        return cross_entropy(outputs.flatten(0, -2), targets.flatten(), ignore_index=IGNORED, label_smoothing=smoothing)
    loss = loss_of(outputs[0], targets, smoothing)
    for logits in outputs[1:]:
        if logits is not None:
            loss = loss + AUXILIARY_WEIGHT * loss_of(logits, targets, smoothing)
    return loss


def logits_of(outputs: torch.Tensor | tuple[torch.Tensor, ...]) -> torch.Tensor:
    """The scores of the classes in `outputs` (the last dimension is that of the classes)."""
    return outputs if isinstance(outputs, torch.Tensor) else outputs[0]
