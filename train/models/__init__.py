"""The models, by name: torchvision's classifiers of images, and transformers of our own over tokens."""

import torch
from torch import nn

from muster.config import Options
from muster.train.models import gpt

IGNORED = -100
"""A target that fills up a batch; neither the loss nor the accuracy counts it."""


def build(options: Options, num_classes: int, size: int) -> nn.Module:
    """Builds `--model` for `num_classes` classes or tokens, and images of `size` pixels or sequences of `size` tokens.

    A transformer has shapes only, on the meta device, until `place` gives it memory: the whole of a large one may fit
    on no single device.

    Raises:
        MusterError: there is no such model, or it does not take data of that size.
    """
    if options.predicts_tokens:
        shape = gpt.shape_of(options.model)
        with torch.device("meta"):
            return gpt.GPT(shape, num_classes, options.activation_checkpoint, options.deterministic)
    # Here and not above: torchvision takes 0.3 s to load, and a transformer needs nothing of it.
    from muster.train.models import images

    return images.build(options, num_classes, size)


def place(model: nn.Module, device: torch.device, layout: torch.memory_format, seed: int) -> nn.Module:
    """Puts `model` on `device` with its initial weights, which depend on the seed alone; returns it.

    Args:
        layout: the memory format of convolution weights; on CPUs those for small maps are kept as NCHW (images.py).
    """
    if isinstance(model, gpt.GPT):
        model.to_empty(device=device)
        model.initialise(seed)
        return model
    model.to(device, memory_format=layout)  # type: ignore[call-overload]
    if layout is torch.channels_last and device.type == "cpu":
        for module in model.modules():
            if isinstance(module, nn.Conv2d) and getattr(module, "has_small_maps", False):
                module.weight.data = module.weight.data.contiguous()
    return model


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The blocks of `model`: the outermost modules with weights in an nn.Sequential, nn.ModuleList or nn.ModuleDict."""
    units: list[nn.Module] = []
    for child in model.children():
        if isinstance(model, nn.Sequential | nn.ModuleList | nn.ModuleDict) and any(True for _ in child.parameters()):
            units.append(child)
        else:
            units += blocks_of(child)
    return units
