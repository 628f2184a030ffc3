"""The output of a rank: all of it goes to its log file, and what a person wants to see goes to the console too.

A run has a log file for each rank, in a folder for the attempt and the host: `runs/NAME/logs/0/node01/rank-3.log`.
"""

import faulthandler
import io
import logging
import os
import re
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TextIO

from muster.errors import MusterError, one_line
from muster.train.distributed.world import World
from muster.variables import LaunchVariable, RankReport

ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")

ERASE = "\x1b[K"
"""Erases a terminal's line from the cursor to its end."""


@dataclass(frozen=True)
class Lines:
    """Writes whole lines to a file descriptor, each after `prefix`, so that lines of other ranks don't split them."""

    descriptor: int
    prefix: str
    encoding: str

    def write(self, text: str) -> None:
        """Writes the lines of `text`."""
        lines = "".join(f"{self.prefix}{line}\n" for line in text.removesuffix("\n").split("\n"))
        rest = lines.encode(self.encoding, "backslashreplace")
        with suppress(OSError):
            while rest:
                rest = rest[os.write(self.descriptor, rest) :]


class Tee(io.TextIOBase):
    """A stream whose text goes to `screen` (or by whole lines to `lines`), and as plain lines to `log`.

    A screen that can't be written to (a full disk, a closed terminal, a pipe without a reader) does not end training.
    """

    def __init__(self, screen: TextIO, log: TextIO, lines: Lines | None = None) -> None:
        self.screen, self.log, self.lines = screen, log, lines
        self.rest = ""

    def write(self, text: str) -> int:
        whole, newline, rest = (self.rest + text).rpartition("\n")
        self.rest = rest
        if self.lines is None:
            self.draw(text)
        elif newline:
            self.lines.write(whole)
        if newline:
            write_log(self.log, plain(whole))
        return len(text)

    def draw(self, text: str) -> None:
        """Writes `text` to the screen, not to the log."""
        with suppress(OSError):
            self.screen.write(text)

    def flush(self) -> None:
        with suppress(OSError):
            self.screen.flush()

    def isatty(self) -> bool:
        # In a job Open MPI gives each rank a terminal of its own, and writes what comes out there into the job's file.
        is_file = "MUSTER_SCHEDULER" in os.environ and "OMPI_COMM_WORLD_RANK" in os.environ
        return self.lines is None and self.screen.isatty() and not is_file

    def fileno(self) -> int:
        return self.screen.fileno()

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self.screen.encoding

    def writable(self) -> bool:
        return True


@dataclass
class Outputs:
    """The destinations of this process's lines besides sys.stderr."""

    log: TextIO | None = None
    console: Lines | None = None


_outputs = Outputs()


def show(log: TextIO, prefix: str | None) -> None:
    """Sends what Python prints from now on to `log` and to the console; with a `prefix`, by whole lines."""
    _outputs.log = log
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        with suppress(OSError):
            stream.flush()
        lines = None if prefix is None else Lines(os.dup(stream.fileno()), prefix, stream.encoding)
        replace_stream(name, Tee(stream, log, lines))


def hide(log: TextIO, prefix: str) -> None:
    """Sends all further output of this process and its children, C libraries included, to `log` only.

    Lines of `notify` are still shown; after `show`, so is what Python prints.
    """
    _outputs.log = log
    sys.stdout.flush()
    sys.stderr.flush()
    if not isinstance(sys.stderr, Tee):
        _outputs.console = Lines(os.dup(2), prefix, sys.stderr.encoding)
    for number, stream in ((1, sys.stdout), (2, sys.stderr)):
        os.dup2(log.fileno(), number)
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True)


def replace_stream(name: str, stream: Tee) -> None:
    """Replaces sys.stdout or sys.stderr by `stream`, also in the handlers of loggers that hold the old one."""
    setattr(sys, name, stream)
    for logger in (logging.root, *logging.root.manager.loggerDict.values()):
        for handler in getattr(logger, "handlers", ()):
            if isinstance(handler, logging.StreamHandler) and handler.stream is stream.screen:
                handler.stream = stream  # setStream would write out the old one first


def notify(text: str) -> None:
    """Prints `text`, which the user has to read, to the console (from hidden ranks too) and to the log."""
    with suppress(OSError):
        print(ERASE + text if sys.stderr.isatty() else text, file=sys.stderr, flush=True)
    if _outputs.console is not None:
        _outputs.console.write(text)


