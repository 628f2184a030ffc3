"""The loop of PyTorch's tutorial "Multi GPU training with DDP".

Kept: DDP with its defaults, SGD at a rate of 1e-3 without momentum, fp32, and in each batch zero_grad, forward,
cross-entropy, backward, step. Left out: snapshots, and the loader with its DistributedSampler, since data is the same
for all here.

Source: https://docs.pytorch.org/tutorials/beginner/ddp_series_multigpu.html
"""

import torch
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from contenders import Train, Work


def build(work: Work) -> Train:
    """The tutorial's loop over `work`."""
    model = DistributedDataParallel(work.build())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def train(number: int, num_steps: int) -> None:
        model.train()
        for images, labels in work.batches(number, num_steps):
            optimizer.zero_grad()
            cross_entropy(model(images), labels).backward()
            optimizer.step()

    return train
