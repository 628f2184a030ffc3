"""Image files with their classes, wherever they lie: decoded when they are read."""

from abc import abstractmethod

import numpy as np
import torch

from train.data import pictures
from train.data.images import BadSample, Images


class Encoded(Images):
    """Image files of which the bytes can be had by number.

    Args:
        labels_N: the class of each.
        size: pixels a side of what is read.
        random: crops and flips by chance; else the middle is taken.
    """

    def __init__(self, labels_N: np.ndarray, size: int, *, random: bool) -> None:
        self.labels = labels_N
        self.size = size
        self.random = random

    def __len__(self) -> int:
        return len(self.labels)

    @abstractmethod
    def name(self, index: int) -> str:
        """What to call the file when it is bad."""

    @abstractmethod
    def content(self, index: int) -> bytes:
        """The file's bytes."""

    def choose(self, height: int, width: int) -> pictures.Crop:
        """The part of an image that is used."""
        return (pictures.random_crop if self.random else pictures.centre_crop)(height, width)

    def read_raw(self, index: int) -> tuple[bytes, pictures.Crop]:
        """The file's bytes, and the part of the image that is used.

        Raises:
            BadSample: it can't be read, or is no image.
        """
        try:
            content = self.content(index)
            return content, self.choose(*pictures.size_of(content))
        except Exception as error:
            name = self.name(index)
            raise BadSample(name, one_reason(error, name)) from error

    def read(self, index: int) -> tuple[torch.Tensor, int]:
        try:
            picture_CHW = pictures.cut(self.content(index), self.size, self.choose)
        except Exception as error:  # a broken file makes PIL raise nearly anything: OSError, SyntaxError, ValueError
            name = self.name(index)
            raise BadSample(name, one_reason(error, name)) from error
        return picture_CHW, int(self.labels[index])


def one_reason(error: Exception, path: str) -> str:
    """What went wrong, without the path, which the message names anyway."""
    if isinstance(error, FileNotFoundError):
        return "the file is gone"
    return str(error).replace(repr(path), "the file") or type(error).__name__


class Names:
    """Many texts in one array: a list of a million would be copied in each worker, by its counts of references.

    Args:
        blob: the texts, each with a zero byte after it.
    """

    def __init__(self, blob: np.ndarray) -> None:
        self.blob = blob
        self.ends = np.flatnonzero(blob == 0)

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, index: int) -> bytes:
        start = int(self.ends[index - 1]) + 1 if index else 0
        return self.blob[start : self.ends[index]].tobytes()


def joined(texts: list[bytes]) -> np.ndarray:
    """`texts` as `Names` wants them."""
    return np.frombuffer(b"".join(text + b"\0" for text in texts), np.uint8)
