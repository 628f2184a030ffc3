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
from torch.optim import Optimizer

from train.data.loader import Batches
from train.display import Display
from train.errors import FAILED, MusterError
from train.metrics import Readout, StepTimes, Sums
from train.optimizer import lr_at, set_lr
from train.options import Options
from train.order import TrainOrder
from train.precision import Precision
from train.seeds import reseed
from train.strategies import Strategy
from train.world import World

LOG_STEPS = 50


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
        log: takes a record for metrics.jsonl.
        save: writes a checkpoint; called on all ranks.
    """

    strategy: Strategy
    model: nn.Module
    optimizer: Optimizer
    train: Batches
    valid: Batches
    world: World
    options: Options
    precision: Precision
    display: Display
    times: StepTimes
    log: Callable[[dict[str, Any]], None]
    save: Callable[[Progress], None]
    progress: Progress = field(default_factory=Progress)

    def __post_init__(self) -> None:
        assert isinstance(self.train.order, TrainOrder)
        self.order = self.train.order
        self.gradients = self.strategy.gradients(self.model, self.world, self.options)

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
            self.average_buffers()
            train_loss, train_accuracy = averages(progress.sums)
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
            self.save(progress)
        return self.progress

    def train_epoch(self) -> None:
        """Trains on the rest of the epoch, or up to `--max-steps`."""
        options, progress, order = self.options, self.progress, self.order
        max_steps = None if options.max_steps is None else options.max_steps - progress.step
        order.set_epoch(progress.epoch, progress.sample, max_steps)
        self.model.train()
        sums = Sums(self.world.device)
        looks: list[tuple[int, Readout]] = []
        self.display.start_epoch(progress.epoch, order.num_steps)
        self.times.start()
        batches = self.times.waiting(self.train)
        for done in range(1, order.num_steps + 1):
            self.step(batches, sums)
            self.times.step()
            if self.world.main:
                if not self.world.counts:
                    pass  # another rank knows the loss, and tells it at the end of the epoch
                elif progress.step % LOG_STEPS == 0 or self.display.wants_loss():
                    looks.append((progress.step, Readout(sums.values)))
                while looks and (values := looks[0][1].values()) is not None:
                    self.show(looks.pop(0)[0], values)
                self.display.step(done)
        self.gradients.settle(self.optimizer)
        totals = self.total(sums.values)
        if not math.isfinite(totals[0]):
            self.refuse(totals[0], sums)
        progress.sums = [before + now for before, now in zip(progress.sums, totals, strict=True)]
        progress.sample += order.num_steps * order.global_batch
        if order.num_samples - progress.sample < order.global_batch:
            progress.epoch, progress.sample = progress.epoch + 1, 0
        for step, look in looks:
            if (values := look.values()) is not None:
                self.show(step, values)

    def refuse(self, loss: float, sums: Sums) -> None:
        """Raises MusterError, on all ranks, with the step and the rank where the loss was the first to be no number."""
        bad = [(first, rank) for rank, first in enumerate(self.world.gather(int(sums.first_bad))) if first >= 0]
        first, rank = min(bad, default=(sums.num_batches - 1, 0))
        step = self.progress.step - (sums.num_batches - 1 - first) // self.options.accumulate
        raise MusterError(
            f"the training loss is {loss} from step {step} on, where rank {rank} was the first",
            seen=f"--lr={self.options.lr} --warmup-steps={self.options.warmup_steps}, epoch {self.progress.epoch + 1}",
            fix="a smaller --lr, a longer warm-up or --clip-norm=1; the last checkpoint is from before: --resume",
            code=FAILED,
        )

    def show(self, step: int, values: list[float]) -> None:
        """Logs the loss of rank 0 in the epoch up to `step`."""
        loss, accuracy = averages(values)
        self.display.loss(loss)
        if step % LOG_STEPS == 0:
            self.log({"kind": "steps", "step": step, "train_loss": loss, "train_accuracy": accuracy})

    def step(self, batches: Any, sums: Sums) -> None:
        """One step of the optimizer, over `--accumulate` micro-batches. Nothing here waits for the device."""
        options, progress, world = self.options, self.progress, self.world
        self.gradients.begin(self.optimizer, progress.step)
        for turn, (inputs, targets) in enumerate(islice(batches, options.accumulate)):
            # By block and not by rank: dropout too is then the same whatever the world size.
            block = turn * world.num_shares + world.data_rank
            reseed(world.device, options.seed, "model", progress.step, block)
            last = turn + 1 == options.accumulate
            with nullcontext() if last else self.strategy.without_sync(self.model):
                self.gradients.compute(self.model, inputs, targets, self.precision.autocast(world.device), sums)
            if not last:
                self.gradients.hold()
        self.gradients.finish()
        if options.clip_norm is not None:
            self.gradients.clip(self.model, options.clip_norm)
        set_lr(self.optimizer, lr_at(options, world.num_shares, progress.step))
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        progress.step += 1

    def total(self, values: torch.Tensor) -> list[float]:
        """The sum of `values` over the ranks that count."""
        return self.world.all_reduce(values * float(self.world.counts)).tolist()

    @torch.no_grad()
    def average_buffers(self) -> None:
        """Makes the running statistics of batch normalisation the average over all ranks, on all ranks."""
        if self.world.world_size == 1:
            return
        buffers = [buffer for buffer in self.strategy.unwrap(self.model).buffers() if buffer.is_floating_point()]
        if not buffers:
            return
        flat = self.world.all_reduce(torch.cat([buffer.flatten() for buffer in buffers])) / self.world.world_size
        for buffer, part in zip(buffers, flat.split([buffer.numel() for buffer in buffers]), strict=True):
            buffer.copy_(part.view_as(buffer))

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
        totals = self.total(torch.cat((sums.values, skipped)))
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
