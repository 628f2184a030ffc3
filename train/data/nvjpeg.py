"""`--decoder nvjpeg`: the workers hand over JPEG files as they are, and the GPU decodes and crops them."""

from typing import Any, NamedTuple

import torch
from torchvision.io import ImageReadMode, decode_jpeg

from muster.config import Options
from muster.errors import ExitCode, MusterError
from muster.train.data.images import Crop, EncodedImages, resize
from muster.train.data.source import Samples


class Encoded(NamedTuple):
    """Image files that are decoded on the device.

    Attributes:
        contents: their bytes, end to end: one tensor, since workers hand over each tensor in a file of its own.
    """

    contents: torch.Tensor
    lengths: list[int]
    crops: list[Crop]


def check(options: Options, samples: Samples, device: torch.device) -> EncodedImages:
    """Returns `samples`, or raises MusterError where nvJPEG can't decode them on this device."""
    seen, fix = f"--decoder={options.decoder}", "--decoder=cpu, or leave it out"
    if not isinstance(samples, EncodedImages):
        wrong = "there are no image files to decode"
        raise MusterError(wrong, seen=f"{seen} --data={options.data}", fix=f"{fix}; or imagefolder or shards")
    if options.on_bad_sample == "skip":
        wrong = "with nvJPEG the workers don't decode, so they can't replace a bad sample"
        raise MusterError(wrong, seen=f"{seen} --on-bad-sample=skip", fix=f"{fix}; or without --on-bad-sample")
    if device.type != "cuda":
        raise MusterError("nvJPEG decodes on GPUs only", seen=f"{seen}, training on the CPU", fix=fix)
    return samples


def collate(files: list[tuple[tuple[bytes, Crop], int]]) -> tuple[Encoded, torch.Tensor]:
    """One batch of `files` as `EncodedImages.read_encoded` gives them, and their classes (N)."""
    contents, crops = [content for (content, _), _ in files], [crop for (_, crop), _ in files]
    joined = torch.frombuffer(bytearray(b"".join(contents)), dtype=torch.uint8)
    return Encoded(joined, list(map(len, contents)), crops), torch.tensor([label for _, label in files])


def decode(encoded: Encoded, size: int, device: torch.device) -> torch.Tensor:
    """The crops of the images (NCHW, uint8), `size` pixels a side, decoded by torchvision on the GPU.

    Raises:
        MusterError: one can't be decoded.
    """
    files = list(encoded.contents.split(encoded.lengths))
    try:
        pictures: Any = decode_jpeg(files, mode=ImageReadMode.RGB, device=device)
    except RuntimeError as error:
        wrong = "nvJPEG can't decode a sample: " + str(error).partition("\n")[0]
        seen = f"one of {len(files)} files of a batch, --decoder=nvjpeg"
        fix = "--decoder=cpu, which reads more formats, and names the damaged file"
        raise MusterError(wrong, seen=seen, fix=fix, code=ExitCode.FAILED) from error
    return torch.stack([resize(picture, crop, size) for picture, crop in zip(pictures, encoded.crops, strict=True)])
