"""A training run from top to bottom: build, fit, train_step, evaluate, save; for every strategy, model and source."""

import json
import math
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, replace
from typing import Any

import torch

from muster import config
from muster.config import Options
from muster.config_file import to_toml
from muster.errors import ExitCode, MusterError
from muster.paths import content_of
from muster.train import compilation, data, models, optim, parallel
from muster.train.checkpoint.manager import CheckpointManager, Progress, Statistics, TrainState, is_complete, saved
from muster.train.checkpoint.run_directory import differences, restore, share_run
from muster.train.data.loader import Tensors, count_cores, open_batches
from muster.train.data.sampler import TrainSampler, reseed, seed_of
from muster.train.distributed.world import CHECKPOINT, COMPUTING, DATA, ENDING, VALIDATION, World, to_device
from muster.train.health import memory, preemption
from muster.train.health.faults import SharedFault, agree
from muster.train.parallel.strategy import Sums, send_as_one
from muster.train.reporting import console, metrics, profile, trackers
from muster.train.reporting.display import Display, header, promised_gpus
from muster.train.reporting.summary import Log, Setup, collect, command, results, strict_json, write_file
from muster.units import plural

SYNC_STEPS = 10
"""The most steps between sums over all ranks, and by default, up to step LOG_ALL, between lines of metrics.jsonl."""

WAIT_S = 2.0
"""About how many seconds a warning may wait for the next sum over all ranks; longer steps each have a sum."""

LOG_ALL, LOG_STEPS = 1000, 50
"""The step after which metrics.jsonl by default has fewer lines, and the number of steps between those."""


