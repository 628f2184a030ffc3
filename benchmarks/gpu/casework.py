"""The cases of `make gpu`: their time limits, what they need, and the bounds of the figures that they report.

At its top a file of cases imports only the standard library, so that the table can be shown anywhere. A case runs in a
process of its own, as `python -m benchmarks.gpu.casework MODULE FUNCTION`. It returns a dictionary of figures, which is
written to a file, and compared with the bounds by the runner.
"""

import importlib
import json
import math
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]

PARTS = {
    "A": "correctness: the GPU against the CPU",
    "B": "faults: what is told, and with which exit code",
    "C": "data, checkpoints, doctor, bench and pytest",
    "D": "speed",
}

TRAINER = ("torch", "torchvision", "typer", "msgspec", "rich", "psutil", "sklearn", "PIL", "numpy")
"""Modules that a training on the digits or on tokens imports."""

CASE, RESULT, DEVICE, SCRATCH, SHARED = (
    f"GPU_CASE_{word}" for word in ("NAME", "RESULT", "DEVICE", "SCRATCH", "SHARED")
)
"""Environment variables by which the runner tells a case what it needs."""


class Skip(Exception):
    """Raised by a case that can't be tried here, with the reason."""


@dataclass(frozen=True, kw_only=True)
class Bound:
    """The values of a figure that pass, ends included, and the reason for them."""

    low: float = -math.inf
    high: float = math.inf
    why: str = ""

    def problem(self, value: object) -> str | None:
        """What is wrong with `value`; None if nothing is."""
        if not isinstance(value, int | float):
            return f"is {'missing' if value is None else f'{value!r}, no number'}"
        if math.isfinite(value) and self.low <= value <= self.high:
            return None
        return f"is {value:.6g}, not {self}"

    def __str__(self) -> str:
        if self.low == self.high:
            text = f"{self.low:g}"
        elif self.low == -math.inf:
            text = f"at most {self.high:g}"
        elif self.high == math.inf:
            text = f"at least {self.low:g}"
        else:
            text = f"{self.low:g} to {self.high:g}"
        return f"{text} ({self.why})" if self.why else text


def at_most(high: float, why: str = "") -> Bound:
    return Bound(high=high, why=why)


def at_least(low: float, why: str = "") -> Bound:
    return Bound(low=low, why=why)


def exactly(value: float, why: str = "") -> Bound:
    return Bound(low=value, high=value, why=why)


TRUE = exactly(1)
"""The bound of a figure that has to be True."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A row of the table.

    Attributes:
        name: what `--only` takes, and the name of its log.
        part: a letter of `PARTS`.
        shows: one line: what is proved.
        command: the process that is started.
        timeout_s: seconds after which it is ended, on a GPU.
        expect: the bounds of its figures, by name; all of them have to be there.
        num_gpus: how many it needs; 0: it runs without one.
        on_cpu: whether it makes sense on a CPU.
        expect_cpu: the bounds there; those of `expect` where it is None.
        needs: modules that it imports.
    """

    name: str
    part: str
    shows: str
    command: Sequence[str]
    timeout_s: float
    expect: Mapping[str, Bound]
    num_gpus: int = 1
    on_cpu: bool = False
    expect_cpu: Mapping[str, Bound] | None = None
    needs: Sequence[str] = ()

    def __post_init__(self) -> None:
        if not self.expect or self.expect_cpu == {}:
            raise ValueError(f"{self.name}: an exit code is no proof: it needs a figure")
        if self.part not in PARTS:
            raise ValueError(f"{self.name}: there is no part {self.part}")

    def bounds(self, device: str) -> Mapping[str, Bound]:
        """The bounds of the figures on `device`."""
        return self.expect_cpu if device == "cpu" and self.expect_cpu is not None else self.expect


Run = Callable[["Work"], dict[str, Any]]
TABLE: list[Case] = []
"""All cases of the files that were imported, in the order of their definition."""


def case(
    *,
    part: str,
    timeout_s: float,
    expect: Mapping[str, Bound],
    num_gpus: int = 1,
    on_cpu: bool = False,
    expect_cpu: Mapping[str, Bound] | None = None,
    needs: Sequence[str] = TRAINER,
) -> Callable[[Run], Run]:
    """A decorator that adds a function to the table, with its name, its docstring's first line, and its bounds."""

    def add(run: Run) -> Run:
        module = run.__module__.rpartition(".")[2]
        name = run.__name__.replace("_", "-")
        command = (sys.executable, "-m", "benchmarks.gpu.casework", module, run.__name__)
        shows = (run.__doc__ or "").partition("\n")[0].rstrip(".")
        row = Case(
            name=name, part=part, shows=shows, command=command, timeout_s=timeout_s, expect=expect, num_gpus=num_gpus,
            on_cpu=on_cpu, expect_cpu=expect_cpu, needs=needs,
        )  # fmt: skip
        if any(other.name == name for other in TABLE):
            raise ValueError(f"two cases are called {name}")
        TABLE.append(row)
        return run

    return add


