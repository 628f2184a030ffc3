"""The step of NCAR's ResNet example for Derecho.

Kept: torchvision's model in DDP with its defaults, SGD with a rate of 0.1, momentum 0.9 and a decay of 1e-5, fp32, and
the time of the whole epoch, with a line of its steps and mean time on rank 0. Left out: CIFAR-10 and its augmentation,
since data is the same for all here; the MPI start; evaluation on rank 0 and the weights that it writes.

Source: https://github.com/negin513/distributed-pytorch-hpc (scripts/main.py), to which NCAR's documentation links.
"""

import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from contenders import Train, Work


def build(work: Work) -> Train:
    """The example's loop over `work`."""
    model = DistributedDataParallel(work.build())
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-5)
    lines: list[str] = []

    def train(number: int, num_steps: int) -> None:
        model.train()
        started, count = time.time(), 0
        for images, labels in work.batches(number, num_steps):
            optimizer.zero_grad()
            outputs = model(images)
            loss = criterion(outputs, labels)
            loss.backward()
            optimizer.step()
            count += 1
        if dist.get_rank() == 0:
            lines.append(f"num_steps_per_gpu: {count}, avg_step_time: {(time.time() - started) / count:.4f}")

    return train
