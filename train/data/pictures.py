"""From an image file's bytes to the pixels for training: decode no more than the crop needs, crop, then resize."""

import math
from collections.abc import Callable
from contextlib import suppress
from io import BytesIO
from typing import NamedTuple

import torch
from PIL import Image
from torch.nn.functional import interpolate
from torchvision.io import ImageReadMode, decode_jpeg
from torchvision.transforms.functional import pil_to_tensor

JPEG = b"\xff\xd8\xff"
AREA, RATIO = (0.35, 1.0), (3 / 4, 4 / 3)
"""Of a random crop: its share of the image, and its width by its height."""

SCALES = (8, 4, 2)
"""By how much a JPEG can be smaller when it comes out of its cosines, at next to no cost."""


class Crop(NamedTuple):
    """The part of an image that is used, in pixels, and whether it is flipped."""

    top: int
    left: int
    height: int
    width: int
    flip: bool


Choose = Callable[[int, int], Crop]
"""(height, width) of an image -> the crop."""


def random_crop(height: int, width: int) -> Crop:
    """A random part of random shape, flipped by chance, drawn from torch's generator."""
    flip = bool(torch.rand(()) < 0.5)
    for area, ratio in zip(between(*AREA), between(*map(math.log, RATIO)), strict=True):
        own_width = round(math.sqrt(height * width * area * math.exp(ratio)))
        own_height = round(math.sqrt(height * width * area / math.exp(ratio)))
        if 0 < own_width <= width and 0 < own_height <= height:
            top, left = (int(torch.randint(room + 1, ())) for room in (height - own_height, width - own_width))
            return Crop(top, left, own_height, own_width, flip)
    # A very long image: its middle, no longer than the ratio allows.
    own_height = min(height, max(1, round(width / RATIO[0])))
    own_width = min(width, max(1, round(height * RATIO[1])))
    return Crop((height - own_height) // 2, (width - own_width) // 2, own_height, own_width, flip)


def between(low: float, high: float) -> list[float]:
    """Ten random numbers from `low` to `high`."""
    return torch.empty(10).uniform_(low, high).tolist()


def centre_crop(height: int, width: int) -> Crop:
    """The square in the middle, seven eighths of the shorter side."""
    side = max(1, min(height, width) * 7 // 8)
    return Crop((height - side) // 2, (width - side) // 2, side, side, False)


def cut(content: bytes, size: int, choose: Choose) -> torch.Tensor:
    """The crop of the image in the file `content`, `size` pixels a side (CHW, uint8, RGB)."""
    if not content.startswith(JPEG):
        picture_CHW = decode(content)
        return resize(picture_CHW, choose(*picture_CHW.shape[1:]), size)
    image = Image.open(BytesIO(content))  # reads the header only
    width, height = image.size
    crop = choose(height, width)
    scale = scale_of(crop, size)
    if scale == 1:
        return resize(decode(content), crop, size)
    image.draft(None, (width // scale, height // scale))
    right, bottom = crop.left + crop.width, crop.top + crop.height
    box = crop.left / scale, crop.top / scale, right / scale, bottom / scale
    colours = image if image.mode == "RGB" else image.convert("RGB")
    resized = colours.resize((size, size), Image.Resampling.BILINEAR, box)
    if crop.flip:
        resized = resized.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    return torch.frombuffer(bytearray(resized.tobytes()), dtype=torch.uint8).view(size, size, 3).permute(2, 0, 1)


def size_of(content: bytes) -> tuple[int, int]:
    """Height and width of the image in the file `content`, of which only the header is read."""
    with Image.open(BytesIO(content)) as image:
        return image.height, image.width


def scale_of(crop: Crop, size: int) -> int:
    """By how much a JPEG may come out smaller, such that the crop still has `size` pixels a side or more."""
    return next((scale for scale in SCALES if min(crop.height, crop.width) >= scale * size), 1)


def resize(picture_CHW: torch.Tensor, crop: Crop, size: int) -> torch.Tensor:
    """The crop of `picture_CHW`, `size` pixels a side."""
    part_CHW = picture_CHW[:, crop.top : crop.top + crop.height, crop.left : crop.left + crop.width]
    resized_CHW = interpolate(part_CHW[None], (size, size), mode="bilinear", antialias=True)[0]
    return resized_CHW.flip(-1) if crop.flip else resized_CHW


def decode(content: bytes) -> torch.Tensor:
    """The image (CHW, uint8, RGB) in the file `content`.

    torchvision's decoder for JPEG is the fastest here; PIL knows all the rest (CMYK, PNG, WebP ...), and says best what
    is wrong with a file.
    """
    if content.startswith(JPEG):
        with suppress(RuntimeError):
            # A copy, as torch wants memory that may be written to.
            picture_CHW = decode_jpeg(torch.frombuffer(bytearray(content), dtype=torch.uint8), mode=ImageReadMode.RGB)
            assert isinstance(picture_CHW, torch.Tensor)  # of one image, not of a list of them
            return picture_CHW
    with Image.open(BytesIO(content)) as image:
        return pil_to_tensor(image.convert("RGB"))