class Trainer:
    """One rank's training.

    Attributes:
        name: of the strategy.
        given: the options as the user gave them; in `options` the defaults that depend on others are filled in.
        settings: the options with `auto` and `default` resolved, as summaries and checkpoints have them.
        model: with the wrapper of its strategy; `trained` has it without the wrapper, and its optimizer.
        notice: whether this rank was warned that it will be stopped.
        warned: whether any rank was warned; the same on all ranks, which stop after this step.
        is_due: whether a checkpoint within the epoch is due; the same on all ranks.
        saved_step: the step of this run's last checkpoint; None without one.
    """

    strategy: parallel.Strategy

    def __init__(self, name: str, options: Options, world: World) -> None:
        self.started = time.perf_counter()
        self.name = name
        self.given, self.options = options, options.settled()
        self.world = world
        self.progress = Progress()
        self.notice, self.grace = preemption.PreemptionNotice(), preemption.GracePeriod(math.inf, "not known")
        self.limit_notes: list[str] = []
        self.log: Log | None = None
        self.tracker: trackers.Tracker | None = None
        self.saved_step: int | None = None
        self.warned = self.is_due = False

    def build(self) -> None:
        """Finds the data, builds the model, and opens the run's folder, which may have a checkpoint to go on from."""
        self.check()
        self.open_data()
        self.build_model()
        self.open_run()
        self.spread_model()
        self.open_checkpoints()
        self.show_header()

    def check(self) -> None:
        """Loads the strategy; raises MusterError, on all ranks, where this world can't train as the options say."""
        options, world = self.options, self.world
        clock = os.environ if world.main else {}

        def check_all() -> preemption.TimeLimit | None:
            config.check(self.name, options)
            self.strategy = parallel.load(self.name, world, options)
            compilation.check(options, world.device)
            if world.main and options.track != "none":
                trackers.check(options.track)
            time_limit, self.limit_notes = preemption.find(options.save_before, clock)
            self.grace = preemption.grace_period(os.environ, time_limit)
            return time_limit

        time_limit = agree(world, check_all)
        self.notice = preemption.PreemptionNotice(time_limit, preemption.ignored_until(os.environ))
        self.world = self.strategy.world = self.strategy.assign_data()

    def open_data(self) -> None:
        """Opens the data, and this rank's share of them."""
        options, world = self.options, self.world
        self.source = data.open_source(options, world)
        cores = count_cores(world)
        self.train, self.valid = agree(world, lambda: open_batches(self.source, options, world, cores))
        workers = {"train_num_workers": self.train.num_workers, "valid_num_workers": self.valid.num_workers}
        self.options = replace(options, **workers)

    def build_model(self) -> None:
        """Builds the unsharded model on each rank: with the same weights, or, of a transformer, with shapes only."""
        options, world, source = self.options, self.world, self.source
        self.precision = optim.choose_precision(options, world)
        choose_kernels(options, world)
        torch.manual_seed(seed_of(options.seed, "weights"))
        self.model = agree(world, lambda: models.build(options, source.num_classes, source.size))
        self.num_parameters = sum(parameter.numel() for parameter in self.model.parameters())

    def open_run(self) -> None:
        """Opens the run's folder and its logs."""
        options, world = self.options, self.world
        self.run = share_run(world, options, self.name)
        world.status.compiles = options.compile != "off"
        world.status.folder = console.log_folder(self.run.folder, world.host, os.environ)
        console.open_log(self.run.folder, world, command(), all_ranks=options.console == "all")
        if world.main and self.run.resumed_from is None:
            write_file(self.run.folder / "config.toml", to_toml(self.name, self.given))
        self.setup = Setup(self.name, options, world, self.precision, self.source, self.num_parameters, self.run)
        self.settings = self.setup.settings()

    def spread_model(self) -> None:
        """Spreads the model over the ranks, and builds its optimizer."""
        options = self.options
        self.model = self.strategy.wrap(self.model, self.precision)
        optimizer = self.strategy.shard_optimizer(optim.build(options, self.model, fused=self.precision.fused))
        inner = self.strategy.unwrap(self.model)
        compilation.compile_model(inner, options)
        self.trained = TrainState(model=inner, optimizer=optimizer)

    def open_checkpoints(self) -> None:
        """Opens the run's checkpoints; a resumed run loads the one that it continues."""
        options = self.options
        self.identity = {"model": options.model, "num_classes": self.source.num_classes, "optimizer": options.optimizer}
        self.manager = CheckpointManager(
            self.run.folder,
            self.world,
            keep=options.keep_checkpoints,
            in_background=not options.blocking_save,
            is_shared=self.run.is_shared,
        )
        if self.run.resumed_from is None:
            return
        before = restore(self.trained, self.run, self.identity, self.manager, self.world)
        self.progress = Progress(**before["progress"])
        self.saved_step = self.progress.step
        self.world.status.step = self.progress.step
        self.run.notes += differences(before, self.settings, self.world)

    def show_header(self) -> None:
        """Prints the header of the run, and the notes for the user."""
        options, world, source = self.options, self.world, self.source
        self.display = Display(options, source.unit, self.setup.targets_of_step, enabled=world.main)
        self.display.header(header(self.setup))
        for note in [
            *config.unused(self.options),
            *self.strategy.notes(),
            *(["compiles at the first step, which may take minutes"] if options.compile != "off" else []),
            *source.notes,
            *self.train.notes,
            *self.valid.notes,
            *self.run.notes,
            *([] if options.device == "cpu" else promised_gpus(os.environ, world)),
            *self.limit_notes,
        ]:
            self.display.note(note)

    def fit(self) -> None:
        """Trains to the end, waits for the last checkpoint, and writes the summary.

        Raises:
            Preempted: the run was warned; its state is in a checkpoint.
        """
        options, world, progress = self.options, self.world, self.progress
        if is_complete(progress, options) and self.needs_no_summary():
            done = f"{plural(progress.epoch, 'epoch')}, {plural(progress.step, 'step')}"
            self.display.note(f"the run is complete already ({done}); a larger --epochs or --max-steps continues it")
            return
        if world.main and self.run.resumed_from is not None:
            # Only now: a run that could not be continued keeps its config.toml.
            write_file(self.run.folder / "config.toml", to_toml(self.name, self.given))
        with nullcontext() if options.track == "none" else self.open_tracker() as self.tracker:
            # In a folder without a checkpoint, lines can only be those of a failed run, and are dropped.
            self.log = Log(self.run.folder, progress.step if saved(self.run.folder) else 0) if world.main else None
            # All ranks at once: a warning kills a rank that does not listen yet, which others would take for a fault.
            world.gather(None)
            self.notice.listen()
            before_s = 0.0 if self.log is None else self.log.seconds
            self.times = metrics.StepTimes(world.device, started=self.started - before_s)
            self.begin()
            memory.collect_garbage()
            try:
                with explain_nondeterminism():
                    self.train_epochs()
                world.status.enter(ENDING)
                self.manager.wait()
                self.report_saves()
            except MusterError:
                self.manager.close()
                raise
            finally:
                with suppress(MusterError):
                    self.report_saves()
                self.train.close()
                self.valid.close()
            if self.warned and not is_complete(progress, options):
                raise preemption.Preempted(progress.step, self.notice.reason)
            summary = self.summarize()
        self.display.summary(summary)

    def needs_no_summary(self) -> bool:
        """Whether a complete run has its summary, or can't have one; a run that was killed at its end lacks it."""
        step, history = self.progress.step, self.progress.history
        if not history or history[-1]["step"] != step:
            return True  # it has gone beyond a smaller `--epochs` or `--max-steps`
        has_one = False
        with suppress(OSError, ValueError, LookupError, TypeError, RecursionError):
            has_one = json.loads(content_of(self.run.folder / "summary.json"))["step"] == step
        return self.world.gather(has_one)[0]

    def open_tracker(self) -> trackers.Tracker:
        """Opens the tracker, to which rank 0 sends the values of metrics.jsonl."""
        kind = self.options.track if self.world.main else "none"
        place = self.run.folder, self.progress.step, self.settings
        return agree(self.world, lambda: trackers.open_tracker(kind, *place, self.display.note))

    def begin(self) -> None:
        """Prepares the first step: how gradients are computed, the number of steps, the sums over all ranks."""
        options, world, progress = self.options, self.world, self.progress
        assert isinstance(self.train.sampler, TrainSampler)
        assert options.lr is not None
        self.sampler = self.train.sampler
        self.gradients = self.strategy.gradients(self.model)
        self.gradients.autocast = self.precision.autocast(world.device)
        self.gradients.smoothing = options.label_smoothing
        compilation.compile_loss(self.gradients, options)
        self.num_steps, self.lr_ahead, self.lr_start = plan_steps(options, progress, self.sampler)
        if options.max_steps is not None and self.num_steps < options.max_steps:
            ends = f"--epochs={options.epochs} ends this run after {plural(self.num_steps, 'step')}"
            self.display.note(f"{ends}, before --max-steps={options.max_steps}")
        self.highest_lr = optim.highest_lr(options.lr, options.lr_scale, world.dp_size * options.accumulate)
        self.times.waits = world.waits
        if options.profile:
            # The hooks that name layers would cause a compiled model to be compiled again.
            units = set(models.blocks_of(self.trained.model)) if options.compile == "off" else set()
            layers = {name: module for name, module in self.trained.model.named_modules() if module in units}
            num_steps = self.num_steps - progress.step
            self.times.profile = profile.Profile(self.run.folder, num_steps, layers, world.device, main=world.main)
        # A short run has about ten lines in metrics.jsonl, too.
        self.log_every = options.log_every or min(SYNC_STEPS, max(1, self.num_steps // 10))
        self.sync = ProgressSync(world, progress.step, self.log_every)
        self.line: dict[str, Any] | None = None
        self.last_save = time.monotonic()

    def train_epochs(self) -> None:
        """Trains to the end, or until a rank is warned; after each epoch evaluates and saves."""
        while not is_complete(self.progress, self.options):
            started = time.perf_counter()
            progress = self.progress
            epoch = progress.epoch
            self.train_epoch()
            own = self.average_statistics()
            with compilation.uncompiled(self.options):
                valid = None if self.warned else self.evaluate()
            if valid is None:
                # There may be no time to validate: the run that continues does so at the end of the epoch.
                self.warned = True
                self.save(progress, own)
                return
            record = {
                "epoch": epoch + 1,
                "step": progress.step,
                **results("train", progress.sums, self.source.unit),
                **results("valid", valid, self.source.unit),
                "seconds": round(time.perf_counter() - started, 3),
            }
            progress.history = [*(old for old in progress.history if old["epoch"] != epoch + 1), record]
            progress.best_accuracy = max(old["valid_accuracy"] for old in progress.history)
            if self.sampler.num_samples - progress.sample < self.sampler.global_batch:
                progress.epoch, progress.sample, progress.sums = epoch + 1, 0, [0.0, 0.0, 0.0]
            self.record({"kind": "epoch", **record})
            self.display.epoch(record)
            # Within an epoch each rank continues from its own statistics, as if the run had not stopped.
            self.save(progress, {} if progress.epoch > epoch else own)
            is_warned = torch.tensor(float(bool(self.notice.reason)), dtype=torch.float64, device=self.world.device)
            self.warned = bool(self.world.all_reduce(is_warned).item())
            if self.warned:
                return

    def train_epoch(self) -> None:
        """Trains on the rest of the epoch, or up to `--max-steps`."""
        options, progress, sampler = self.options, self.progress, self.sampler
        max_steps = None if options.max_steps is None else options.max_steps - progress.step
        sampler.set_epoch(progress.epoch, progress.sample, max_steps)
        self.model.train()
        sums = Sums(self.world.device)
        self.display.start_epoch(progress.epoch, sampler.num_steps)
        self.times.start()
        self.sync.since = progress.step, time.perf_counter()  # the time between epochs belongs to no step
        batches = iter(self.train)
        done = 0
        for done in range(1, sampler.num_steps + 1):
            self.train_step(batches, sums)
            self.times.step()
            if progress.step < self.sync.next:
                continue
            # Reads the sum that was begun some steps ago, the same on all ranks, without waiting for recent steps.
            self.finish_sync(sums)
            self.display.step(done, progress.step)
            # After the last step of the epoch a checkpoint is written anyway.
            if self.is_due and not self.warned and done < sampler.num_steps:
                self.save_midway(sums, done)
            self.start_sync(sums)
            if self.warned:
                break
        self.times.stop()
        self.finish_sync(sums)
        self.progress.sums, self.progress.sample = self.settle(sums, done)

    def train_step(self, batches: Iterator[Tensors], sums: Sums) -> None:
        """One step of the optimizer, over `--accumulate` micro-batches. Nothing here waits for the device."""
        options, progress, world = self.options, self.progress, self.world
        lr = lr_at(options, self.highest_lr, progress.step, self.num_steps, self.lr_ahead, self.lr_start)
        for group in self.trained.optimizer.param_groups:
            group["lr"] = lr
        self.gradients.begin(progress.step)
        for turn in range(options.accumulate):
            world.status.enter(DATA)
            with self.times.waiting():
                inputs, targets = next(batches)
            world.status.enter(COMPUTING)
            # Seeded by block and not by rank, so that dropout too does not depend on the world size.
            block = turn * world.dp_size + world.dp_rank
            reseed(world.device, options.seed, "model", progress.step, block)
            alone = self.strategy.without_sync(self.model) if turn + 1 < options.accumulate else nullcontext()
            with alone, self.times.part("forward and backward"):
                self.gradients.compute(self.model, inputs, targets, sums)
        self.gradients.finish()
        if options.clip_norm is not None:
            self.gradients.clip(self.model, options.clip_norm)
        with self.times.part("optimizer"):
            self.trained.optimizer.step()
            self.trained.optimizer.zero_grad(set_to_none=True)
        if progress.step < options.warmup_steps:
            progress.warmed += self.sampler.global_batch
        progress.step += 1
        world.status.stepped(progress.step)

    @torch.no_grad()
    def evaluate(self) -> list[float] | None:
        """Summed loss, hits and targets of the validation samples; None where a rank was warned before the end.

        Each sample counts once over all ranks.

        Raises:
            SharedFault: not every sample was counted once, none can be read, or the loss is NaN.
        """
        model, world = self.strategy.unwrap(self.model), self.world
        model.eval()
        sums, sync = Sums(world.device), ProgressSync(world)
        world.status.enter(VALIDATION)
        for done, (inputs, targets) in enumerate(self.valid, 1):
            world.status.enter(VALIDATION)
            with self.gradients.autocast:
                self.gradients.evaluate(model, inputs, targets, sums)
            if done >= sync.next:
                if any(sync.finish(done)):
                    return None
                sync.start(done, self.notice.reason)
        skipped = sums.values.new_tensor([float(self.valid.num_bad)])
        totals = self.total(torch.cat((sums.values, skipped))).tolist()
        expected = self.source.num_valid_targets
        if totals[2] + totals[3] != expected or not totals[2]:
            wrong, fix = "validation did not count each sample once", "see that all ranks have the same data folder"
            if totals[3] == expected:
                wrong = "not one validation sample can be read"
                fix = "see that the data are complete and that this user may read them"
            seen = f"{totals[2]:.0f} counted and {totals[3]:.0f} skipped of {expected}, --data={self.options.data}"
            raise SharedFault(wrong, seen=seen, fix=fix, code=ExitCode.FAILED)
        if math.isnan(totals[0]):
            # The weights are spoilt, and there may be no further step whose loss would show it.
            raise self.divergence(f"the validation loss is nan after step {self.progress.step}", self.progress.step + 1)
        return totals[:3]

    def save(self, progress: Progress, own: Statistics) -> None:
        """Writes a checkpoint, on all ranks; with `own` statistics this rank continues from them, not the mean."""
        world = self.world
        world.status.enter(CHECKPOINT)
        self.manager.save(
            {
                "identity": self.identity,
                "options": self.settings,
                "world_size": world.world_size,
                "dp_size": world.dp_size,
                "strategy": self.name,
                "progress": asdict(progress),
                **self.trained.state(),
                "statistics": {str(world.rank): own},
            },
            progress.step,
        )
        self.saved_step = progress.step
        self.last_save = time.monotonic()
        self.is_due = False

    def save_midway(self, sums: Sums, steps: int) -> None:
        """Writes a checkpoint `steps` after the epoch was begun or resumed, without changing the training."""
        started = time.perf_counter()
        self.times.stop()
        all_sums, sample = self.settle(sums, steps)
        own = self.average_statistics()
        self.save(replace(self.progress, sums=all_sums, sample=sample), own)
        for name, tensor in self.trained.statistics().items():
            tensor.copy_(own.get(name, tensor))
        self.times.start()
        step, before = self.sync.since
        self.sync.since = step, before + time.perf_counter() - started  # the time to save belongs to no step

    def settle(self, sums: Sums, steps: int) -> tuple[list[float], int]:
        """The sums over all ranks and the used samples of the epoch, `steps` after it was begun or resumed."""
        self.gradients.check()
        totals = self.total(sums.values).tolist()
        if not math.isfinite(totals[0]):
            self.refuse(totals[0], sums)
        all_sums = [before + now for before, now in zip(self.progress.sums, totals, strict=True)]
        return all_sums, self.progress.sample + steps * self.sampler.global_batch

    def refuse(self, loss: float, sums: Sums) -> None:
        """Raises SharedFault, on all ranks, with the step and the rank where a loss was first not finite."""
        self.gradients.check()  # where gradients are damaged, raises an error that says more
        first, now = int(sums.first_bad), self.progress.step
        # Each rank counts back by its own batches: in a pipeline only some ranks know losses.
        own = [now - (sums.num_batches - 1 - first) // self.options.accumulate, first]
        bad = [(*found, rank) for rank, found in enumerate(self.world.gather(own)) if found[1] >= 0]
        step, _, rank = min(bad, default=(now, 0, 0))
        raise self.divergence(f"the training loss is {loss} from step {step} on, first on rank {rank}", step)

    def divergence(self, wrong: str, step: int) -> SharedFault:
        """The error for a loss that is not finite, computed from the weights with which `step` begins."""
        goes_on = ""
        if self.saved_step is not None:
            # The first loss after a checkpoint is that of the checkpoint's own weights.
            how = "was saved before: --resume" if step > self.saved_step + 1 else "gives the same loss"
            goes_on = f"; the checkpoint of step {self.saved_step} {how}"
        return SharedFault(
            wrong,
            seen=f"epoch {self.progress.epoch + 1}, at step {self.progress.step}, --lr={self.options.lr} "
            f"--warmup-steps={self.options.warmup_steps} --weight-decay={self.options.weight_decay}",
            fix=f"a smaller --lr, a longer warm-up or --clip-norm=1{goes_on}",
            code=ExitCode.FAILED,
        )

    @torch.no_grad()
    def average_statistics(self) -> Statistics:
        """Replaces the running statistics of batch normalisation by their mean over all ranks; returns the former."""
        statistics = self.trained.statistics()
        if self.world.world_size == 1 or not statistics:
            return {}
        own = {name: tensor.clone() for name, tensor in statistics.items()}
        send_as_one(list(statistics.values()), lambda flat: self.world.all_reduce(flat).div_(self.world.world_size))
        return own

    def reported(self, values: torch.Tensor) -> torch.Tensor:
        """`values` of this rank for a sum over all; zeros where another rank reports the same ones."""
        return values * float(self.world.reports_loss)

    def total(self, values: torch.Tensor) -> torch.Tensor:
        """The sum of `values` over the ranks that report them."""
        return self.world.all_reduce(self.reported(values))

    def start_sync(self, sums: Sums) -> None:
        """Begins to add up the losses, the warnings and the pace of all ranks."""
        self.sync.start(self.progress.step, self.notice.reason, self.is_save_due(), values=self.reported(sums.values))
        self.line = self.line_now()

    def is_save_due(self) -> bool:
        """Whether `--save-every` minutes have passed since the last checkpoint, by the clock of rank 0."""
        return self.world.main and 0 < 60 * self.options.save_every <= time.monotonic() - self.last_save

    def line_now(self) -> dict[str, Any] | None:
        """The values for this step's line of metrics.jsonl; None where it has none. Does not wait for the device."""
        step = self.progress.step
        is_late = step > LOG_ALL and not self.options.log_every
        if not self.world.main or step % (LOG_STEPS if is_late else self.log_every):
            return None
        num_targets = self.sampler.global_batch * self.source.targets_of_sample
        lr = self.trained.optimizer.param_groups[0]["lr"]
        return {"step": step, "lr": lr, **self.times.recent(num_targets, self.source.unit)}

    def finish_sync(self, sums: Sums) -> None:
        """Shows and logs the epoch's loss over all ranks, by the sum that was begun before; notes warnings of any rank.

        Raises:
            SharedFault: on all ranks, where the loss is not finite.
        """
        self.report_saves()
        if not (found := self.sync.finish(self.progress.step)):
            return
        num_warned, num_due, *values = found
        if not math.isfinite(values[0]):
            self.refuse(values[0], sums)
        self.warned, self.is_due = num_warned > 0, num_due > 0
        learning = results("train", list(map(sum, zip(self.progress.sums, values, strict=True))), self.source.unit)
        self.display.last_loss = learning["train_loss"]
        if self.line is not None:
            self.record({"kind": "steps", **self.line, **learning})

    def report_saves(self) -> None:
        """Reports the checkpoints that have become complete on the disk."""
        while self.manager.completed:
            step, seconds = self.manager.completed.popleft()
            if self.log is None:
                continue
            self.log.write({"kind": "checkpoint", "step": step, "save_s": round(seconds, 3)})
            too_long = self.grace.note(seconds, self.times.seconds[-1] if self.times.seconds else 0.0)
            if too_long is not None:
                self.display.note(too_long)
                self.grace = preemption.GracePeriod(math.inf, "said once")

    def record(self, values: dict[str, Any]) -> None:
        """Writes a line of metrics.jsonl, on rank 0."""
        if self.log is not None:
            self.log.write(values)
        if self.tracker is not None:
            self.tracker.write(values)

    def summarize(self) -> dict[str, Any]:
        """The summary of the run, which rank 0 writes; to be called on all ranks."""
        summary = collect(
            self.setup,
            self.progress,
            self.times,
            waits_s=self.gradients.waits_s(),
            bad=self.train.bad | self.valid.bad,
            seconds=time.perf_counter() - self.started,
            note=self.display.note,
        )
        summary |= self.gradients.report()
        if self.world.main:
            write_file(self.run.folder / "summary.json", strict_json(summary))
        if self.tracker is not None:
            self.tracker.write({"kind": "run", **{name: summary[name] for name in summary.keys() - {"options"}}})
        return summary


class ProgressSync:
    """Adds up the progress of all ranks, after the same steps (or batches) on each, without waiting for the device.

    A sum begins after one step and is read after a later one, when it is complete.

    Args:
        done: the number of steps that are done already.
        every: besides, a sum begins after each multiple of this number of steps.

    Attributes:
        next: the step after which the next sum begins.
    """

    def __init__(self, world: World, done: int = 0, every: int = SYNC_STEPS) -> None:
        self.world = world
        self.every = every
        # Soon, to learn how long a step takes.
        self.next = done + 1
        self.since = done, time.perf_counter()
        self.sums: torch.Tensor | None = None
        self.copied: torch.cuda.Event | None = None

    def start(self, done: int, *flags: bool | str, values: torch.Tensor | None = None) -> None:
        """Begins a sum after `done` steps: of the mean time of a step, `flags` and `values`."""
        (before, then), now = self.since, time.perf_counter()
        self.since = done, now
        progress = [(now - then) / (done - before) / self.world.world_size, *map(float, map(bool, flags))]
        own = to_device(progress, self.world.device, torch.float64)
        sums = self.sums = self.world.all_reduce(own if values is None else torch.cat((own, values)))
        if sums.is_cuda:
            self.sums = torch.empty(sums.shape, dtype=sums.dtype, pin_memory=True)
            self.sums.copy_(sums, non_blocking=True)
            self.copied = torch.cuda.Event()
            self.copied.record()

    def finish(self, done: int) -> list[float]:
        """Reads the sum: the number of ranks with each flag, then the sums of values; empty where none was begun."""
        self.next = max(self.next, done + 1)
        if self.sums is None:
            return []
        if self.copied is not None:
            self.copied.synchronize()
        step_s, *rest = self.sums.tolist()
        self.sums = self.copied = None
        # Divisors of ten, so that the steps with a line in metrics.jsonl are among them.
        wanted = WAIT_S / max(step_s, 1e-9)
        steps = min(SYNC_STEPS, max((steps for steps in (10, 5, 2) if steps <= wanted), default=1))
        self.next = min((done // size + 1) * size for size in (steps, self.every))
        return rest


def plan_steps(options: Options, progress: Progress, sampler: TrainSampler) -> tuple[int, int, float]:
    """The run's number of steps, the number by which its cosine is ahead, and the step at which the cosine begins.

    A run that is continued with another number of ranks has made steps of another size. Its cosine follows the samples
    used, from the end of the warm-up to the end of the run; with `--max-steps` or `--lr-steps` it follows the steps.
    """
    warmup = options.warmup_steps
    epoch_steps = sampler.num_samples // sampler.global_batch
    sample = min(progress.sample, sampler.num_samples)  # the data set may have become smaller
    left = (options.epochs - progress.epoch - 1) * epoch_steps
    left += (sampler.num_samples - sample) // sampler.global_batch
    num_steps = progress.step + left
    if options.max_steps is not None and options.max_steps < num_steps:
        return options.max_steps, 0, warmup
    if options.lr_steps:
        return num_steps, 0, warmup
    # A checkpoint of an older version has no number of samples for its warm-up.
    warmed = progress.warmed or min(warmup, progress.step) * sampler.global_batch
    # From what is left, and with one division: the same bits wherever a run with this number of ranks was stopped.
    start = (warmed + max(0, warmup - progress.step) * sampler.global_batch) / sampler.global_batch
    return num_steps, options.epochs * epoch_steps - num_steps, start


def lr_at(options: Options, highest: float, step: int, num_steps: int, ahead: int, start: float) -> float:
    """The learning rate of `step` (from 0): a linear warm-up, then constant, or down half a cosine (arXiv 1608.03983).

    A constant rate does not depend on the end of the run, which can therefore be extended. A cosine begins at `start`,
    after the warm-up, is `ahead` of the steps, and ends at `--lr-steps`, or at the last of the `num_steps`.
    """
    if step < options.warmup_steps:
        return highest * (step + 1) / options.warmup_steps
    if options.lr_schedule == "constant":
        return highest
    length = (options.lr_steps or num_steps + ahead) - start
    done = min(1.0, max(0.0, (step + ahead - start) / length)) if length > 0 else 1.0
    return highest * (options.lr_end + (1 - options.lr_end) * (1 + math.cos(math.pi * done)) / 2)


def choose_kernels(options: Options, world: World) -> None:
    """Selects the fastest kernels, or with `--deterministic` those that give the same bits in each run."""
    if options.deterministic:
        # cuBLAS reads it when it starts (docs.nvidia.com/cuda/cublas, results reproducibility).
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    if world.device.type == "cuda":
        torch.backends.cudnn.benchmark = not options.deterministic
    else:
        memory.keep_heap()


@contextmanager
def explain_nondeterminism() -> Iterator[None]:
    """A context that turns torch's refusal to use a nondeterministic kernel into an error for the user."""
    try:
        yield
    except RuntimeError as error:
        if "deterministic" not in str(error) or not torch.are_deterministic_algorithms_enabled():
            raise
        raise MusterError(
            str(error).partition(", but")[0], seen="--deterministic", fix="another model, or leave out --deterministic"
        ) from error
