"""Runs to report on: recorded ones, and copies of them with changed values."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

RECORDINGS = Path(__file__).resolve().parent / "recordings"

Make = Callable[..., Path]

# More values that later versions write into a summary, here written by hand: shares, ranks, the GPU's peak, MFU.
MORE: dict[str, Any] = {
    "shares": {"data": 0.02, "compute": 0.9, "communication": 0.08},
    "slowest_rank": {"rank": 1, "host": "node02", "seconds": 0.09, "median_s": 0.08, "ratio": 1.125},
    "ranks": [
        {"rank": 0, "host": "node01", "step_s": 0.1, "busy_s": 0.08, "data_wait_s": 0.002, "peak_memory_gib": 1.05},
        {"rank": 1, "host": "node02", "step_s": 0.1, "busy_s": 0.09, "data_wait_s": 0.003, "peak_memory_gib": 1.1},
    ],
    "num_parameters": 11_181_642,
    "flops_per_second_per_rank": 4.1e14,
    "peak_flops_per_second": 9.89e14,
    "mfu": 0.4146,
    "energy_j_per_image": 0.257,
    "profile": "trace.json.gz",
}


@pytest.fixture
def recordings() -> Path:
    """The folder of recorded runs.

    scale/ (w1, w2, w4) and gpt/ are older than the measurement of steps, shares and ranks; measured/ is newer.
    """
    return RECORDINGS


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """Makes a run's folder: a copy of the recorded one on two ranks, with `changes` in its summary."""

    def make(
        name: str, changes: dict[str, Any] | None = None, lines: list[str] | None = None, *, with_summary: bool = True
    ) -> Path:
        folder = tmp_path / name
        folder.mkdir(parents=True)
        shutil.copy(RECORDINGS / "scale" / "w2" / "metrics.jsonl", folder)
        summary = json.loads((RECORDINGS / "scale" / "w2" / "summary.json").read_text())
        if lines is not None:
            (folder / "metrics.jsonl").write_text("\n".join(lines))
        if with_summary:
            (folder / "summary.json").write_text(json.dumps(summary | (changes or {})))
        return folder

    return make


@pytest.fixture
def measured(make: Make) -> Path:
    """A run with all values that later versions measure."""
    lines = [
        json.dumps(
            {
                "kind": "steps", "step": step, "train_loss": 2.3 / step, "train_accuracy": 0.5, "lr": 0.01,
                "seconds": step * 0.1, "images_per_second": 300.0 + step, "step_time_s": 0.1,
                "memory_gib": 1 + step / 1e3,
            }
        )
        for step in range(10, 130, 10)
    ]  # fmt: skip
    epoch = {"kind": "epoch", "epoch": 1, "step": 120, "train_loss": 0.2, "train_accuracy": 0.9}
    lines.append(json.dumps(epoch | {"valid_loss": 0.3, "valid_accuracy": 0.94, "seconds": 12.0}))
    return make("measured", MORE, lines)
