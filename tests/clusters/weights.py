"""Trainings whose weights are compared: the same global batches, divided in different ways."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from muster.train.checkpoint import manager as checkpoint

BIN = Path(sys.executable).parent
TRAIN, MUSTER = str(BIN / "train"), str(BIN / "muster")

# One thread per rank everywhere: with another number of threads, convolutions add up in another order.
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
# Sums whose order does not matter: else ranks and one process differ by their last bits.
STEPS = ["--data=digits", "--batch-size=8", "--max-steps=3", "--lr=0.01", "--no-bf16", "--seed=5", "--deterministic"]


def train_single(folder: Path, num_ranks: int) -> dict[str, torch.Tensor]:
    """Trains one process in `folder` on the batches of `num_ranks` ranks; returns the parameters.

    In each step it accumulates one micro-batch for each rank, so that BatchNorm sees the same batches.
    """
    argv = [TRAIN, "single", *STEPS, f"--accumulate={num_ranks}", "--name=single"]
    # No variable of a job or launcher in which the tests may run.
    env = {"PATH": "/usr/bin:/bin", "HOME": str(folder), **ONE_THREAD}
    done = subprocess.run(argv, cwd=folder, env=env, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr
    return parameters(folder / "runs" / "single")


def summary(folder: Path) -> dict[str, Any]:
    """The summary of the run in `folder`."""
    return json.loads((folder / "summary.json").read_text())


def parameters(folder: Path) -> dict[str, torch.Tensor]:
    """The weights in the run's only checkpoint, without BatchNorm's statistics, which are no parameters."""
    (path,) = folder.glob("checkpoints/step-*")
    weights = checkpoint.load(path)["model"]
    return {name: value for name, value in weights.items() if "running_" not in name and "num_batches" not in name}


def distance(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """The relative difference of two sets of parameters, in the norm over all of them."""
    assert one.keys() == other.keys()
    difference = sum(((one[name] - other[name]).double().norm() ** 2).item() for name in one)
    size = sum((other[name].double().norm() ** 2).item() for name in one)
    return (difference / size) ** 0.5


def assert_world_of_four(folder: Path, single: dict[str, torch.Tensor], hosts: tuple[str, ...]) -> None:
    """Asserts that the run in `folder` was one world of four ranks on `hosts`, and ended with the weights `single`."""
    found = summary(folder)
    assert (found["world_size"], found["num_nodes"], sorted(found["hosts"])) == (4, len(hosts), sorted(hosts))
    assert distance(parameters(folder), single) < 1e-6


def lines_of_error(text: str) -> list[str]:
    """The lines of error messages in the output `text`."""
    return [line for line in text.splitlines() if line.startswith(("error: ", " seen: ", "  fix: "))]
