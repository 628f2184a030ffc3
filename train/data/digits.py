"""The 1,797 handwritten digits (8 x 8 pixels) that scikit-learn brings with it: real images, no download."""

import gzip
from importlib.metadata import distribution

import numpy as np
import torch

from muster.config import Options
from muster.train.data.source import InMemory, Source, split

VALID_SHARE = 0.2

FILE = "sklearn/datasets/data/digits.csv.gz"
"""The file in scikit-learn: one line per image, with its 64 pixels from 0 to 16 and the digit.

Source: sklearn/datasets/_base.py, load_digits
"""


def open_source(options: Options) -> Source:
    """The digits, scaled up to `--image-size` and given three equal channels."""
    size = options.pixels
    pixels, digits = read()
    grey_N1HW = torch.tensor(pixels, dtype=torch.float32).div(16).view(-1, 1, 8, 8)
    scaled_N1HW = torch.nn.functional.interpolate(grey_N1HW, (size, size), mode="bilinear", antialias=True)
    images_NCHW = scaled_N1HW.mul(255).round().clamp(0, 255).byte().expand(-1, 3, -1, -1).contiguous()
    labels_N = torch.tensor(digits, dtype=torch.int64)
    train, valid = split(len(labels_N), VALID_SHARE, options.seed)
    return Source(
        train=InMemory(images_NCHW[train], labels_N[train]),
        valid=InMemory(images_NCHW[valid], labels_N[valid]),
        num_classes=10,
        size=size,
        mean=(0.305, 0.305, 0.305),
        std=(0.323, 0.323, 0.323),
    )


def read() -> tuple[np.ndarray, np.ndarray]:
    """The pixels (1797, 64) and the digits (1797,), as int64.

    The file is read directly: to import scikit-learn for it would take each rank most of a second.
    """
    with gzip.open(str(distribution("scikit-learn").locate_file(FILE)), "rt") as lines:
        table = np.loadtxt(lines, delimiter=",", dtype=np.int64)
    return table[:, :-1], table[:, -1]
