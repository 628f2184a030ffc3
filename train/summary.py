"""What a run leaves for people and programs: summary.json and metrics.jsonl."""

import json
import os
import platform
import shlex
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torchvision

from train.data.images import Source
from train.data.loader import Batches
from train.files import write_text
from train.loop import Progress
from train.metrics import StepTimes, peak_memory_gib
from train.options import Options
from train.precision import Precision
from train.world import World


def effective(options: Options, precision: Precision, source: Source, world: World) -> dict[str, Any]:
    """The options, with what `auto` and `default` came to."""
    size = {"seq_len" if source.unit == "tokens" else "image_size": source.size}
    return asdict(options) | asdict(precision) | {"device": world.device.type, **size}


def command() -> str:
    """The command that the user typed, as far as it is known."""
    return os.environ.get("MUSTER_COMMAND") or shlex.join(sys.argv)


def versions() -> dict[str, str | None]:
    """The software that computed, and the card."""
    return {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "torchvision": str(torchvision.__version__),
        "cuda": torch.version.cuda if torch.cuda.is_available() else None,
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


def collect(
    *,
    strategy: str,
    options: dict[str, Any],
    world: World,
    progress: Progress,
    times: StepTimes,
    batches: tuple[Batches, ...],
    source: Source,
    folder: Path,
    resumed_from: Path | None,
    seconds: float,
) -> dict[str, Any]:
    """The summary of the run; to be called on all ranks, for what only each knows."""
    own = {
        "peak_memory_gib": peak_memory_gib(world.device),
        "bad_samples": {name: reason for part in batches for name, reason in part.bad.items()},
    }
    ranks = world.gather(own)
    bad = {name: reason for rank in ranks for name, reason in rank["bad_samples"].items()}
    last = progress.history[-1]
    global_batch = options["batch_size"] * options["accumulate"] * world.num_shares
    return {
        "strategy": strategy,
        "model": options["model"],
        "data": options["data"],
        "device": str(world.device.type),
        "backend": world.backend,
        "world_size": world.world_size,
        "num_nodes": len(world.nodes),
        "hosts": world.nodes,
        "global_batch": global_batch,
        **times.summary(global_batch * source.targets_of_sample, world.world_size, source.unit),
        "peak_memory_gib": round(max(rank["peak_memory_gib"] for rank in ranks), 3),
        "step": progress.step,
        "seconds": round(seconds, 3),
        "epochs": progress.history,
        "best_accuracy": progress.best_accuracy,
        "final_accuracy": last["valid_accuracy"],
        "final_train_loss": last["train_loss"],
        "final_valid_loss": last["valid_loss"],
        "bad_samples": [{"name": name, "reason": reason} for name, reason in sorted(bad.items())],
        "resumed_from": None if resumed_from is None else str(resumed_from),
        "folder": str(folder),
        "command": command(),
        "options": options,
        "versions": versions(),
    }


def write_summary(folder: Path, summary: dict[str, Any]) -> None:
    """Puts `summary` at folder/summary.json, whole or not at all."""
    write_text(folder / "summary.json", json.dumps(summary, indent=2, ensure_ascii=False) + "\n")


class Log:
    """metrics.jsonl: a line an epoch and every so many steps.

    Args:
        step: where the run continues; lines of later steps, which a run that was stopped left, are taken out.
    """

    def __init__(self, folder: Path, step: int) -> None:
        self.path = folder / "metrics.jsonl"
        kept = []
        for line in self.path.read_text().splitlines() if self.path.exists() else []:
            try:
                if json.loads(line)["step"] <= step:
                    kept.append(line)
            except (ValueError, KeyError):
                continue  # the last line of a run that was killed while it wrote
        write_text(self.path, "".join(f"{line}\n" for line in kept))

    def write(self, record: dict[str, Any]) -> None:
        """Adds a line."""
        with self.path.open("a") as file:
            file.write(json.dumps(record) + "\n")
