"""The display of a run: its header, its progress, and its summary table."""

import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from muster.config import Options
from muster.errors import one_line
from muster.train.distributed.world import World
from muster.train.optim import highest_lr
from muster.train.reporting import console
from muster.train.reporting.summary import Setup
from muster.units import duration, listed, percent, plural, quantity

WIDTH = 80
LINE_EVERY_S = 15.0
REFRESH_EVERY_S = 0.25
BAR_WIDTH = 12

STRAGGLES = 1.05
"""The slowest rank is named where it is busy this many times as long as the median rank."""


class Display:
    """Shows the run, on rank 0; on the others it shows nothing.

    A file gets a line every `--log-every` steps, or LINE_EVERY_S; a terminal has one line, which is overwritten.

    Args:
        unit: images or tokens.
        targets_of_step: images or tokens of a step, over all ranks.
        enabled: whether this rank shows the run.
    """

    def __init__(self, options: Options, unit: str, targets_of_step: int, *, enabled: bool) -> None:
        self.epochs, self.log_every = options.epochs, options.log_every
        self.unit, self.targets_of_step = unit, targets_of_step
        self.enabled = enabled
        is_terminal = sys.stdout.isatty()
        width = None if is_terminal else WIDTH
        self.console = Console(file=sys.stdout, width=width, highlight=False, emoji=False, quiet=not enabled)
        self.draw: Callable[[str], object] | None = None
        if enabled and is_terminal:
            self.draw = sys.stdout.draw if isinstance(sys.stdout, console.Tee) else sys.stdout.write
        self.head_shown = False
        self.last_loss: float | None = None  # the trainer puts here what is shown next
        self.line_due = self.screen_due = 0.0

    def header(self, rows: dict[str, str]) -> None:
        """Shows the header, a line for each of `rows`."""
        width = max(map(len, rows))
        for name, value in rows.items():
            self.console.print(f"[bold]{name:<{width}}[/bold]  {escape(one_line(value))}", soft_wrap=True)
        self.console.print()

    def note(self, text: str) -> None:
        """Shows one line that the user should read."""
        self.clear()
        self.console.print(f"note: {one_line(text)}", style="yellow", markup=False, soft_wrap=True)

    def start_epoch(self, epoch: int, num_steps: int) -> None:
        """Begins the display of an epoch (from 0) of `num_steps` steps."""
        self.epoch_number, self.num_steps = epoch + 1, num_steps
        self.started = time.perf_counter()
        self.line_due, self.screen_due = self.started + LINE_EVERY_S, self.started
        self.last_loss = None

    def step(self, done: int, step: int) -> None:
        """Shows the progress, if that is due: `done` steps of the epoch are done, `step` in all."""
        now = time.perf_counter()
        is_line_due = step % self.log_every == 0 if self.log_every else now >= self.line_due
        is_screen_due = self.draw is not None and now >= self.screen_due
        if not self.enabled or not (is_line_due or is_screen_due):
            return
        seconds = now - self.started
        state = f"{done * self.targets_of_step / seconds:,.0f} {self.unit}/s"
        state += f"  loss {self.last_loss:.4f}" if self.last_loss is not None else ""
        line = f"  epoch {self.epoch_number}/{self.epochs}  step {done}/{self.num_steps}  {state}"
        if is_line_due:
            self.line_due = now + LINE_EVERY_S
            (self.console.print if self.draw is None else console.log_line)(line)
        if self.draw is not None:
            self.screen_due = now + REFRESH_EVERY_S
            bar = "#" * (BAR_WIDTH * done // self.num_steps)
            left = duration(seconds / done * (self.num_steps - done))
            line = f"  epoch {self.epoch_number}/{self.epochs}  [{bar:.<{BAR_WIDTH}}] {done}/{self.num_steps}"
            line += f"  {state}  {left} left"
            # Whatever is printed next overwrites it.
            self.draw(f"{line[: self.console.width - 1]}{console.ERASE}\r")
            sys.stdout.flush()

    def clear(self) -> None:
        """Erases the line with the progress from a terminal."""
        if self.draw is not None:
            self.draw(console.ERASE)

    def epoch(self, record: dict[str, Any]) -> None:
        """Shows the results of an epoch."""
        if not self.enabled:
            console.log_line(f"epoch {record['epoch']}/{self.epochs}  step {record['step']}  {record['seconds']:.1f} s")
            return
        self.clear()
        score, width, digits = ("perplexity", 10, ",.4g") if self.unit == "tokens" else ("accuracy", 9, ".2%")
        if not self.head_shown:
            self.head_shown = True
            self.console.print(
                f"{'epoch':>9}  {'train loss':>10}  {score:>{width}}  {'valid loss':>10}  {score:>{width}}  "
                f"{'time':>8}",
                style="bold",
            )
        parts = (
            f"{(loss := record[f'{part}_loss']):>10{'.4f' if loss < 1e5 else '.4g'}}  "
            f"{record[f'{part}_{score}']:>{width}{digits}}"
            for part in ("train", "valid")
        )
        self.console.print(
            f"{record['epoch']:>4}/{self.epochs:<4}  {'  '.join(parts)}  {record['seconds']:>6.1f} s", markup=False
        )

    def summary(self, summary: dict[str, Any]) -> None:
        """Shows the table at the end of a run."""
        title = f"{summary['model']} on {summary['data']}, {summary['strategy']}"
        self.console.print()
        self.console.print(one_line(title), style="bold", markup=False)
        self.console.print(table(summary, self.unit, min(WIDTH, self.console.width)))


def header(setup: Setup) -> dict[str, str]:
    """The header of a run: the name and the value of each line."""
    options, world, source, run = setup.options, setup.world, setup.source, setup.run
    device = torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else "CPU"
    kind = f"{source.num_classes} classes, {source.size} x {source.size} pixels"
    if source.unit == "tokens":
        kind = f"sequences of {source.size} tokens, vocabulary of {source.num_classes}"
    momentum = f"momentum {options.momentum:g}, " if options.optimizer == "sgd" else ""
    rows = {
        "world": f"{plural(world.world_size, 'process')} on {listed(world.nodes)} "
        f"({setup.strategy}{', ' + world.backend if world.backend else ''})",
        "device": f"{device}, {setup.precision}",
        "model": f"{options.model}, {setup.num_parameters / 1e6:.1f} M parameters",
        "data": f"{options.data}: {len(source.train):,} train, {len(source.valid):,} validate, " + kind,
        "batch": f"{setup.global_batch} "
        f"({options.batch_size} x {plural(world.dp_size, 'process' if world.dp is None else 'group')}"
        + (f" x {options.accumulate} accumulated)" if options.accumulate > 1 else ")"),
        "optimizer": f"{options.optimizer}, {momentum}weight decay {options.weight_decay:g}; seed {options.seed}",
        "lr": learning_rate(options, options.accumulate * world.dp_size),
        "run": str(run.folder),
    }
    if options.train_num_workers or options.valid_num_workers:
        rows["loading"] = (
            f"{options.train_num_workers} workers a rank for training, {options.valid_num_workers} for validation"
        )
    if run.resumed_from is not None:
        rows["resumes"] = str(run.resumed_from)
    return rows


def learning_rate(options: Options, num_micro_batches: int) -> str:
    """The learning rate of a step of `num_micro_batches`, and its schedule, in words; `options` are settled."""
    assert options.lr is not None
    highest = highest_lr(options.lr, options.lr_scale, num_micro_batches)
    words = f"{highest:.4g}"
    if options.lr_scale != "none":
        words += f" ({options.lr:g} x {highest_lr(1.0, options.lr_scale, num_micro_batches):.4g} by --lr-scale)"
    if options.warmup_steps:
        words += f" after {plural(options.warmup_steps, 'step')} of warm-up"
    if options.lr_schedule == "constant":
        return f"{words}, then constant" if options.warmup_steps else f"{words}, constant"
    last = f"step {options.lr_steps}" if options.lr_steps else "the last step"
    return f"{words}, down half a cosine to {highest * options.lr_end:.4g} at {last}"


def promised_gpus(environ: Mapping[str, str], world: World) -> list[str]:
    """A warning where the job was given GPUs that torch does not see."""
    promised = environ.get("CUDA_VISIBLE_DEVICES", "")
    if world.device.type == "cuda" or promised in ("", "-1") or torch.cuda.is_available():
        return []
    return [
        f"TRAINING ON THE CPU: CUDA_VISIBLE_DEVICES={promised} promises GPUs, but torch sees none. "
        "In Apptainer add --nv, in docker --gpus all."
    ]


def table(summary: dict[str, Any], unit: str, width: int) -> Table:
    """The table of `summary`; its `unit` is images or tokens."""
    device = "GPU" if summary["device"].startswith("cuda") else "process"
    shown = Table(box=box.ROUNDED, show_header=False, width=width, padding=(0, 1))
    shown.add_column(style="dim", no_wrap=True)
    shown.add_column(ratio=1, overflow="fold")
    score, show = ("perplexity", quantity) if unit == "tokens" else ("accuracy", partial(percent, digits=2))
    final, best = (show(summary[f"{which}_{score}"]) for which in ("final", "best"))
    shown.add_row(f"validation {score}", f"[bold green]{final}[/bold green] at the end, {best} at best")
    shown.add_row("loss", f"{summary['final_train_loss']:.4f} training, {summary['final_valid_loss']:.4f} validation")
    shown.add_section()
    if summary["first_step_s"] is not None:  # a resumed run may have nothing left but to validate
        speed(shown, summary, unit, device)
        shown.add_section()
    costs(shown, summary, unit, device)
    shown.add_section()
    if summary.get("profile"):
        steps = f"{plural(summary['profile_steps'], 'step')} of rank 0, for ui.perfetto.dev; operations.txt beside it"
        shown.add_row("trace", f"{escape(summary['profile'])} below the run's folder,\n{steps}")
        shown.add_section()
    shown.add_row("steps in all", f"{summary['step']:,}, this run took {duration(summary['seconds'])}")
    if summary["bad_samples"]:
        shown.add_row("samples not readable", f"[yellow]{len(summary['bad_samples'])}[/yellow], see summary.json")
    shown.add_row("files", escape(one_line(summary["folder"])))
    return shown


def speed(shown: Table, summary: dict[str, Any], unit: str, device: str) -> None:
    """Adds rates and times of steps, and their parts, to the table `shown`."""
    step, number = summary["step_time_s"], summary["world_size"]
    each = f"  ({summary[f'{unit}_per_second_per_rank']:,.1f} a {device}, {number} of them)" if number > 1 else ""
    shown.add_row(f"{unit} per second", f"[bold]{summary[f'{unit}_per_second']:,.1f}[/bold]{each}")
    times = [f"{duration(step[key])} {name}" for key, name in (("p50", "median"), ("p95", "p95"), ("p99", "p99"))]
    shown.add_row("time of a step", ", ".join(times))
    shown.add_row("first step", f"{summary['first_step_s']:.2f} s")
    if (shares := summary.get("shares")) is not None:
        shown.add_row("of a step", parts(shares, alone=number == 1))
    if summary.get("bubble_share") is not None:
        ideal = f"{summary['ideal_bubble_share']:.1%} if all stages take equally long"
        shown.add_row("waiting for stages", f"{summary['bubble_share']:.1%} of the time; {ideal}")
    slowest = summary.get("slowest_rank")
    if slowest is not None and slowest["ratio"] > STRAGGLES:
        rank = f"{slowest['rank']} on {escape(one_line(slowest['host']))}"
        busy = f"busy {duration(slowest['seconds'])} a step, the median {duration(slowest['median_s'])}"
        shown.add_row("slowest rank", f"[yellow]{rank}[/yellow], {busy}")


def parts(shares: dict[str, Any], *, alone: bool) -> str:
    """The shares of a step's time, in words."""
    data, compute, communication = (shares[name] for name in ("data", "compute", "communication"))
    if communication is None:
        return f"{percent(compute)} computing and communicating, {percent(data)} for data"
    if alone:
        return f"{percent(compute)} computing, {percent(data)} waiting for data"
    return f"{percent(compute, 0)} computing, {percent(communication, 0)} for other ranks, {percent(data)} for data"


def costs(shown: Table, summary: dict[str, Any], unit: str, device: str) -> None:
    """Adds memory, floating-point operations and energy to the table `shown`."""
    each = f" a {device}" + (" at most" if summary["world_size"] > 1 else "")
    shown.add_row("peak memory", f"{summary['peak_memory_gib']:.2f} GiB{each}")
    if (done := summary.get("flops_per_second_per_rank")) is not None:
        share = f"MFU: unknown {'card' if device == 'GPU' else 'for CPUs'}"
        if summary["mfu"] is not None:
            share = f"[bold]{summary['mfu']:.1%}[/bold] of {quantity(summary['peak_flops_per_second'])}FLOP/s (MFU)"
        shown.add_row("operations", f"{quantity(done)}FLOP/s a {device}; {share}")
    if summary.get("energy_j") is not None:
        one = unit.removesuffix("s")
        per = summary.get(f"energy_j_per_{one}")
        each = "" if per is None else f", {per:.3g} J a{'n' if one[0] in 'aeiou' else ''} {one}"
        shown.add_row("energy", f"{summary['energy_j'] / 1e3:,.1f} kJ{each}")
