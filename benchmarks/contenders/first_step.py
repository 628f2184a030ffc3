"""A script for torchrun, like the tutorial's: ResNet-18 on random images with DDP; it prints a line after each step.

    torchrun --standalone --nproc-per-node=2 benchmarks/contenders/first_step.py

The start of `train ddp` is compared with it: it has only torch, torchvision's model, a loader, DDP and SGD in fp32.

Source: https://docs.pytorch.org/tutorials/beginner/ddp_series_fault_tolerance.html
"""

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler
from torchvision.models import resnet18


def main() -> None:
    """One step, and the end."""
    dist.init_process_group("gloo")
    dataset = TensorDataset(torch.rand(64, 3, 32, 32), torch.randint(0, 10, (64,)))
    loader = DataLoader(dataset, batch_size=32, sampler=DistributedSampler(dataset))
    model = DistributedDataParallel(resnet18(num_classes=10))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for images, labels in loader:
        optimizer.zero_grad()
        cross_entropy(model(images), labels).backward()
        optimizer.step()
        print("first step", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
