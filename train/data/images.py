"""Image files, from their bytes to the pixels for training: decode no more than the crop needs, crop, then resize."""

from abc import abstractmethod
from collections.abc import Callable
from contextlib import suppress
from io import BytesIO
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError
from torchvision.io import ImageReadMode, decode_jpeg
from torchvision.transforms import RandomResizedCrop
from torchvision.transforms.v2.functional import pil_to_tensor, resized_crop

from muster.train.data.source import BadSample, Samples

JPEG = b"\xff\xd8\xff"
AREA, RATIO = [0.35, 1.0], [3 / 4, 4 / 3]
"""Ranges of a random crop: its share of the image's area, and its width divided by its height."""

REASONS = {FileNotFoundError: "the file is gone", UnidentifiedImageError: "it is no image, or of an unknown format"}
"""Messages that replace those of an error: PIL's contain a memory address."""

SCALES = (8, 4, 2)
"""Factors by which the decoder can shrink a JPEG while it inverts the cosine transform, at almost no cost."""


class Crop(NamedTuple):
    """The part of an image that is used, in pixels, and whether it is flipped."""

    top: int
    left: int
    height: int
    width: int
    flip: bool


ChooseCrop = Callable[[int, int], Crop]
"""(height, width) of an image -> the crop."""


class EncodedImages(Samples):
    """Image files whose bytes are accessed by index, and decoded when a sample is read.

    Args:
        labels_N: the class of each file.
        size: pixels per side of the images that `read` returns.
        random: whether to crop and flip at random; else the middle is taken.
    """

    takes_time = True

    def __init__(self, labels_N: np.ndarray, size: int, *, random: bool) -> None:
        self.labels = labels_N
        self.size = size
        self.random = random
        self.choose_crop = random_crop if random else centre_crop

    def __len__(self) -> int:
        return len(self.labels)

    @abstractmethod
    def name(self, index: int) -> str:
        """The name of the file, for the error that it can't be read."""

    @abstractmethod
    def content(self, index: int) -> bytes:
        """The file's bytes."""

    def read(self, index: int) -> tuple[torch.Tensor, int]:
        try:
            picture_CHW = decode_crop(self.content(index), self.size, self.choose_crop)
        except Exception as error:  # a broken file makes PIL raise nearly anything: OSError, SyntaxError, ValueError
            raise self.bad_sample(index, error) from error
        return picture_CHW, int(self.labels[index])

    def read_encoded(self, index: int) -> tuple[tuple[bytes, Crop], int]:
        """The file's bytes with the crop to take from its image, and its class.

        Raises:
            BadSample: it can't be read, or is no image.
        """
        try:
            content = self.content(index)
            with Image.open(BytesIO(content)) as image:  # reads the header only
                return (content, self.choose_crop(image.height, image.width)), int(self.labels[index])
        except Exception as error:
            raise self.bad_sample(index, error) from error

    def bad_sample(self, index: int, error: Exception) -> BadSample:
        """The BadSample for a file whose reading raised `error`."""
        reason = REASONS.get(type(error)) or getattr(error, "strerror", None) or str(error) or type(error).__name__
        return BadSample(self.name(index), reason)


def random_crop(height: int, width: int) -> Crop:
    """A crop of random place, size and shape, flipped at random, drawn from torch's generator."""
    flip = bool(torch.rand(()) < 0.5)
    image = torch.empty(height, width, device="meta")  # only its size is asked for
    return Crop(*RandomResizedCrop.get_params(image, AREA, RATIO), flip)


def centre_crop(height: int, width: int) -> Crop:
    """The square in the middle, seven eighths of the shorter side."""
    side = max(1, min(height, width) * 7 // 8)
    return Crop((height - side) // 2, (width - side) // 2, side, side, False)


def decode_crop(content: bytes, size: int, choose_crop: ChooseCrop) -> torch.Tensor:
    """The crop of the image in the file `content`, `size` pixels a side (CHW, uint8, RGB)."""
    if not content.startswith(JPEG):
        picture_CHW = decode(content)
        return resize(picture_CHW, choose_crop(*picture_CHW.shape[1:]), size)
    image = Image.open(BytesIO(content))  # reads the header only
    width, height = image.size
    crop = choose_crop(height, width)
    if (scale := scale_of(crop, size)) == 1:
        return resize(decode(content), crop, size)
    image.draft(None, (width // scale, height // scale))
    right, bottom = crop.left + crop.width, crop.top + crop.height
    box = crop.left / scale, crop.top / scale, right / scale, bottom / scale
    colours = image if image.mode == "RGB" else image.convert("RGB")
    resized = colours.resize((size, size), Image.Resampling.BILINEAR, box)
    if crop.flip:
        resized = resized.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    return torch.frombuffer(bytearray(resized.tobytes()), dtype=torch.uint8).view(size, size, 3).permute(2, 0, 1)


def scale_of(crop: Crop, size: int) -> int:
    """The factor by which the decoder may shrink a JPEG: the crop keeps at least `size` pixels per side."""
    return next((scale for scale in SCALES if min(crop.height, crop.width) >= scale * size), 1)


def resize(picture_CHW: torch.Tensor, crop: Crop, size: int) -> torch.Tensor:
    """The crop of `picture_CHW` (uint8), `size` pixels a side."""
    resized_CHW = resized_crop(picture_CHW, *crop[:4], [size, size], antialias=True)
    return resized_CHW.flip(-1) if crop.flip else resized_CHW


def decode(content: bytes) -> torch.Tensor:
    """The image (CHW, uint8, RGB) in the file `content`.

    torchvision's decoder for JPEG is the fastest here; PIL reads everything else (CMYK, PNG, WebP ...), and describes
    best what is wrong with a file.
    """
    if content.startswith(JPEG):
        with suppress(RuntimeError):
            # A copy, as torch wants memory that may be written to.
            picture_CHW = decode_jpeg(torch.frombuffer(bytearray(content), dtype=torch.uint8), mode=ImageReadMode.RGB)
            assert isinstance(picture_CHW, torch.Tensor)  # of one image, not of a list of them
            return picture_CHW
    with Image.open(BytesIO(content)) as image:
        is_wide = image.mode.startswith("I;16") or (image.mode == "I" and image.format in ("PNG", "PPM"))
        if image.mode in ("F", "I") and not is_wide:  # PIL takes 255 for white, which few programs do
            raise ValueError(f"its pixels (PIL's mode {image.mode}) don't define white: save it with 8 or 16 bits")
        # PIL's own conversion from 16 bits to 8 turns every value above 255 into white.
        narrow = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8)) if is_wide else image
        return pil_to_tensor(narrow.convert("RGB"))
