"""A process for each GPU, each with a share of the model: muster run fsdp.py"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main() -> None:
    torch.manual_seed(0)
    has_gpus = torch.cuda.is_available()
    if has_gpus:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if has_gpus else "gloo")
    device = "cuda" if has_gpus else "cpu"
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    inputs = torch.randn(1280, 32)
    data = TensorDataset(inputs, inputs.argmax(1) % 10)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=32, sampler=sampler)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10)).to(device)
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    held = sum(parameter.to_local().numel() for parameter in model.parameters())
    total = sum(parameter.numel() for parameter in model.parameters())
    os.write(1, f"rank {dist.get_rank()} holds {held:,} of {total:,} parameters\n".encode())
    # Made after fully_shard, so that the optimizer keeps moments for the rank's own share only.
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


if __name__ == "__main__":
    main()
