"""What a person sees of a run: a progress bar on a terminal, plain lines in a log file."""

import sys
import time
from contextlib import suppress
from typing import Any, TextIO

from rich.console import Console
from rich.control import Control
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from train import console
from train.console import Tee
from train.ending import WIDTH, table

LINE_EVERY_S = 15.0
REFRESH_EVERY_S = 0.25


class Both(Console):
    """A terminal, and the log file, which gets the same lines without bars and colours."""

    def __init__(self, screen: TextIO, log: TextIO, *, quiet: bool) -> None:
        super().__init__(file=screen, highlight=False, quiet=quiet)
        self.copy = Console(file=log, width=WIDTH, highlight=False, quiet=quiet, no_color=True)

    def print(self, *objects: Any, **options: Any) -> None:
        super().print(*objects, **options)
        if not any(isinstance(thing, Control) for thing in objects):
            with suppress(OSError):
                self.copy.print(*objects, **options)


class Display:
    """Shows the run, on rank 0; on the others it shows nothing.

    Args:
        enabled: whether this rank is the one that shows.
        global_batch: images or tokens of one step over all ranks.
        unit: which of the two.
    """

    def __init__(self, *, enabled: bool, epochs: int, global_batch: int, unit: str = "images") -> None:
        self.enabled = enabled
        self.epochs = epochs
        self.global_batch = global_batch
        self.unit = unit
        is_terminal = sys.stdout.isatty()
        if is_terminal and isinstance(sys.stdout, Tee):
            self.console: Console = Both(sys.stdout.screen, sys.stdout.log, quiet=not enabled)
        else:
            width = None if is_terminal else WIDTH
            self.console = Console(file=sys.stdout, width=width, highlight=False, quiet=not enabled)
        self.bar: Progress | None = None
        if enabled and is_terminal:
            self.bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(bar_width=24),
                MofNCompleteColumn(),
                TextColumn("{task.fields[state]}", style="dim"),
                TimeRemainingColumn(),
                console=self.console,
                auto_refresh=False,
                transient=True,
            )
            self.task = self.bar.add_task("", total=None, state="")
        self.every_s = REFRESH_EVERY_S if self.bar is not None else LINE_EVERY_S
        self.head_shown = False
        self.last_loss: float | None = None
        self.due = self.kept = 0.0

    def facts(self, rows: dict[str, str]) -> None:
        """Shows what will run, a line for each fact."""
        width = max(map(len, rows))
        for name, value in rows.items():
            self.console.print(f"[bold]{name:<{width}}[/bold]  {escape(value)}", soft_wrap=True)
        self.console.print()

    def note(self, text: str) -> None:
        """Shows one line that the user should read."""
        self.console.print(f"note: {text}", style="yellow", markup=False, soft_wrap=True)

    def start_epoch(self, epoch: int, num_steps: int) -> None:
        """Begins the display of an epoch (from 0) of `num_steps` steps."""
        self.epoch_number, self.num_steps = epoch + 1, num_steps
        self.started = time.perf_counter()
        self.due = self.started + self.every_s
        self.last_loss = None
        if self.bar is not None:
            self.bar.reset(self.task, total=num_steps, description=f"epoch {epoch + 1}/{self.epochs}", state="")
            self.bar.start()

    def wants_loss(self) -> bool:
        """True when a line is due, so that a look at the loss is worth taking."""
        return self.enabled and time.perf_counter() >= self.due

    def loss(self, loss: float) -> None:
        """Takes the loss to show next."""
        self.last_loss = loss

    def step(self, done: int) -> None:
        """Shows that `done` steps of the epoch are done, now and then."""
        now = time.perf_counter()
        if not self.enabled or now < self.due:
            return
        self.due = now + self.every_s
        rate = done * self.global_batch / (now - self.started)
        state = f"{rate:,.0f} {self.unit}/s" + (f"  loss {self.last_loss:.4f}" if self.last_loss is not None else "")
        if self.bar is not None:
            self.bar.update(self.task, completed=done, state=state)
            self.bar.refresh()
        line = f"  epoch {self.epoch_number}/{self.epochs}  step {done}/{self.num_steps}  {state}"
        if self.bar is None:
            self.console.print(line)
        elif now >= self.kept + LINE_EVERY_S:
            self.kept = now
            console.keep(line)

    def epoch(self, record: dict[str, Any]) -> None:
        """Shows the results of an epoch."""
        if not self.enabled:
            console.keep(f"epoch {record['epoch']}/{self.epochs}  step {record['step']}  {record['seconds']:.1f} s")
            return
        if self.bar is not None:
            self.bar.stop()
        if not self.head_shown:
            self.head_shown = True
            self.console.print(
                f"{'epoch':>9}  {'train loss':>10}  {'accuracy':>9}  {'valid loss':>10}  {'accuracy':>9}  {'time':>8}",
                style="bold",
            )
        self.console.print(
            f"{record['epoch']:>4}/{self.epochs:<4}  {record['train_loss']:>10.4f}  {record['train_accuracy']:>9.2%}  "
            f"{record['valid_loss']:>10.4f}  {record['valid_accuracy']:>9.2%}  {record['seconds']:>6.1f} s"
        )

    def summary(self, summary: dict[str, Any]) -> None:
        """Shows the table at the end of a run."""
        title = f"{summary['model']} on {summary['data']}, {summary['strategy']}"
        self.console.print()
        self.console.print(title, style="bold", markup=False)
        self.console.print(table(summary, self.unit))
