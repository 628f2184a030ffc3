"""How far a run is."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from train.metrics import Readout
from train.options import Options
from train.world import World


@dataclass
class Progress:
    """How far a run is: what a checkpoint holds besides the tensors.

    Attributes:
        epoch: epochs that are complete.
        sample: samples of the epoch under way that are used already: all of them where it is yet to be validated.
        step: steps of the optimizer in all.
        sums: summed loss, hits and targets of the epoch under way, over all ranks.
        history: one record an epoch.
    """

    epoch: int = 0
    sample: int = 0
    step: int = 0
    sums: list[float] = field(default_factory=lambda: [0.0, 0.0, 0.0])
    best_accuracy: float = 0.0
    history: list[dict[str, Any]] = field(default_factory=list)


def is_complete(progress: Progress, options: Options) -> bool:
    """True once `--epochs` or `--max-steps` are reached, and the result is validated."""
    if progress.epoch >= options.epochs:
        return True
    if options.max_steps is None or progress.step < options.max_steps:
        return False
    # A warning may have come between the last step and the end of the validation.
    is_validated = bool(progress.history) and progress.history[-1]["step"] == progress.step
    return is_validated or progress.step > options.max_steps


class Look(NamedTuple):
    """A look at the losses of all ranks.

    Attributes:
        step: after which it was taken.
        sums: [summed loss, hits, targets] of the epoch up to there, then the mean seconds of a step, how many ranks
            were warned, and whether a checkpoint is due; on their way.
        facts: what else a line of metrics.jsonl says; None for no line.
    """

    step: int
    sums: Readout
    facts: dict[str, Any] | None


def share_of_look(world: World, seconds: float, steps: int, *flags: bool | str) -> torch.Tensor:
    """What this rank adds to a look at all ranks: its part of the mean seconds of a step, and flags to be counted.

    Args:
        seconds: that so many `steps`, or batches, have taken.
    """
    told = [seconds / steps / world.world_size, *map(float, map(bool, flags))]
    # From pinned memory: a copy from any other would wait for all that the device has to do.
    is_cuda = world.device.type == "cuda"
    return torch.tensor(told, dtype=torch.float64, pin_memory=is_cuda).to(world.device, non_blocking=True)
