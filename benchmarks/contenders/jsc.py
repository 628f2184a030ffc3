"""The step of the recipe pytorch-at-jsc.

Kept: torchvision's model in DDP with its defaults, AdamW with a rate of 3e-4 times the number of ranks, fp32, gradients
set to None, the loss averaged over all ranks after each step, and read and formatted on all ranks every tenth step.
Left out: FakeData with ToTensor, which makes 1,027 images per second and so would hide the step's time for small
images; its split; evaluation and files.

Source: https://gitlab.jsc.fz-juelich.de/sdlaml/pytorch-at-jsc (pytorch-ddp-example)
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from contenders import Train, Work

PRINT_STEPS = 10


def average(value: torch.Tensor) -> torch.Tensor:
    """The mean of `value` over all ranks."""
    total = value.detach().clone()
    dist.all_reduce(total)
    return total / dist.get_world_size()


def build(work: Work) -> Train:
    """The recipe's loop over `work`."""
    model = DistributedDataParallel(work.build())
    loss_func = nn.CrossEntropyLoss()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4 * dist.get_world_size())
    lines: list[str] = []

    def train(number: int, num_steps: int) -> None:
        for step, (images, labels) in enumerate(work.batches(number, num_steps)):
            model.train()
            optimizer.zero_grad(set_to_none=True)
            loss = loss_func(model(images), labels)
            loss.backward()
            optimizer.step()
            mean = average(loss)
            if step % PRINT_STEPS == 0:
                lines.append(f"[{number}; {step}] loss: {mean.item():.5f}")

    return train
