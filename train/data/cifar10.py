"""CIFAR-10 (60,000 images of 32 x 32 pixels in 10 classes) from a folder that the user has."""

import torch
from torchvision.datasets import CIFAR10
from torchvision.transforms import v2

from muster.config import Options
from muster.errors import MusterError
from muster.train.data.source import InMemory, Source


class Augmented(InMemory):
    """Training images, each shifted by up to an eighth and flipped by chance."""

    random = True
    takes_time = True

    def __init__(self, images_NCHW: torch.Tensor, labels_N: torch.Tensor) -> None:
        super().__init__(images_NCHW, labels_N)
        size = images_NCHW.shape[-1]
        self.augment = v2.Compose([v2.RandomCrop(size, padding=size // 8), v2.RandomHorizontalFlip()])

    def read(self, index: int) -> tuple[torch.Tensor, int]:
        image, label = super().read(index)
        return self.augment(image), label


def open_source(options: Options, folder: str) -> Source:
    """The 50,000 training and 10,000 test images below `folder`, which holds `cifar-10-batches-py/`.

    Raises:
        MusterError: they are not there, or their checksums are wrong.
    """
    size = options.pixels
    try:
        parts = [CIFAR10(folder, train=train, download=False) for train in (True, False)]
    except (RuntimeError, OSError) as error:
        raise MusterError(
            f"no complete CIFAR-10 in this folder: {str(error).partition('.')[0]}",
            seen=f"--data={options.data}",
            fix="unpack cifar-10-python.tar.gz there, so that FOLDER/cifar-10-batches-py/data_batch_1 exists",
        ) from error
    tensors = []
    for part in parts:
        images_NCHW = torch.from_numpy(part.data).permute(0, 3, 1, 2).contiguous()
        if size != images_NCHW.shape[-1]:
            images_NCHW = v2.functional.resize(images_NCHW, [size, size], antialias=True)
        tensors.append((images_NCHW, torch.tensor(part.targets)))
    return Source(
        train=Augmented(*tensors[0]),
        valid=InMemory(*tensors[1]),
        num_classes=10,
        size=size,
        mean=(0.491, 0.482, 0.447),
        std=(0.247, 0.243, 0.262),
    )
