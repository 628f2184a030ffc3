"""A process for each GPU, each with the whole model: muster run ddp.py"""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main() -> None:
    torch.manual_seed(0)
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
    inputs = torch.randn(1280, 32)
    data = TensorDataset(inputs, inputs.argmax(1) % 10)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=32, sampler=sampler)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10))
    model = DistributedDataParallel(model.to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    sampler.set_epoch(0)
    for x, y in loader:
        loss = nn.functional.cross_entropy(model(x.to(device)), y.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    if dist.get_rank() == 0:
        print(f"loss {loss.item():.2f} after {len(loader)} steps, in {dist.get_world_size()} processes")
    dist.destroy_process_group()
    # On CPUs a thread of gloo may still be running; it would abort an interpreter that exits in the usual way.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
