"""A folder of image files, one subfolder a class."""

import os
from contextlib import suppress
from io import BytesIO
from pathlib import Path

import torch
from PIL import Image
from torchvision.datasets import ImageFolder
from torchvision.io import ImageReadMode, decode_jpeg
from torchvision.transforms import v2
from torchvision.transforms.functional import pil_to_tensor

from train.data.images import BadSample, Images, Source, split
from train.errors import MusterError
from train.options import Options

VALID_SHARE = 0.1
JPEG = b"\xff\xd8\xff"
LAYOUT = "FOLDER/CLASS/IMAGE.jpg, or FOLDER/train/CLASS/IMAGE.jpg and FOLDER/val/CLASS/IMAGE.jpg"


class Files(Images):
    """Image files with their classes, decoded when they are read.

    Args:
        samples: path and class of each.
        transform: uint8 tensor (CHW) -> uint8 tensor of the wanted size.
        random: whether `transform` draws random numbers.
    """

    def __init__(self, samples: list[tuple[str, int]], transform: v2.Transform, *, random: bool) -> None:
        self.samples = samples
        self.transform = transform
        self.random = random

    def __len__(self) -> int:
        return len(self.samples)

    def read(self, index: int) -> tuple[torch.Tensor, int]:
        path, label = self.samples[index]
        try:
            picture_CHW = decode(Path(path).read_bytes())
        except Exception as error:  # a broken file makes PIL raise nearly anything: OSError, SyntaxError, ValueError
            raise BadSample(path, one_reason(error, path)) from error
        return self.transform(picture_CHW), label


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


def one_reason(error: Exception, path: str) -> str:
    """What went wrong, without the path, which the message names anyway."""
    if isinstance(error, FileNotFoundError):
        return "the file is gone"
    return str(error).replace(repr(path), "the file") or type(error).__name__


def scan(folder: Path, options: Options) -> ImageFolder:
    """The files below `folder` and their classes.

    Raises:
        MusterError: there is no folder, no class in it, or a class without images.
    """
    try:
        if not folder.is_dir():
            wrong = "the data folder is a file" if folder.exists() else "the data folder does not exist"
            fix = f"--data=imagefolder:FOLDER with {LAYOUT}; in a container, see that FOLDER is bound into it"
            raise MusterError(wrong, seen=f"--data={options.data} ({folder})", fix=fix)
        if not any(entry.is_dir() for entry in folder.iterdir()):
            state = "holds no subfolders, so no classes" if any(folder.iterdir()) else "is empty"
            raise MusterError(f"the data folder {state}", seen=f"--data={options.data} ({folder})", fix=LAYOUT)
        return ImageFolder(folder)
    except FileNotFoundError as error:
        raise MusterError(
            str(error).partition(" Supported")[0].replace("Found no valid file for the classes", "no images in class"),
            seen=f"--data={options.data} ({folder})",
            fix="put images into the folder of that class, or remove the folder",
        ) from error
    except OSError as error:
        fix = "see that this user may read the folder, on every node"
        raise MusterError(f"the data folder can't be read: {error.strerror}", seen=str(folder), fix=fix) from error


def open_source(options: Options, folder: str) -> Source:
    """The images below `folder`: its `train/` and `val/`, or a tenth of one folder, chosen by the seed, validates.

    Raises:
        MusterError: the folder is missing, empty, or its two halves disagree on the classes.
    """
    root = Path(folder).expanduser()
    other = "valid" if os.path.isdir(root / "valid") else "val"
    halves = [root / "train", root / other]
    present = [half for half in halves if os.path.isdir(half)]  # Path.is_dir raises where this user may not look
    if len(present) == 2:
        train, valid = (scan(half, options) for half in halves)
        unknown = sorted(set(train.classes) ^ set(valid.classes))
        if unknown:
            raise MusterError(
                f"train/ and {other}/ don't have the same classes",
                seen=f"only in one of them: {', '.join(unknown[:5])}{' ...' if len(unknown) > 5 else ''}",
                fix=f"give both the same subfolders below {root}",
            )
        classes, train_samples, valid_samples = train.classes, train.samples, valid.samples
    elif present:
        missing = next(half for half in halves if not half.is_dir())
        raise MusterError(
            f"the data folder has {present[0].name}/ but no {missing.name}/", seen=f"--data={options.data}", fix=LAYOUT
        )
    else:
        whole = scan(root, options)
        chosen = split(len(whole.samples), VALID_SHARE, options.seed)
        train_samples, valid_samples = ([whole.samples[index] for index in part] for part in chosen)
        classes = whole.classes
    if len(classes) < 2:
        raise MusterError("one class alone can't be told from others", seen=f"classes: {classes[0]}", fix=LAYOUT)
    size = options.pixels
    augmented = v2.Compose([v2.RandomResizedCrop(size, scale=(0.35, 1.0), antialias=True), v2.RandomHorizontalFlip()])
    centred = v2.Compose([v2.Resize(size * 8 // 7, antialias=True), v2.CenterCrop(size)])
    return Source(
        train=Files(train_samples, augmented, random=True),
        valid=Files(valid_samples, centred, random=False),
        num_classes=len(classes),
        size=size,
    )