def has_terminal(world: World) -> bool:
    """Whether this rank is the first of its node and prints to a terminal: not rank 0's, if started by hand."""
    lines: Lines | None = _outputs.console or getattr(sys.stderr, "lines", None)
    return world.local_rank == 0 and os.isatty(2 if lines is None else lines.descriptor)


def log_line(text: str) -> None:
    """Writes a line to the log only; does nothing where there is no log yet."""
    if _outputs.log is not None:
        write_log(_outputs.log, text)


def flush() -> None:
    """Flushes Python's buffers of the output; on a full disk they are lost."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            if isinstance(stream, Tee) and stream.rest:
                stream.write("\n")
            stream.flush()


def write_log(log: TextIO, text: str) -> None:
    """Appends `text` and a newline to `log`; a full disk must not end training."""
    with suppress(OSError):
        log.write(f"{text}\n")


def plain(text: str) -> str:
    """`text` without escape sequences, and without what carriage returns overwrite in each line."""
    return "\n".join(line.rstrip("\r").rpartition("\r")[2] for line in ESCAPES.sub("", text).split("\n"))


def attempt(environ: Mapping[str, str]) -> str:
    """The number of this start of the run, from 0: the scheduler's count, then torchrun's restarts in it, if any.

    Source: https://docs.pytorch.org/docs/stable/elastic/run.html (TORCHELASTIC_RESTART_COUNT)
    """
    started = environ.get("MUSTER_ATTEMPT") or "0"
    words = [word for word in (started, environ.get("TORCHELASTIC_RESTART_COUNT") or "0") if word.isdecimal()]
    return ".".join(words if words[1:] and words[1] != "0" else words[:1]) or "0"


def log_folder(run: Path, host: str, environ: Mapping[str, str]) -> Path:
    """The folder of this host's logs in the run's folder `run`; it need not exist."""
    return run / "logs" / attempt(environ) / (re.sub(r"[^A-Za-z0-9._-]+", "-", host).strip(".-") or "host")


def open_log(run: Path, world: World, command: str, *, all_ranks: bool) -> None:
    """Opens this rank's log file for its output; that of rank 0, or with `all_ranks` of each, goes to the console too.

    Where there can be no file, on a full disk for example, output stays on the console, and training goes on.
    """
    path = log_folder(run, world.host, os.environ) / f"rank-{world.rank}.log"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # A character that UTF-8 does not have, in a file name for example, must not end the run either.
        log = path.open("a", buffering=1, encoding="utf-8", errors="backslashreplace")
        # No environment variables: they may hold secrets.
        place = f"rank {world.rank} of {world.world_size} on {one_line(world.host)}, {world.device}"
        log.write(f"=== {now()} {place}, process {os.getpid()}: {one_line(command)}\n")
    except OSError as error:
        notify(f"note: rank {world.rank} on {world.host} has no log file: {error}")
        return
    prefix = f"[{one_line(world.host)} {world.rank}] "
    if all_ranks or world.main:
        show(log, prefix if all_ranks else None)
    if not world.main:
        hide(log, prefix)
    if LaunchVariable.RANK_REPORTS in os.environ:
        report_to_agent(str(path.absolute()))
        # On a crash, Python writes its stacks to the log, the end of which the agent then shows.
        faulthandler.enable(log, all_threads=True)


def report_fatal(world: World, error: MusterError) -> None:
    """Prints the `error` that ends this rank, so that its agent need not show the end of its log."""
    world.status.end_reported = True
    notify(str(error))
    report_to_agent(RankReport.ERROR_SHOWN)


def report_to_agent(text: str) -> None:
    """Adds a line to this rank's report for its agent: the path of its log, or a line of RankReport."""
    if LaunchVariable.RANK_REPORTS not in os.environ:
        return
    try:
        path = Path(os.environ[LaunchVariable.RANK_REPORTS], str(os.getpid()))
        with path.open("a", encoding="utf-8", errors="surrogateescape") as file:
            file.write(f"{text}\n")
    except OSError as error:
        log_line(f"no report to the agent could be written: {error}")


def close(code: int) -> None:
    """Logs the exit code of this rank, and flushes its output."""
    log_line(f"=== {now()} ends with exit code {code}")
    flush()


def now() -> str:
    """The local date and time, to the second, with the offset from UTC."""
    return datetime.now().astimezone().isoformat(sep=" ", timespec="seconds")
