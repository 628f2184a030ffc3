"""The training loop: the same for every strategy, model and source of data."""

import math
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

import torch
from torch import nn

from train.compilation import compile_loss, uncompiled
from train.data.loader import Batches
from train.display import Display
from train.errors import FAILED
from train.faults import SharedFault
from train.interval import Interval
from train.metrics import Readout, StepTimes, Sums, averages
from train.mixup import mix
from train.notice import Notice, between
from train.optimizer import extent, lr_at, set_lr
from train.options import Options
from train.order import TrainOrder
from train.precision import Precision
from train.progress import Look, Progress, is_complete, share_of_look
from train.seeds import reseed
from train.state import Statistics, Trained
from train.strategies import Strategy
from train.validate import validate
from train.vitals import COMPUTING, DATA
from train.world import World

LOOK_STEPS = 10
"""Steps between two looks at the losses of all ranks, at most."""

LOG_STEPS = 50
"""Steps between two lines of metrics.jsonl after step LOG_ALL; before it each look is one."""

LOG_ALL = 1000

BOTH_WAYS = "forward and backward"
"""The name of these passes in a trace."""


@dataclass
class Loop:
    """One rank's training; `fit` runs it to the end.

    Attributes:
        model: as its strategy has wrapped it.
        log: takes a record for metrics.jsonl.
        save: writes a checkpoint; called on all ranks, with this rank's own statistics where others have others.
        notice: whether this rank was warned that it will be stopped.
        interval: from one checkpoint to the next within an epoch.
        warned: whether any was, as all ranks know: they stop after this step.
        is_due: whether the interval is over, as all ranks know.
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
    notice: Notice = field(default_factory=Notice)
    interval: Interval = field(default_factory=Interval)
    warned: bool = False
    is_due: bool = False

    def __post_init__(self) -> None:
        self.times.waits = self.world.waits
        assert isinstance(self.train.order, TrainOrder)
        self.order = self.train.order
        self.gradients = self.strategy.gradients(self.model, self.world, self.options)
        self.gradients.smoothing = self.options.label_smoothing
        compile_loss(self.gradients, self.options)
        self.num_steps, self.lr_ahead = extent(self.options, self.progress, self.order)
        # Soon, to learn how long a step takes; the very first is no measure.
        self.next_look = self.progress.step + 2
        self.looked_at = self.progress.step, time.perf_counter()

    def fit(self) -> Progress:
        """Trains to the end, or until a rank is warned; after each epoch validates and saves."""
        while not is_complete(self.progress, self.options):
            started = time.perf_counter()
            progress = self.progress
            epoch = progress.epoch
            self.train_epoch()
            own = self.average_statistics()
            average, valid = self.trained.average, None
            with uncompiled(self.options), nullcontext() if average is None else average.in_place():
                if not self.warned:
                    valid = validate(self, LOOK_STEPS)
            if valid is None:
                # There may be no time to validate. Who goes on does, when the epoch is complete.
                self.warned = True
                self.checkpoint(progress, own)
                return progress
            (train_loss, train_accuracy), (valid_loss, valid_accuracy) = averages(progress.sums), valid
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
            if self.order.num_samples - progress.sample < self.order.global_batch:
                progress.epoch, progress.sample, progress.sums = epoch + 1, 0, [0.0, 0.0, 0.0]
            self.log({"kind": "epoch", **record})
            self.display.epoch(record)
            # In the middle of an epoch each rank goes on from its own, as if it had not stopped.
            self.checkpoint(progress, {} if progress.epoch > epoch else own)
            if self.any_warned():
                return self.progress
        return self.progress

    def train_epoch(self) -> None:
        """Trains on the rest of the epoch, or up to `--max-steps`."""
        options, progress, order = self.options, self.progress, self.order
        max_steps = None if options.max_steps is None else options.max_steps - progress.step
        order.set_epoch(progress.epoch, progress.sample, max_steps)
        self.model.train()
        sums = Sums(self.world.device)
        look: Look | None = None
        glance: Readout | None = None
        self.display.start_epoch(progress.epoch, order.num_steps)
        self.times.start()
        batches = self.world.vitals.over(self.times.waiting(self.train), DATA, COMPUTING)
        done = 0
        for done in range(1, order.num_steps + 1):
            self.step(batches, sums)
            self.times.step()
            if progress.step >= self.next_look:
                # That of so many steps before has come by now: on all ranks alike, and no device is waited for.
                self.show(look, sums)
                if self.warned:
                    look = None
                    break
                # After the last step one is written anyway.
                if self.is_due and done < order.num_steps and self.gradients.is_settled(progress.step):
                    self.checkpoint_midway(sums, done)
                look = self.look(sums)
            if self.world.main:
                if glance is None and self.display.wants_loss() and self.world.counts:
                    glance = Readout(sums.values)  # of this rank alone: a step may take minutes
                if glance is not None and (values := glance.values()) is not None:
                    self.display.loss(averages(values)[0])
                    glance = None
                self.display.step(done)
        self.times.stop()
        self.show(look, sums)
        self.progress.sums, self.progress.sample = self.settle(sums, done)

    def settle(self, sums: Sums, steps: int) -> tuple[list[float], int]:
        """The epoch's sums and its used samples, where so many `steps` were done since the epoch was gone on with.

        All ranks have the same weights after it.
        """
        self.gradients.settle(self.trained.optimizer)
        totals = self.total(sums.values).tolist()
        if not math.isfinite(totals[0]):
            self.refuse(totals[0], sums)
        all_sums = [before + now for before, now in zip(self.progress.sums, totals, strict=True)]
        return all_sums, self.progress.sample + steps * self.order.global_batch

    def checkpoint(self, progress: Progress, own: Statistics) -> None:
        """Writes a checkpoint; the interval to the next one begins."""
        self.save(progress, own)
        self.interval.begin()
        self.is_due = False

    def checkpoint_midway(self, sums: Sums, steps: int) -> None:
        """Writes a checkpoint within an epoch, `steps` after it was gone on with. What is trained does not change."""
        started = time.perf_counter()
        self.times.stop()
        all_sums, sample = self.settle(sums, steps)
        own = self.average_statistics()
        self.checkpoint(replace(self.progress, sums=all_sums, sample=sample), own)
        for name, tensor in self.trained.statistics().items():
            tensor.copy_(own.get(name, tensor))
        self.times.start()
        step, before = self.looked_at
        self.looked_at = step, before + time.perf_counter() - started  # of which none was a step's

    def look(self, sums: Sums) -> Look:
        """A look at the losses, the warnings and the pace of all ranks, and the step of the next one."""
        (step, before), now = self.looked_at, time.perf_counter()
        self.looked_at = self.progress.step, now
        flags = self.notice.heard, self.interval.is_over()
        own = share_of_look(self.world, now - before, self.progress.step - step, *flags)
        counted = sums.values * float(self.world.counts)
        return Look(self.progress.step, Readout(self.world.all_reduce(torch.cat((counted, own)))), self.facts())

    def any_warned(self) -> bool:
        """Whether any rank was warned; for between epochs, as it waits for all ranks."""
        heard = torch.tensor(float(bool(self.notice.heard)), dtype=torch.float64, device=self.world.device)
        self.warned = bool(self.world.all_reduce(heard).item())
        return self.warned

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

    def facts(self) -> dict[str, Any] | None:
        """What a line of metrics.jsonl says of now; None where there is none at this step. Nothing waits for it."""
        step = self.progress.step
        if not self.world.main or step % (LOOK_STEPS if step <= LOG_ALL else LOG_STEPS):
            return None
        num_targets = self.order.global_batch * self.train.source.targets_of_sample
        lr = self.trained.optimizer.param_groups[0]["lr"]
        return {"lr": lr, **self.times.lately(num_targets, self.train.source.unit)}

    def show(self, look: Look | None, sums: Sums) -> None:
        """Shows and logs the loss of all ranks in the epoch up to a step.

        Raises:
            SharedFault: on all ranks, where it is no number.
        """
        if look is None:
            return
        *values, step_s, num_warned, num_due = look.sums.wait()
        if not math.isfinite(values[0]):
            self.refuse(values[0], sums)
        self.warned, self.is_due = num_warned > 0, num_due > 0
        steps = between(step_s, LOOK_STEPS)
        self.next_look = (self.progress.step // steps + 1) * steps
        loss, accuracy = averages(values)
        self.display.loss(loss)
        if look.facts is not None:
            self.log({"kind": "steps", "step": look.step, "train_loss": loss, "train_accuracy": accuracy, **look.facts})

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
            with nullcontext() if last else self.strategy.without_sync(self.model), self.times.part(BOTH_WAYS):
                self.gradients.compute(self.model, inputs, targets, self.precision.autocast(world.device), sums)
            if not last:
                self.gradients.hold()
        self.gradients.finish()
        if options.clip_norm is not None:
            self.gradients.clip(self.model, options.clip_norm)
        optimizer, average = self.trained.optimizer, self.trained.average
        set_lr(optimizer, lr_at(options, world.num_shares, progress.step, self.num_steps, self.lr_ahead))
        with self.times.part("optimizer"):
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        if average is not None:
            average.update(progress.step)
        progress.step += 1
        world.vitals.stepped(progress.step)

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
