"""Samplers, which choose the samples of each rank and their order."""

import hashlib
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch.utils.data import Sampler


def seed_of(*parts: int | str) -> int:
    """A 63-bit seed derived from `parts`, such as (seed, "order", epoch); the same on every rank and machine."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "big") >> 1


def generator(*parts: int | str) -> torch.Generator:
    """A generator on the CPU, seeded by `parts`."""
    return torch.Generator().manual_seed(seed_of(*parts))


def reseed(device: torch.device, *parts: int | str) -> None:
    """Seeds the generators that a model draws from (dropout, stochastic depth) on the CPU and on `device`."""
    seed = seed_of(*parts)
    # torch.manual_seed asks every kind of accelerator and takes 70 us; this is called for each micro-batch.
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.default_generators[device.index].manual_seed(seed)


class Draw(NamedTuple):
    """The index of a sample to read, and the epoch, on which its augmentation depends: workers outlive an epoch."""

    sample: int
    epoch: int


class TrainSampler(Sampler[list[Draw]]):
    """The micro-batches of one rank: any split of a global batch into ranks and accumulation forms the same ones.

    With B = batch_size * world_size * accumulate, step t takes the samples t*B to (t+1)*B of the epoch's permutation,
    and the micro-batch (accumulation a, rank r) is block number a * world_size + r of them. So 4 ranks, 2 ranks that
    accumulate 2 and 1 rank that accumulates 4 form the same micro-batches, for batch normalisation too.
    The incomplete last global batch of an epoch is dropped.
    """

    def __init__(
        self, num_samples: int, *, batch_size: int, accumulate: int, rank: int, world_size: int, seed: int
    ) -> None:
        self.num_samples = num_samples
        self.batch_size = batch_size
        self.accumulate = accumulate
        self.rank = rank
        self.world_size = world_size
        self.seed = seed
        self.global_batch = batch_size * world_size * accumulate
        self.set_epoch(0)

    def set_epoch(self, epoch: int, first_sample: int = 0, max_steps: int | None = None) -> None:
        """Chooses the permutation of `epoch`; skips its first `first_sample` samples; `max_steps` limits the rest."""
        self.epoch = epoch
        self.first_sample = first_sample
        steps = max(0, self.num_samples - first_sample) // self.global_batch  # the data may be fewer than they were
        self.num_steps = steps if max_steps is None else min(steps, max_steps)

    def __len__(self) -> int:
        return self.num_steps * self.accumulate

    def __iter__(self) -> Iterator[list[Draw]]:
        permutation = torch.randperm(self.num_samples, generator=generator(self.seed, "order", self.epoch)).tolist()
        for step in range(self.num_steps):
            for turn in range(self.accumulate):
                block = turn * self.world_size + self.rank
                start = self.first_sample + step * self.global_batch + block * self.batch_size
                yield [Draw(sample, self.epoch) for sample in permutation[start : start + self.batch_size]]


class ValidSampler(Sampler[list[Draw]]):
    """Every sample once over all ranks: rank r takes r, r + world_size, ...; nothing is padded or repeated.

    Attributes:
        num_rounds: the batches of the rank that has the most.
    """

    def __init__(self, num_samples: int, *, batch_size: int, rank: int, world_size: int) -> None:
        self.indices = range(rank, num_samples, world_size)
        self.num_rounds = -(-len(range(0, num_samples, world_size)) // batch_size)
        self.batch_size = batch_size

    def __len__(self) -> int:
        return -(-len(self.indices) // self.batch_size)

    def __iter__(self) -> Iterator[list[Draw]]:
        for start in range(0, len(self.indices), self.batch_size):
            yield [Draw(sample, 0) for sample in self.indices[start : start + self.batch_size]]
