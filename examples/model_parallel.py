"""A model on two ranks, half of its layers on each: muster run --nproc-per-node 2 model_parallel.py (on CPUs)"""

import torch
import torch.distributed as dist
from torch import nn

STEPS = 40


def step(rank: int, part: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> float:
    """Forward and backward through both parts; returns the loss on rank 1, and 0 on rank 0."""
    if rank == 0:
        hidden = part(inputs)
        dist.send(hidden.detach(), dst=1)
        gradient = torch.empty_like(hidden)
        dist.recv(gradient, src=1)
        hidden.backward(gradient)
        return 0.0
    else:
        hidden = torch.empty(len(inputs), 64)
        dist.recv(hidden, src=0)
        hidden.requires_grad_()
        loss = nn.functional.cross_entropy(part(hidden), targets)
        loss.backward()
        dist.send(hidden.grad, dst=0)
        return loss.item()


def main() -> None:
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    part = nn.Sequential(nn.Linear(32, 64), nn.ReLU()) if rank == 0 else nn.Linear(64, 10)
    optimizer = torch.optim.AdamW(part.parameters(), lr=0.01)
    inputs = torch.randn(64, 32)
    targets = inputs.argmax(1) % 10
    losses: list[float] = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        losses.append(step(rank, part, inputs, targets))
        optimizer.step()
    if rank == 1:
        print(f"loss {losses[0]:.2f} -> {losses[-1]:.2f} in {STEPS} steps: layer 1 on rank 0, layer 2 on rank 1")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
