"""Shared by all benchmarks: a description of the machine, interleaved runs, and a section in RESULTS.md."""

import argparse
import datetime
import importlib.metadata
import os
import platform
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "RESULTS.md"

Figure = TypeVar("Figure")


def machine() -> str:
    """The processor, the number of cores, and the versions that matter, on one line."""
    names = [line.split(":", 1)[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")]
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("torch", "torchvision", "typer"))
    cores = len(os.sched_getaffinity(0))
    return f"{names[0] if names else platform.machine()}, {cores} cores, Python {platform.python_version()}, {versions}"


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []


def seconds(argv: Sequence[str], env: Mapping[str, str], cwd: Path | None = None) -> float:
    """The time that a command takes, from its start to its end.

    Raises:
        subprocess.CalledProcessError: it failed; its output was printed on stderr.
    """
    start = time.perf_counter()
    done = subprocess.run(argv, env=dict(env), cwd=cwd, capture_output=True, text=True, check=False, timeout=600)
    taken = time.perf_counter() - start
    if done.returncode:
        sys.stderr.write(done.stdout + done.stderr)
        raise subprocess.CalledProcessError(done.returncode, list(argv))
    return taken


@dataclass(frozen=True)
class Start:
    """The seconds that a program took: to the expected line of its output, to its end, and of CPU time."""

    line_s: float
    end_s: float
    cpu_s: float


def start(argv: Sequence[str], env: Mapping[str, str], line: str) -> Start:
    """Runs a command; `line` is part of a line that it prints.

    Raises:
        subprocess.CalledProcessError: it failed, or did not print that; its output was printed on stderr.
    """
    before, started, line_s, said = os.times(), time.perf_counter(), None, ""
    with subprocess.Popen(
        argv, env=dict(env), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, bufsize=1
    ) as process:
        assert process.stdout is not None
        for text in process.stdout:
            said += text
            if line_s is None and line in text:
                line_s = time.perf_counter() - started
    end_s, after = time.perf_counter() - started, os.times()
    if process.returncode or line_s is None:
        sys.stderr.write(said)
        raise subprocess.CalledProcessError(process.returncode, list(argv))
    cpu_s = after.children_user + after.children_system - before.children_user - before.children_system
    return Start(line_s, end_s, cpu_s)


def interleaved(contenders: Mapping[str, Callable[[], Figure]], rounds: int) -> dict[str, list[Figure]]:
    """The figures of each contender, in `rounds` rounds of A B C, B C A ..., after a run of each that is not counted.

    Machines drift: only figures of the same round are compared with each other.
    """
    for contender in contenders.values():
        contender()
    names = list(contenders)
    figures: dict[str, list[Figure]] = {name: [] for name in names}
    for number in range(rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            figures[name].append(contenders[name]())
    return figures


def ratios(above: Sequence[float], below: Sequence[float]) -> list[float]:
    """The ratio of each round."""
    return [a / b for a, b in zip(above, below, strict=True)]


def spread(figures: Sequence[float], digits: int = 3) -> str:
    """Median, and minimum to maximum in brackets."""
    return f"{statistics.median(figures):.{digits}f} ({min(figures):.{digits}f} to {max(figures):.{digits}f})"


def middle(figures: Sequence[float], digits: int = 3) -> str:
    """Median, and the middle half in brackets."""
    quarters = statistics.quantiles(figures, n=4) if len(figures) > 1 else [figures[0]] * 3
    return f"{statistics.median(figures):.{digits}f} ({quarters[0]:.{digits}f} to {quarters[2]:.{digits}f})"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a Markdown table that reads well unrendered too."""
    widths = [max(len(row[column]) for row in [header, *rows]) for column in range(len(header))]
    lines = ["| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |"
             for row in [header, *rows]]  # fmt: skip
    return [lines[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *lines[1:]]


def parser(description: str) -> argparse.ArgumentParser:
    """The options that every benchmark has."""
    options = argparse.ArgumentParser(description=description)
    options.add_argument("--rounds", type=int, default=15, help="rounds of all contenders (default: %(default)s)")
    options.add_argument("--record", action="store_true", help="add the result to benchmarks/RESULTS.md")
    return options


def publish(title: str, lines: Sequence[str], *, record: bool) -> None:
    """Prints a result, and adds it to RESULTS.md if `record`."""
    command = shlex.join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]])
    text = "\n".join([f"## {title}", "", f"{datetime.date.today()}, {machine()}  ", f"`{command}`", "", *lines, ""])
    print(text)
    if record:
        before = RESULTS.read_text() if RESULTS.exists() else "# Results\n"
        RESULTS.write_text(f"{before.rstrip()}\n\n{text}")
