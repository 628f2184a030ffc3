"""The loop of nanoGPT, around the same transformer as ours.

Kept: batches from random places of a mapped file of uint16 numbers, each drawn between a forward and a backward pass;
AdamW with betas 0.9 and 0.95 and a decay of 0.1 on matrices only; fp32, which is what its --device=cpu computes in;
gradients clipped to norm 1; zero_grad(set_to_none=True); a learning rate set in each step; the loss read every tenth
step on rank 0. Left out: micro-steps, as a step here has only one; torch.compile, which its README turns off for CPUs;
evaluation, checkpoints; the gradient scaler, which is off without fp16.

Source: https://github.com/karpathy/nanoGPT (train.py, README.md)
"""

import math

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from contenders import Train, Work

RATE, LEAST_RATE, WARMUP, DECAY_STEPS = 6e-4, 6e-5, 2000, 600_000
LOG_STEPS = 10


def draw(tokens_N: np.ndarray, batch_size: int, seq_len: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Sequences from random places, and the tokens that follow (both NT)."""
    starts = torch.randint(len(tokens_N) - seq_len, (batch_size,)).tolist()
    texts = [torch.from_numpy(tokens_N[start : start + seq_len + 1].astype(np.int64)) for start in starts]
    return torch.stack([text[:-1] for text in texts]), torch.stack([text[1:] for text in texts])


def rate_at(step: int) -> float:
    """The learning rate: up in a line, then down half a cosine."""
    if step < WARMUP:
        return RATE * (step + 1) / (WARMUP + 1)
    done = min(1.0, (step - WARMUP) / (DECAY_STEPS - WARMUP))
    return LEAST_RATE + (RATE - LEAST_RATE) * (1 + math.cos(math.pi * done)) / 2


class WithLoss(nn.Module):
    """A transformer that returns its scores and their loss, as nanoGPT's does."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores = self.model(tokens)
        return scores, cross_entropy(scores.flatten(0, -2), targets.flatten(), ignore_index=-1)


def build(work: Work) -> Train:
    """nanoGPT's loop over `work`, with our transformer."""
    return loop_over(work, WithLoss(work.build()))


def loop_over(work: Work, inner: nn.Module) -> Train:
    """nanoGPT's loop over `work`; `inner` returns scores and loss."""
    assert work.tokens_N is not None
    tokens_N = work.tokens_N
    matrices = [parameter for parameter in inner.parameters() if parameter.dim() > 1]
    others = [parameter for parameter in inner.parameters() if parameter.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.95))
    model = DistributedDataParallel(inner)
    torch.manual_seed(1337 + dist.get_rank())
    batch = draw(tokens_N, work.batch_size, work.size)
    lines: list[str] = []

    def train(number: int, num_steps: int) -> None:
        nonlocal batch
        model.train()
        for step in range(number * num_steps, (number + 1) * num_steps):
            for group in optimizer.param_groups:
                group["lr"] = rate_at(step)
            _, loss = model(*batch)
            batch = draw(tokens_N, work.batch_size, work.size)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            if step % LOG_STEPS == 0 and dist.get_rank() == 0:
                lines.append(f"iter {step}: loss {loss.item():.4f}")

    return train
