"""`python -m train.selftest`: does each strategy train here what the single process trains? A table with PASS or FAIL.

Each row is a real launch on this machine: three steps in fp32 of a small transformer on this program's own sources.
Its loss and weights are laid beside those of one process that accumulates over the same micro-batches. For whoever has
to trust an installation.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table
from torch import Tensor

from train import checkpoint
from train.errors import FAILED, MusterError

HERE = Path(__file__).parent
LIMIT = 1e-6
"""The largest relative difference that passes."""

PARTS = 8
"""Micro-batches of a step, in all worlds."""

DEADLINE_S = 300
COMMON = (
    *("--model=gpt-tiny", f"--data=tokens:{HERE / 'loop.py'}", "--seq-len=32", "--max-steps=3", "--epochs=1"),
    *("--no-bf16", "--warmup-steps=0", "--optimizer=sgd", "--lr=0.1", "--clip-norm=1", "--seed=1"),
)


@dataclass(frozen=True)
class Case:
    """One launch: the strategy, its number of ranks, and what it needs besides to see the same micro-batches."""

    strategy: str
    num_ranks: int
    options: tuple[str, ...]


def split(num_shares: int) -> tuple[str, ...]:
    """Options by which `num_shares` ranks with data of their own go through all parts."""
    return ("--batch-size=1", f"--accumulate={PARTS // num_shares}")


def cases(num_ranks: int) -> list[Case]:
    """What can be tried with `num_ranks` (2, 4 or 8) ranks."""
    line = ("--batch-size=8", "--microbatches=8", "--pipeline-parallel=2")
    found = [
        Case("ddp", num_ranks, split(num_ranks)),
        Case("fsdp", num_ranks, split(num_ranks)),
        Case("tp", 2, split(1)),
        Case("pipeline", 2, (*line, "--schedule=1f1b")),
        Case("pipeline", 2, (*line, "--schedule=zero-bubble")),
    ]
    if num_ranks >= 4:
        found += [
            Case("fsdp", num_ranks, (*split(num_ranks), "--replicate=2")),
            Case("tp", num_ranks, (*split(num_ranks // 2), "--tensor-parallel=2")),
            Case("pipeline", 4, ("--batch-size=4", "--microbatches=4", "--pipeline-parallel=2")),
        ]
    return found


def launch(case: Case, folder: Path, name: str) -> dict[str, Any]:
    """The state that `case` has trained, by ranks of this machine.

    Raises:
        MusterError: it failed, or took too long.
    """
    ranks = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={case.num_ranks}"]
    start = [sys.executable, "-P", *(ranks if case.num_ranks > 1 else []), "-m", "train"]
    argv = [*start, case.strategy, *COMMON, *case.options, f"--name={name}", f"--runs-dir={folder}"]
    # One thread: with another number of threads sums come in another order.
    places = [str(HERE.parent), os.environ.get("PYTHONPATH", "")]
    own = {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, places))}
    # Not the world of a job's step, of which this process may be a rank.
    outer = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    env = {key: value for key, value in os.environ.items() if key not in outer} | own
    try:
        ended = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=DEADLINE_S)
    except subprocess.TimeoutExpired:
        raise MusterError(
            "not over in time", seen=f"{DEADLINE_S} s", fix="see what keeps the ranks", code=FAILED
        ) from None
    if ended.returncode:
        lines = (
            [line for line in ended.stderr.splitlines() if "rror" in line] or ended.stderr.splitlines() or ["nothing"]
        )
        raise MusterError(f"it failed: {lines[0].strip()}", seen=" ".join(argv), fix="run it alone", code=FAILED)
    return checkpoint.load_newest(folder / name)[1]


def vector(tensors: Mapping[str, Tensor]) -> Tensor:
    """All numbers of `tensors`, in the order of their names."""
    return torch.cat([tensor.double().flatten() for _, tensor in sorted(tensors.items())])


def differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> tuple[float, float]:
    """How far the weights and the losses of two trained states are apart, relative to the first."""
    weights, others = (vector(state["model"]) for state in (one, other))
    loss, its = (state["progress"]["history"][-1]["valid_loss"] for state in (one, other))
    return ((weights - others).norm() / weights.norm()).item(), abs(loss - its) / loss


def main() -> None:
    parser = argparse.ArgumentParser(prog="train selftest")
    parser.add_argument("--ranks", type=int, choices=(2, 4, 8), help="processes (default: 2 or more, one a GPU)")
    parser.add_argument("--json", action="store_true", help="print a list for programs, not a table")
    asked = parser.parse_args()
    num_gpus = torch.cuda.device_count()
    num_ranks = asked.ranks or max((number for number in (2, 4, 8) if number <= num_gpus), default=2)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="selftest-") as name:
        try:
            single = launch(Case("single", 1, split(1)), Path(name), "single")
        except MusterError as error:
            print(error, file=sys.stderr)
            sys.exit(error.code)
        for number, case in enumerate(cases(num_ranks)):
            started = time.perf_counter()
            row: dict[str, Any] = {
                "strategy": case.strategy,
                "ranks": case.num_ranks,
                "options": " ".join(case.options),
            }
            try:
                weights, loss = differences(single, launch(case, Path(name), f"{number}"))
                row |= {"weights": weights, "loss": loss, "passed": max(weights, loss) < LIMIT}
            except MusterError as error:
                row |= {"weights": None, "loss": None, "passed": False, "error": error.wrong}
            rows.append(row | {"seconds": round(time.perf_counter() - started, 1)})
    print(json.dumps(rows, indent=2)) if asked.json else show(rows, num_gpus)
    sys.exit(0 if all(row["passed"] for row in rows) else FAILED)


def show(rows: list[dict[str, Any]], num_gpus: int) -> None:
    """Prints `rows` as a table."""
    table = Table(box=SIMPLE, title="each strategy beside the single process: 3 steps, fp32", title_justify="left")
    for name in ("", "strategy", "ranks", "weights", "loss", "seconds", "options"):
        table.add_column(name, overflow="fold")
    for row in rows:
        numbers = ["" if row[name] is None else f"{row[name]:.0e}" for name in ("weights", "loss")]
        word = "[green]PASS[/green]" if row["passed"] else "[red]FAIL[/red]"
        what = row.get("error", row["options"])
        table.add_row(word, row["strategy"], str(row["ranks"]), *numbers, f"{row['seconds']:.0f}", what)
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 110)
    console.print(table)
    passed = sum(row["passed"] for row in rows)
    where = f"{num_gpus} GPUs" if num_gpus else "CPU"
    console.print(f"{passed} of {len(rows)} pass on {where}, torch {torch.__version__}; the limit is {LIMIT:.0e}")


if __name__ == "__main__":
    main()
