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

from muster.config import Options
from muster.errors import ExitCode, MusterError
from muster.train.compilation import compile_loss, uncompiled
from muster.train.data.loader import Batches
from muster.train.display import Display
from muster.train.faults import SharedFault
from muster.train.metrics import Readout, StepTimes, Sums, averages, results
from muster.train.optimizer import extent, lr_at
from muster.train.order import TrainOrder
from muster.train.precision import Precision
from muster.train.preemption import Interval, Notice, between
from muster.train.seeds import reseed
from muster.train.state import Progress, Statistics, TrainState, is_complete
from muster.train.strategies import Strategy
from muster.train.transfer import to_device
from muster.train.world import COMPUTING, DATA, VALIDATION, World

LOOK_STEPS = 10
"""Steps between two looks at the losses of all ranks, at most."""

LOG_STEPS = 50
"""Steps between two lines of metrics.jsonl after step LOG_ALL; before it LOOK_STEPS, and fewer in a short run."""

LOG_ALL = 1000

BOTH_WAYS = "forward and backward"
"""The name of these passes in a trace."""


class Looks:
    """Looks at all ranks, after the same steps (or batches) on all of them. Nothing waits for the device.

    A look is taken after one step and read after a later one, by when it has come.

    Args:
        done: steps that are done already.
        every: steps of which one looks after each multiple, besides.

    Attributes:
        next: the step after which one looks again.
    """

    def __init__(self, world: World, done: int = 0, every: int = LOOK_STEPS) -> None:
        self.world = world
        self.every = every
        # Soon, to learn how long a step takes.
        self.next = done + 1
        self.since = done, time.perf_counter()
        self.under_way: Readout | None = None

    def take(self, done: int, *flags: bool | str, values: torch.Tensor | None = None) -> None:
        """Begins a look after `done` steps: at the mean time of a step, `flags` and `values`."""
        (before, then), now = self.since, time.perf_counter()
        self.since = done, now
        told = [(now - then) / (done - before) / self.world.world_size, *map(float, map(bool, flags))]
        own = to_device(told, self.world.device, torch.float64)
        self.under_way = Readout(self.world.all_reduce(own if values is None else torch.cat((own, values))))

    def read(self, done: int) -> list[float]:
        """How many ranks had each flag, then the sums of the values, by the look that is under way; empty without."""
        self.next = max(self.next, done + 1)
        if self.under_way is None:
            return []
        step_s, *rest = self.under_way.wait()
        self.under_way = None
        steps = between(step_s, LOOK_STEPS)
        self.next = min((done // size + 1) * size for size in (steps, self.every))
        return rest


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
        has_checkpoint: whether there is one of this run.
    """

    strategy: Strategy
    model: nn.Module
    trained: TrainState
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
    has_checkpoint: bool = False

    def __post_init__(self) -> None:
        self.times.waits = self.world.waits
        assert isinstance(self.train.order, TrainOrder)
        self.order = self.train.order
        self.gradients = self.strategy.gradients(self.model, self.world, self.options)
        self.gradients.smoothing = self.options.label_smoothing
        compile_loss(self.gradients, self.options)
        self.num_steps, self.lr_ahead = extent(self.options, self.progress, self.order)
        # A chart of a short run, too, needs some points.
        self.log_every = self.options.log_every or min(LOOK_STEPS, max(1, self.num_steps // 10))
        self.looks = Looks(self.world, self.progress.step, self.log_every)
        self.looks.next += self.log_every > 1  # the very first step is no measure
        self.facts: dict[str, Any] | None = None

    def fit(self) -> Progress:
        """Trains to the end, or until a rank is warned; after each epoch validates and saves."""
        while not is_complete(self.progress, self.options):
            started = time.perf_counter()
            progress = self.progress
            epoch = progress.epoch
            self.train_epoch()
            own = self.average_statistics()
            with uncompiled(self.options):
                valid = None if self.warned else self.validate()
            if valid is None:
                # There may be no time to validate. Who goes on does, when the epoch is complete.
                self.warned = True
                self.checkpoint(progress, own)
                return progress
            progress.best_accuracy = max(progress.best_accuracy, valid[1])
            unit = self.train.source.unit
            record = {
                "epoch": epoch + 1,
                "step": progress.step,
                **results("train", *averages(progress.sums), unit),
                **results("valid", *valid, unit),
                "seconds": round(time.perf_counter() - started, 3),
            }
            progress.history = [*(old for old in progress.history if old["epoch"] != epoch + 1), record]
            if self.order.num_samples - progress.sample < self.order.global_batch:
                progress.epoch, progress.sample, progress.sums = epoch + 1, 0, [0.0, 0.0, 0.0]
            self.log({"kind": "epoch", **record})
            self.display.epoch(record)
            # In the middle of an epoch each rank goes on from its own, as if it had not stopped.
            self.checkpoint(progress, {} if progress.epoch > epoch else own)
            heard = torch.tensor(float(bool(self.notice.heard)), dtype=torch.float64, device=self.world.device)
            self.warned = bool(self.world.all_reduce(heard).item())
            if self.warned:
                return self.progress
        return self.progress

    def train_epoch(self) -> None:
        """Trains on the rest of the epoch, or up to `--max-steps`."""
        options, progress, order = self.options, self.progress, self.order
        max_steps = None if options.max_steps is None else options.max_steps - progress.step
        order.set_epoch(progress.epoch, progress.sample, max_steps)
        self.model.train()
        sums = Sums(self.world.device)
        self.display.start_epoch(progress.epoch, order.num_steps)
        self.times.start()
        batches = self.world.vitals.over(self.times.waiting(self.train), DATA, COMPUTING)
        done = 0
        for done in range(1, order.num_steps + 1):
            self.step(batches, sums)
            self.times.step()
            if progress.step >= self.looks.next:
                # That of so many steps before has come by now: on all ranks alike, and no device is waited for.
                self.show(sums)
                if self.warned:
                    break
                # After the last step one is written anyway.
                if self.is_due and done < order.num_steps:
                    self.checkpoint_midway(sums, done)
                self.look(sums)
            self.display.step(done)
        self.times.stop()
        self.show(sums)
        self.progress.sums, self.progress.sample = self.settle(sums, done)

    @torch.no_grad()
    def validate(self) -> tuple[float, float] | None:
        """Mean loss and accuracy over the validation samples (or tokens); None where a rank was warned before the end.

        Each sample counts once over all ranks.

        Raises:
            MusterError: those counted are not those there are.
        """
        model, world = self.strategy.unwrap(self.model), self.world
        model.eval()
        sums, looks = Sums(world.device), Looks(world)
        for done, (inputs, targets) in enumerate(world.vitals.over(self.valid, VALIDATION, VALIDATION), 1):
            with self.precision.autocast(world.device):
                self.gradients.evaluate(model, inputs, targets, sums)
            if done >= looks.next:
                if any(looks.read(done)):
                    return None
                looks.take(done, self.notice.heard)
        skipped = sums.values.new_tensor([float(self.valid.num_bad)])
        totals = self.total(torch.cat((sums.values, skipped))).tolist()
        expected = self.valid.source.num_valid_targets
        if totals[2] + totals[3] != expected or not totals[2]:
            raise MusterError(
                "validation did not count each sample once",
                seen=f"{totals[2]:.0f} counted and {totals[3]:.0f} skipped of {expected}",
                fix="see that all ranks have the same data folder",
                code=ExitCode.FAILED,
            )
        return averages(totals[:3])

    def settle(self, sums: Sums, steps: int) -> tuple[list[float], int]:
        """The epoch's sums and its used samples, where so many `steps` were done since the epoch was gone on with.

        All ranks have the same weights after it.
        """
        self.gradients.check()
        totals = self.total(sums.values).tolist()
        if not math.isfinite(totals[0]):
            self.refuse(totals[0], sums)
        all_sums = [before + now for before, now in zip(self.progress.sums, totals, strict=True)]
        return all_sums, self.progress.sample + steps * self.order.global_batch

    def checkpoint(self, progress: Progress, own: Statistics) -> None:
        """Writes a checkpoint; the interval to the next one begins."""
        self.save(progress, own)
        self.has_checkpoint = True
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
        step, before = self.looks.since
        self.looks.since = step, before + time.perf_counter() - started  # of which none was a step's

    def look(self, sums: Sums) -> None:
        """Begins a look at the losses, the warnings and the pace of all ranks."""
        flags = self.notice.heard, self.interval.is_over()
        self.looks.take(self.progress.step, *flags, values=sums.values * float(self.world.counts))
        self.facts = self.facts_now()

    def refuse(self, loss: float, sums: Sums) -> None:
        """Raises SharedFault, on all ranks, with the step and the rank where the loss was the first to be no number."""
        self.gradients.check()  # which may know a nearer reason, and raises it
        bad = [(first, rank) for rank, first in enumerate(self.world.gather(int(sums.first_bad))) if first >= 0]
        first, rank = min(bad, default=(sums.num_batches - 1, 0))
        step = self.progress.step - (sums.num_batches - 1 - first) // self.options.accumulate
        raise SharedFault(
            f"the training loss is {loss} from step {step} on, where rank {rank} was the first",
            seen=f"epoch {self.progress.epoch + 1}, at step {self.progress.step}, --lr={self.options.lr} "
            f"--warmup-steps={self.options.warmup_steps}",
            fix="a smaller --lr, a longer warm-up or --clip-norm=1"
            + ("; the last checkpoint is from before: --resume" if self.has_checkpoint else ""),
            code=ExitCode.FAILED,
        )

    def facts_now(self) -> dict[str, Any] | None:
        """What a line of metrics.jsonl says of now; None where there is none at this step. Nothing waits for it."""
        step = self.progress.step
        is_late = step > LOG_ALL and not self.options.log_every
        if not self.world.main or step % (LOG_STEPS if is_late else self.log_every):
            return None
        num_targets = self.order.global_batch * self.train.source.targets_of_sample
        lr = self.trained.optimizer.param_groups[0]["lr"]
        return {"step": step, "lr": lr, **self.times.lately(num_targets, self.train.source.unit)}

    def show(self, sums: Sums) -> None:
        """Shows and logs the loss of all ranks in the epoch, up to the step of the look that is under way.

        Raises:
            SharedFault: on all ranks, where it is no number.
        """
        if not (found := self.looks.read(self.progress.step)):
            return
        num_warned, num_due, *values = found
        if not math.isfinite(values[0]):
            self.refuse(values[0], sums)
        self.warned, self.is_due = num_warned > 0, num_due > 0
        loss, accuracy = averages(values)
        self.display.loss(loss)
        if self.facts is not None:
            self.log({"kind": "steps", **self.facts, **results("train", loss, accuracy, self.train.source.unit)})

    def step(self, batches: Any, sums: Sums) -> None:
        """One step of the optimizer, over `--accumulate` micro-batches. Nothing here waits for the device."""
        options, progress, world = self.options, self.progress, self.world
        self.gradients.begin(progress.step)
        for turn, (inputs, targets) in enumerate(islice(batches, options.accumulate)):
            # By block and not by rank: dropout too is then the same whatever the world size.
            block = turn * world.num_shares + world.data_rank
            reseed(world.device, options.seed, "model", progress.step, block)
            last = turn + 1 == options.accumulate
            with nullcontext() if last else self.strategy.without_sync(self.model), self.times.part(BOTH_WAYS):
                self.gradients.compute(self.model, inputs, targets, self.precision.autocast(world.device), sums)
        self.gradients.finish()
        if options.clip_norm is not None:
            self.gradients.clip(self.model, options.clip_norm)
        optimizer = self.trained.optimizer
        lr = lr_at(options, world.num_shares, progress.step, self.num_steps, self.lr_ahead)
        for group in optimizer.param_groups:
            group["lr"] = lr
        with self.times.part("optimizer"):
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
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
