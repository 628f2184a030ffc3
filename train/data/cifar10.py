"""CIFAR-10 (60,000 images of 32 x 32 pixels in 10 classes) from a folder that the user has."""

import torch
from torch.nn.functional import pad
from torchvision.datasets import CIFAR10
from torchvision.transforms import v2

from muster.config import Options
from muster.errors import MusterError
from muster.train.data.source import InMemory, Source


class Augmented(InMemory):
    """Training images, each shifted by up to an eighth of its size over a black border, and flipped at random.

    The bits are those of torchvision v2's RandomCrop and RandomHorizontalFlip, which take longer on such small images.
    """

    random = True
    takes_time = True

    def read(self, index: int) -> tuple[torch.Tensor, int]:
        image_CHW, label = super().read(index)
        size = image_CHW.shape[-1]
        most = size // 8
        padded_CHW = pad(image_CHW, [most] * 4)
        top, left = (int(torch.randint(0, 2 * most + 1, ())) for _ in range(2))
        part_CHW = padded_CHW[:, top : top + size, left : left + size]
        return part_CHW.flip(-1) if torch.rand(1) < 0.5 else part_CHW, label


def open_source(options: Options) -> Source:
    """The 50,000 training and 10,000 test images in the folder of `--data`, which holds `cifar-10-batches-py/`.

    Raises:
        MusterError: they are not there, or their checksums are wrong.
    """
    size, folder = options.pixels, options.data.partition(":")[2]
    try:
        parts = [CIFAR10(folder, train=train, download=False) for train in (True, False)]
    except (RuntimeError, OSError) as error:
        wrong = f"no complete CIFAR-10 in this folder: {str(error).partition('.')[0]}"
        fix = "unpack cifar-10-python.tar.gz there; this user has to read FOLDER/cifar-10-batches-py/data_batch_1"
        raise MusterError(wrong, seen=f"--data={options.data}", fix=fix) from error
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
