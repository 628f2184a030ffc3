"""Random numbers that depend on what they are for, never on what was drawn before."""

import hashlib

import torch


def seed_of(*parts: int | str) -> int:
    """A seed of 63 bits made of `parts`: (seed, "train", epoch, index). Equal parts give equal seeds, everywhere."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


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