@dataclass(frozen=True)
class Ended:
    """A process that a case has started, after its end.

    Attributes:
        folder: the run's folder, of a training.
        output: the text of both streams.
    """

    code: int
    output: str
    seconds: float
    folder: Path = field(default_factory=Path)

    def summary(self) -> dict[str, Any]:
        """The training's summary.json; a training that failed is an error here."""
        if self.code:
            raise RuntimeError(f"exit code {self.code}:\n{self.output[-4000:]}")
        return json.loads((self.folder / "summary.json").read_text())

    def records(self, kind: str) -> list[dict[str, Any]]:
        """The lines of that kind of the training's metrics.jsonl."""
        lines = map(json.loads, (self.folder / "metrics.jsonl").read_text().splitlines())
        return [line for line in lines if line["kind"] == kind]

    @property
    def told(self) -> list[str]:
        """The lines of its output, without empty ones."""
        return [line for line in self.output.splitlines() if line.strip()]


@dataclass(frozen=True, kw_only=True)
class Work:
    """The device and the folders of a case, and methods that start programs for it.

    Attributes:
        device: "cuda" or "cpu".
        scratch: an empty folder, which is removed after the case.
        shared: a folder that all cases of this run of the runner share.
    """

    device: str
    scratch: Path
    shared: Path

    @property
    def on_gpu(self) -> bool:
        return self.device == "cuda"

    def start(self, *argv: str, env: Mapping[str, str] | None = None) -> "subprocess.Popen[str]":
        """Starts this Python with `argv`, both streams in one pipe."""
        print("$", "python", *argv, flush=True)
        return subprocess.Popen(
            [sys.executable, *argv], cwd=ROOT, env=os.environ | dict(env or {}), text=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip

    def python(self, *argv: str, env: Mapping[str, str] | None = None) -> Ended:
        """Runs Python with `argv` to its end; its output is in the log too."""
        started = time.monotonic()
        output, _ = (process := self.start(*argv, env=env)).communicate()
        print(output, flush=True)
        return Ended(process.returncode, output, time.monotonic() - started)

    def command(self, program: str, *argv: str, env: Mapping[str, str] | None = None) -> Ended:
        """Runs our command `train` or `muster`, which need not be installed."""
        return self.python("-c", f"from muster.entrypoint.main import {program} as main; main()", *argv, env=env)

    def train_argv(self, strategy: str, *options: str, name: str = "run") -> list[str]:
        """The arguments of Python for one rank of a training whose run is `name`."""
        places = (f"--device={self.device}", f"--runs-dir={self.scratch}", f"--name={name}")
        return ["-m", "muster.train", strategy, *places, *options]

    def train(
        self, strategy: str, *options: str, name: str = "run", num_ranks: int = 0, env: Mapping[str, str] | None = None
    ) -> Ended:
        """Trains in one process, or by the launcher in `num_ranks` of them."""
        argv = self.train_argv(strategy, *options, name=name)
        if num_ranks:
            ended = self.command("train", strategy, f"--nproc-per-node={num_ranks}", *argv[3:], env=env)
        else:
            ended = self.python(*argv, env=env)
        return Ended(ended.code, ended.output, ended.seconds, self.scratch / name)


def json_in(output: str) -> Any:
    """The JSON value that a command has printed, maybe after other lines."""
    start = re.search(r"^[{\[]", output, re.MULTILINE)
    if start is None:
        raise RuntimeError("no object was printed")
    return json.JSONDecoder().raw_decode(output[start.start() :])[0]


def write_result(path: Path, result: Mapping[str, Any]) -> None:
    """Writes the result of a case, completely or not at all."""
    partly = path.with_suffix(".part")
    partly.write_text(json.dumps(result, default=float) + "\n")
    partly.replace(path)


def main(module: str, function: str) -> None:
    """Runs one case in this process: the figures that it returns, or why it can't be tried, go to the result's file."""
    run: Run = getattr(importlib.import_module(f"benchmarks.gpu.{module}"), function)
    work = Work(
        device=os.environ[DEVICE], scratch=Path(os.environ[SCRATCH]), shared=Path(os.environ[SHARED])
    )  # fmt: skip
    try:
        result = {"figures": run(work)}
    except Skip as reason:
        result = {"skip": str(reason)}
    write_result(Path(os.environ[RESULT]), result)


if __name__ == "__main__":
    # Imported by its name, as the cases import it: as __main__ it would have another class Skip than the cases raise.
    importlib.import_module("benchmarks.gpu.casework").main(*sys.argv[1:])
