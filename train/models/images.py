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
"""The most pixels per side of feature maps for which NCHW is faster on CPUs."""


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
    """A convolution whose input or output may be maps of few pixels, which are computed in other ways on CPUs.

    Attributes:
        has_small_maps: whether its output maps have SMALL pixels per side at most. There oneDNN's kernels for NHWC take
            three to four times as long as those for NCHW, so its weights are kept as NCHW (see `place`).
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
        # In a map of one pixel only the middle of the kernel sees that pixel; the other weights see only padding. Their
        # gradients are not written by torch 2.10 to 2.15 in bfloat16: what was in that memory before becomes a
        # gradient. So only the middle is used.
        row, column = middle
        return conv2d(input, self.weight[:, :, row : row + 1, column : column + 1], self.bias, groups=self.groups)


def probe(name: str, num_classes: int, image_size: int, batch_size: int) -> set[str]:
    """The paths of the model's convolutions, except grouped ones, whose output maps have SMALL pixels per side at most.

    They are found by passing images through the model on the meta device, where neither has content.

    Raises:
        MusterError: the model can't train on images or batches of this size.
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
    """Builds the model `name` on the device of the context; on the meta device without content."""
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
