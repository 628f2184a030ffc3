"""Several training loops for one model, run in turns in the same processes: for benchmarks of a part of the loop."""

import os
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.multiprocessing
from results import ROOT

sys.path.insert(0, str(ROOT))

from muster.config import Options
from muster.train.checkpoint.manager import CheckpointManager
from muster.train.distributed.world import World
from muster.train.reporting.display import Display
from muster.train.reporting.metrics import StepTimes
from muster.train.trainer import Trainer

Turn = Callable[[int, int], None]
"""Trains: (number of the round, steps)."""


def trainer_of(options: Options, world: World, kind: type[Trainer] = Trainer, **parts: Any) -> Trainer:
    """The trainer behind `train ddp`, without a display and a run's folder: it writes nothing.

    Args:
        parts: attributes of the trainer, by name, that replace those set here.
    """
    trainer = kind("ddp", options, world)
    trainer.check()
    trainer.open_data()
    trainer.build_model()
    trainer.spread_model()
    trainer.display = Display(options, "images", 1, enabled=False)
    trainer.times = StepTimes(world.device)
    trainer.manager = cast(CheckpointManager, SimpleNamespace(completed=()))
    for name, part in parts.items():
        setattr(trainer, name, part)
    trainer.begin()
    return trainer


def compete(rank: int, build: Callable[[Namespace, World], Mapping[str, Turn]], asked: Namespace, folder: str) -> None:
    """One rank: all rounds of all contenders; rank 0 saves the seconds of each."""
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // asked.ranks))
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=asked.ranks)
    contenders = build(asked, World(rank=rank, local_rank=rank, world_size=asked.ranks, backend="gloo"))
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(-1, asked.rounds):  # the first round warms up and does not count
        for name in list(contenders)[:: 1 if number % 2 else -1]:
            dist.barrier()
            started = time.perf_counter()
            contenders[name](number + 1, asked.steps)
            dist.barrier()
            if number >= 0:
                seconds[name].append(time.perf_counter() - started)
        if rank == 0:
            print(f"\rround {number + 1}/{asked.rounds}", end="", file=sys.stderr, flush=True)
    if rank == 0:
        print(file=sys.stderr)
        torch.save(seconds, f"{folder}/result.pt")
    dist.destroy_process_group()


def run(build: Callable[[Namespace, World], Mapping[str, Turn]], asked: Namespace) -> dict[str, list[float]]:
    """The seconds of each round of each of the contenders that `build` makes on every rank."""
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(  # pyright: ignore[reportPrivateImportUsage]
            compete, args=(build, asked, folder), nprocs=asked.ranks, join=True
        )
        return torch.load(f"{folder}/result.pt", weights_only=True)
