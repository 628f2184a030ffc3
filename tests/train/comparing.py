"""Comparisons of trainings: the options that they share, and the differences between two trained states."""

from pathlib import Path

import torch

from muster.train.checkpoint import manager as checkpoint
from muster.train.checkpoint.manager import CheckpointManager
from muster.train.distributed.world import World

ROOT = Path(__file__).parents[2]
TEXT = ["--model=gpt-tiny", f"--data=tokens:{Path(__file__).with_name('text.txt')}", "--seq-len=32", "--batch-size=4"]
DIGITS = ["--data=digits", "--image-size=16", "--batch-size=8", "--no-channels-last"]
STEPS = ["--no-bf16", "--warmup-steps=0", "--epochs=1"]
SPLITS = {
    "ddp": (2, []),
    "fsdp": (2, []),
    "tp": (4, ["--tensor-parallel=2"]),
    "pipeline": (2, ["--batch-size=8", "--microbatches=2"]),
}
"""Each strategy's world size, and the options by which a step takes two micro-batches of TEXT."""

LIMIT = 1e-6
"""The largest relative difference of all weights, and of all moments, to those of the single process."""


def vector(tensors):
    parts = [
        tensor.double().flatten()
        for name, tensor in sorted(tensors.items())
        if "running" not in name and "num_batch" not in name
    ]
    return torch.cat(parts)


def moments(state):
    return {f"{name}.{key}": value for name, part in state["optimizer"]["state"].items() for key, value in part.items()}


def apart(one, other):
    """The relative differences of two trained states: that of the weights, and that of the moments."""
    pairs = [(one["model"], other["model"]), (moments(one), moments(other))]
    assert all(first.keys() == second.keys() for first, second in pairs)
    return [((vector(a) - vector(b)).norm() / vector(a).norm()).item() for a, b in pairs]


def losses(one, other, names=("train_loss", "valid_loss")):
    """The relative differences of two trained states in the values `names` of their last epoch."""
    pairs = [[state["progress"]["history"][-1][name] for state in (one, other)] for name in names]
    return [abs(first - second) / first for first, second in pairs]


def trained(train, runs, strategy, world_size, options, name):
    train([strategy, *options, f"--name={name}", f"--runs-dir={runs}"], world_size, ok=True)
    return checkpoint.load_newest(runs / name)[1]


def save(run, state, *, step, keep=2):
    """Writes a checkpoint of the run from this process alone; returns its folder."""
    CheckpointManager(run, World(), keep=keep, in_background=False).save(state, step)
    return checkpoint.folder_of(run) / f"step-{step:08d}"
