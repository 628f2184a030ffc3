"""Validation: every sample once over all ranks; broken off where a rank is warned meanwhile."""

import time
from typing import TYPE_CHECKING

import torch

from train.errors import FAILED, MusterError
from train.metrics import Readout, Sums, averages
from train.notice import Notice, between
from train.progress import share_of_look
from train.vitals import VALIDATION
from train.world import World

if TYPE_CHECKING:
    from train.loop import Loop


@torch.no_grad()
def validate(loop: "Loop", look_steps: int) -> tuple[float, float] | None:
    """Mean loss and accuracy over the validation samples (or tokens); None where a rank was warned before the end.

    Args:
        look_steps: batches between two looks at the warnings, at most.

    Raises:
        MusterError: those counted are not those there are.
    """
    model, world = loop.strategy.unwrap(loop.model), loop.world
    model.eval()
    sums, looks = Sums(world.device), Looks(world, loop.notice, look_steps)
    for done, (inputs, targets) in enumerate(world.vitals.over(loop.valid, VALIDATION, VALIDATION), 1):
        with loop.precision.autocast(world.device):
            loop.gradients.evaluate(model, inputs, targets, sums)
        if looks.any_warned(done):
            return None
    skipped = sums.values.new_tensor([float(loop.valid.num_bad)])
    totals = loop.total(torch.cat((sums.values, skipped))).tolist()
    expected = loop.valid.source.num_valid_targets
    if totals[2] + totals[3] != expected or not totals[2]:
        raise MusterError(
            "validation did not count each sample once",
            seen=f"{totals[2]:.0f} counted and {totals[3]:.0f} skipped of {expected}",
            fix="see that all ranks have the same data folder",
            code=FAILED,
        )
    return averages(totals[:3])


class Looks:
    """Looks at the warnings of all ranks, after the same batches on all of them. Nothing waits for the device.

    Args:
        most: batches between two looks, at most.
    """

    def __init__(self, world: World, notice: Notice, most: int) -> None:
        self.world = world
        self.notice = notice
        self.most = most
        self.next = 1
        self.looked_at = 0, time.perf_counter()
        self.look: Readout | None = None

    def any_warned(self, done: int) -> bool:
        """Whether any rank was warned by the look before this one, on all ranks alike; `done` batches are done."""
        if done < self.next:
            return False
        self.next = done + 1  # soon, to learn how long a batch takes
        if self.look is not None:
            batch_s, num_warned = self.look.wait()
            if num_warned:
                return True
            batches = between(batch_s, self.most)
            self.next = (done // batches + 1) * batches
        (before, then), now = self.looked_at, time.perf_counter()
        self.looked_at = done, now
        own = share_of_look(self.world, now - then, done - before, self.notice.heard)
        self.look = Readout(self.world.all_reduce(own))
        return False
