"""The training loop: the same for every strategy, model and source of data."""

import math
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch
from torch import nn

from train.data.loader import Batches
from train.display import Display
from train.errors import FAILED, MusterError
from train.faults import SharedFault
from train.metrics import Readout, StepTimes, Sums
from train.mixup import mix
from train.optimizer import lr_at, set_lr
from train.options import Options
from train.order import TrainOrder
from train.precision import Precision
from train.seeds import reseed
from train.state import Statistics, Trained
from train.strategies import Strategy
from train.world import World

LOOK_STEPS = 10
"""Steps between two looks at the losses of all ranks."""

LOG_STEPS = 50
"""Steps between two lines of metrics.jsonl; a multiple of LOOK_STEPS."""


@dataclass
class Progress:
    """How far a run is: what a checkpoint holds besides the tensors.

    Attributes:
        epoch: epochs that are complete.
        sample: samples of the epoch under way that are used already; not 0 only after `--max-steps`.
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


@dataclass
class Loop:
    """One rank's training; `fit` runs it to the end.

    Attributes:
        model: as its strategy has wrapped it.
        log: takes a record for metrics.jsonl.
        save: writes a checkpoint; called on all ranks, with this rank's own statistics where others have others.
    """

    strategy: Strategy
    model: nn.Module
    trained: Trained
    train: Batches
    valid: Batches
    world: World
    options: Options
    precision: Precision
    display: Display
    times: StepTimes
    log: Callable[[dict[str, Any]], None]
    save: Callable[[Progress, Statistics], None]
    progress: Progress = field(default_factory=Progress)

    def __post_init__(self) -> None:
        assert isinstance(self.train.order, TrainOrder)
        self.order = self.train.order
        self.gradients = self.strategy.gradients(self.model, self.world, self.options)
        self.gradients.smoothing = self.options.label_smoothing
        epochs = self.options.epochs * (self.order.num_samples // self.order.global_batch)
        self.num_steps = min(epochs, self.options.max_steps or epochs)

    def finished(self) -> bool:
        """True once `--epochs` or `--max-steps` are reached."""
        steps = self.options.max_steps
        return self.progress.epoch >= self.options.epochs or (steps is not None and self.progress.step >= steps)

    def fit(self) -> Progress:
        """Trains to the end; after each epoch validates and saves."""
        while not self.finished():
            started = time.perf_counter()
            progress = self.progress
            epoch = progress.epoch
            self.train_epoch()
            own = self.average_statistics()
            train_loss, train_accuracy = averages(progress.sums)
            average = self.trained.average
            with nullcontext() if average is None else average.in_place():
                valid_loss, valid_accuracy = self.validate()
            progress.best_accuracy = max(progress.best_accuracy, valid_accuracy)
            record = {
                "epoch": epoch + 1,
                "step": progress.step,
                "train_loss": train_loss,
                "train_accuracy": train_accuracy,
                "valid_loss": valid_loss,
                "valid_accuracy": valid_accuracy,
                "seconds": round(time.perf_counter() - started, 3),
            }
            progress.history = [*(old for old in progress.history if old["epoch"] != epoch + 1), record]
            if progress.epoch > epoch:
                progress.sums = [0.0, 0.0, 0.0]
            self.log({"kind": "epoch", **record})
            self.display.epoch(record)
            # In the middle of an epoch each rank goes on from its own, as if it had not stopped.
            self.save(progress, {} if progress.epoch > epoch else own)
        return self.progress

    def train_epoch(self) -> None:
        """Trains on the rest of the epoch, or up to `--max-steps`."""
        options, progress, order = self.options, self.progress, self.order
        max_steps = None if options.max_steps is None else options.max_steps - progress.step
        order.set_epoch(progress.epoch, progress.sample, max_steps)
        self.model.train()
        sums = Sums(self.world.device)
        look: tuple[int, Readout] | None = None
        glance: Readout | None = None
        self.display.start_epoch(progress.epoch, order.num_steps)
        self.times.start()
        batches = self.times.waiting(self.train)
        for done in range(1, order.num_steps + 1):
            self.step(batches, sums)
            self.times.step()
            if progress.step % LOOK_STEPS == 0:
                # That of so many steps before has come by now: on all ranks alike, and no device is waited for.
                self.show(look, sums)
                look = progress.step, Readout(self.total(sums.values))
            if self.world.main:
                if glance is None and self.display.wants_loss() and self.world.counts:
                    glance = Readout(sums.values)  # of this rank alone: a step may take minutes
                if glance is not None and (values := glance.values()) is not None:
                    self.display.loss(averages(values)[0])
                    glance = None
                self.display.step(done)
        self.show(look, sums)
        self.gradients.settle(self.trained.optimizer)
        totals = self.total(sums.values).tolist()
        if not math.isfinite(totals[0]):
            self.refuse(totals[0], sums)
        progress.sums = [before + now for before, now in zip(progress.sums, totals, strict=True)]
        progress.sample += order.num_steps * order.global_batch
        if order.num_samples - progress.sample < order.global_batch:
            progress.epoch, progress.sample = progress.epoch + 1, 0

    def refuse(self, loss: float, sums: Sums) -> None:
        """Raises SharedFault, on all ranks, with the step and the rank where the loss was the first to be no number."""
        self.gradients.settle(self.trained.optimizer)  # which may know a nearer reason, and raises it
        bad = [(first, rank) for rank, first in enumerate(self.world.gather(int(sums.first_bad))) if first >= 0]
        first, rank = min(bad, default=(sums.num_batches - 1, 0))
        step = self.progress.step - (sums.num_batches - 1 - first) // self.options.accumulate
        raise SharedFault(
            f"the training loss is {loss} from step {step} on, where rank {rank} was the first",
            seen=f"epoch {self.progress.epoch + 1}, at step {self.progress.step}, --lr={self.options.lr} "
            f"--warmup-steps={self.options.warmup_steps}",
            fix="a smaller --lr, a longer warm-up or --clip-norm=1; the last checkpoint is from before: --resume",
            code=FAILED,
        )

    def show(self, look: tuple[int, Readout] | None, sums: Sums) -> None:
        """Shows and logs the loss of all ranks in the epoch up to a step.

        Raises:
            SharedFault: on all ranks, where it is no number.
        """
        if look is None:
            return
        step, values = look[0], look[1].wait()
        if not math.isfinite(values[0]):
            self.refuse(values[0], sums)
        loss, accuracy = averages(values)
        self.display.loss(loss)
        if step % LOG_STEPS == 0:
            self.log({"kind": "steps", "step": step, "train_loss": loss, "train_accuracy": accuracy})

    def step(self, batches: Any, sums: Sums) -> None:
        """One step of the optimizer, over `--accumulate` micro-batches. Nothing here waits for the device."""
        options, progress, world = self.options, self.progress, self.world
        self.gradients.begin(self.trained.optimizer, progress.step)
        for turn, (inputs, targets) in enumerate(islice(batches, options.accumulate)):
            # By block and not by rank: dropout too is then the same whatever the world size.
            block = turn * world.num_shares + world.data_rank
            reseed(world.device, options.seed, "model", progress.step, block)
            if options.mixup:
                seeds = options.seed, progress.step, block
                inputs, targets = mix(inputs, targets, self.train.source.num_classes, options.mixup, *seeds)
            last = turn + 1 == options.accumulate
            with nullcontext() if last else self.strategy.without_sync(self.model):
                self.gradients.compute(self.model, inputs, targets, self.precision.autocast(world.device), sums)
            if not last:
                self.gradients.hold()
        self.gradients.finish()
        if options.clip_norm is not None:
            self.gradients.clip(self.model, options.clip_norm)
        optimizer, average = self.trained.optimizer, self.trained.average
        set_lr(optimizer, lr_at(options, world.num_shares, progress.step, self.num_steps))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if average is not None:
            average.update(progress.step)
        progress.step += 1

    def total(self, values: torch.Tensor) -> torch.Tensor:
        """The sum of `values` over the ranks that count."""
        return self.world.all_reduce(values * float(self.world.counts))

    @torch.no_grad()
    def average_statistics(self) -> Statistics:
        """Makes the running statistics of batch normalisation the mean over all ranks; returns what this rank had."""
        statistics = self.trained.statistics()
        if self.world.world_size == 1 or not statistics:
            return {}
        own = {name: tensor.clone() for name, tensor in statistics.items()}
        flat = self.world.all_reduce(torch.cat([tensor.flatten() for tensor in own.values()])) / self.world.world_size
        parts = flat.split([tensor.numel() for tensor in own.values()])
        for tensor, part in zip(statistics.values(), parts, strict=True):
            tensor.copy_(part.view_as(tensor))
        return own

    @torch.no_grad()
    def validate(self) -> tuple[float, float]:
        """Mean loss and accuracy over the validation samples (or tokens), each counted once over all ranks.

        Raises:
            MusterError: those counted are not those there are.
        """
        model = self.strategy.unwrap(self.model)
        model.eval()
        sums = Sums(self.world.device)
        for inputs, targets in self.valid:
            with self.precision.autocast(self.world.device):
                self.gradients.evaluate(model, inputs, targets, sums)
        skipped = sums.values.new_tensor([float(self.valid.num_bad)])
        totals = self.total(torch.cat((sums.values, skipped))).tolist()
        expected = self.valid.source.num_valid_targets
        if totals[2] + totals[3] != expected or not totals[2]:
            raise MusterError(
                "validation did not count each sample once",
                seen=f"{totals[2]:.0f} counted and {totals[3]:.0f} skipped of {expected}",
                fix="see that all ranks have the same data folder",
                code=FAILED,
            )
        return averages(totals[:3])


def averages(sums: list[float]) -> tuple[float, float]:
    """Mean loss and accuracy (0 to 1) of [summed loss, hits, targets]."""
    loss, hits, num_targets = sums
    return loss / num_targets, hits / num_targets
