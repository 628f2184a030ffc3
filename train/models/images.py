"""The classification models of torchvision, by name."""

from functools import partial
from typing import Any

import torch
import torchvision.models
from torch import nn
from torch.nn.functional import conv2d

from muster.config import Options, check_classifier
from muster.errors import MusterError

SMALL = 2
"""Pixels a side of maps that are better done as NCHW on CPUs."""


def build(options: Options, num_classes: int, image_size: int) -> nn.Module:
    """The model `--model` with random weights, for `num_classes` classes.

    Raises:
        MusterError: there is no such model, or it does not take images of `image_size`.
    """
    name = options.model
    check_classifier(name, torchvision.models.list_models(module=torchvision.models))
    small = probe(name, num_classes, image_size, options.batch_size)
    model = construct(name, num_classes, image_size)
    for path, module in model.named_modules():
        if type(module) is nn.Conv2d and module.kernel_size != (1, 1) and (path in small or module.stride != (1, 1)):
            module.__class__ = SmallConv2d
            assert isinstance(module, SmallConv2d)
            module.has_small_maps = path in small
    return model


class SmallConv2d(nn.Conv2d):
    """A convolution that may see, or make, maps of few pixels. On CPUs these are done in other ways.

    Attributes:
        has_small_maps: whether its maps have SMALL pixels a side at most. oneDNN's kernels for NHWC take three to
            four times as long there as those for NCHW, in which its weights lie then (see `place`).
    """

    has_small_maps = False

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """As nn.Conv2d does: x_BCHW -> x_BDHW."""
        middle = tuple(size // 2 for size in self.kernel_size)
        is_plain = (self.padding, self.padding_mode, self.dilation) == (middle, "zeros", (1, 1))
        if input.is_cuda:
            return super().forward(input)
        if self.stride == (1, 1) or input.shape[-2:] != (1, 1) or not is_plain:
            return super().forward(input.contiguous() if self.has_small_maps else input)
        # torch 2.10 to 2.15 leave gradients of weights that see only padding unwritten there, in bfloat16: what was in
        # that memory before becomes a gradient. Of such an image only the middle of the kernel sees anything, so only
        # it is taken.
        row, column = middle
        return conv2d(input, self.weight[:, :, row : row + 1, column : column + 1], self.bias, groups=self.groups)


def probe(name: str, num_classes: int, image_size: int, batch_size: int) -> set[str]:
    """The paths of the model's convolutions, those of groups apart, that make maps of SMALL pixels a side at most.

    They are found by images without content, which pass through the model without content.

    Raises:
        MusterError: the shapes don't fit.
    """
    small: set[str] = set()

    def note(path: str, module: nn.Module, inputs: object, output_BCHW: torch.Tensor) -> None:
        if max(output_BCHW.shape[-2:]) <= SMALL:
            small.add(path)

    try:
        with torch.device("meta"):
            model = construct(name, num_classes, image_size)
            for path, module in model.named_modules():
                if type(module) is nn.Conv2d and module.groups == 1:  # the others were not measured
                    module.register_forward_hook(partial(note, path))
            model(torch.empty(min(batch_size, 2), 3, image_size, image_size))
    except (RuntimeError, ValueError, AssertionError) as error:
        single = batch_size == 1 and "more than 1 value per channel" in str(error)
        size = 299 if name == "inception_v3" else 224
        raise MusterError(
            f"{name} can't train on these images: {str(error).splitlines()[0] or type(error).__name__}",
            seen=f"--image-size={image_size} --batch-size={batch_size}",
            fix="--batch-size=2 or more" if single else f"--image-size={size}, or another model",
        ) from error
    return small


def construct(name: str, num_classes: int, image_size: int) -> nn.Module:
    """The model, on the device of the context; on the meta device without content."""
    settings: dict[str, Any] = {"weights": None, "num_classes": num_classes}
    if name.startswith("vit_"):
        settings["image_size"] = image_size
    elif name.startswith("maxvit"):
        settings["input_size"] = (image_size, image_size)
    elif name in ("googlenet", "inception_v3"):
        settings["init_weights"] = True
    try:
        return torchvision.models.get_model(name, **settings)
    except NotImplementedError:
        # The builders of regnet_... calculate widths by tensors, which must have content.
        with torch.device("cpu"):
            return torchvision.models.get_model(name, **settings).to("meta")
