"""`python -m muster.train.selftest`: trains here with each strategy, and compares with one process: PASS or FAIL.

Each row trains a small transformer on this program's own sources, in fp32 on this machine, and compares the results
with those of one process that accumulates over the same micro-batches: a check of an installation.
"""

import sys

from muster import interruption, processes
from muster.errors import ExitCode, MusterError, notify_if_slow

if __name__ == "__main__":
    interruption.start("train selftest")

import argparse
import json
import os
import signal
import socket
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from multiprocessing import get_context, resource_tracker
from pathlib import Path
from typing import Any, TextIO

import numpy as np

with notify_if_slow("loading PyTorch", is_shown=__name__ == "__main__"):
    import torch
from torch import Tensor
from torch.multiprocessing.spawn import ProcessException, start_processes

from muster import config
from muster.paths import text_of
from muster.train.checkpoint import manager

HERE = Path(__file__).parent
LIMITS = {"cpu": 1e-6, "cuda": 1e-5}
"""By device: the largest relative difference of weights and losses in fp32 that passes (one rounding is 6e-8).

On CPUs the same kernels compute a micro-batch in every row, and only sums over micro-batches and ranks change their
order. GPUs take other kernels for other shapes, and sum by atomics: the order within layers changes too. Their limit is
an estimate: gradients that differ by at most 1e-4, in updates of at most a tenth of the weights.
"""

PARTS = 8
"""Micro-batches of a step, whatever the number of ranks."""

GRACE_S = 20
"""Seconds in which ranks end by themselves when one of them has failed."""

LOADED = [
    "muster.train.process",
    "muster.config",
    *(f"muster.train.parallel.{name}" for name in ("ddp", "tp", "pipeline")),
]

COMMON = (
    *("--model=gpt-tiny", f"--data=tokens:{HERE / 'data/sampler.py'}", "--seq-len=32", "--epochs=1"),
    *("--no-bf16", "--warmup-steps=0", "--seed=1", "--timeout-s=120"),
)
STEPS = {
    "sgd": ("--optimizer=sgd", "--lr=0.1", "--clip-norm=1", "--max-steps=3"),
    # AdamW divides gradients by their own size: near 0, their last bits decide a whole step, and must be the same.
    "adamw": ("--optimizer=adamw", "--deterministic", "--max-steps=3"),
}
"""Options of the trainings that make a row."""

COLUMNS = ("sgd", "adamw", "loss")
EVERYWHERE = ("--batch-size", "--accumulate", "--microbatches", "--device", "--single-rank-group")


@dataclass(frozen=True)
class Case:
    """A row of the table: a strategy, its number of ranks, and options with which it has the same micro-batches."""

    strategy: str
    num_ranks: int
    options: tuple[str, ...]


def split(num_shares: int) -> tuple[str, ...]:
    """Options with which `num_shares` data-parallel ranks compute the PARTS micro-batches of a step."""
    return ("--batch-size=1", f"--accumulate={PARTS // num_shares}")


PLAIN = ("gpipe", "1f1b")
"""Schedules with one stage a rank."""


def cases(num_ranks: int) -> list[Case]:
    """The cases for up to `num_ranks` (2, 4 or 8) ranks; for 1 those that can run in a group of one rank."""
    line = ("--batch-size=8", "--microbatches=8", "--pipeline-parallel=2")
    own = split(num_ranks)
    if num_ranks == 1:
        own = (*own, "--single-rank-group")
    found = [
        Case("ddp", num_ranks, own),
        Case("ddp", num_ranks, (*own, "--zero1")),
        Case("fsdp", num_ranks, own),
        Case("fsdp", num_ranks, (*own, "--cpu-offload")),
        Case("fsdp", num_ranks, (*own, "--activation-checkpoint=full")),
    ]
    if num_ranks == 1:
        whole = ("--batch-size=8", "--microbatches=8", "--single-rank-group")
        return [*found, Case("tp", 1, own), *(Case("pipeline", 1, (*whole, f"--schedule={name}")) for name in PLAIN)]
    found += [
        Case("tp", 2, split(1)),
        *(Case("pipeline", 2, (*line, f"--schedule={name}")) for name in (*PLAIN, "interleaved", "zero-bubble")),
    ]
    known = {"single", "dp", *(case.strategy for case in found)}
    found += [Case(name, num_ranks, own) for name in config.STRATEGIES if name not in known]
    if num_ranks >= 4:
        lines = ("--batch-size=4", "--microbatches=4", "--pipeline-parallel=2")
        found += [
            Case("fsdp", num_ranks, (*own, "--replicate=2")),
            Case("tp", num_ranks, (*split(num_ranks // 2), "--tensor-parallel=2")),
            Case("pipeline", 4, lines),
            Case("pipeline", 4, (*lines, "--schedule=zero-bubble")),
        ]
    return found


def run_ranks(argv: Sequence[str], num_ranks: int, output: Path) -> None:
    """Runs the trainer with `argv` in `num_ranks` processes; each prints into a file of its own, `output`-RANK.

    Torch is loaded once, by a server that forks a process for each rank.

    Raises:
        MusterError: a rank failed.
    """
    get_context("forkserver").set_forkserver_preload(LOADED)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    arguments = (list(argv), num_ranks, port, str(output))
    resource_tracker.ensure_running()  # not within `held`, as its start unblocks signals
    # A Ctrl-C that comes now reaches the ranks once they have a handler for it.
    with interruption.held():
        ranks = start_processes(run_rank, arguments, nprocs=num_ranks, join=False, start_method="forkserver")
    assert ranks is not None
    try:
        while not ranks.join(grace_period=GRACE_S):
            pass
    except ProcessException as error:
        said = [line for rank in range(num_ranks) for line in text_of(Path(f"{output}-{rank}")).splitlines()]
        ended = str(error).rstrip().rpartition("\n")[2]  # how it ended, or the exception that it raised
        first = next((line for line in said if "rror" in line), f"rank {error.error_index}: {ended}")
        seen = f"{num_ranks} ranks of: train {' '.join(argv)}"
        raise MusterError(f"it failed: {first.strip()}", seen=seen, fix="run it alone", code=ExitCode.FAILED) from error


def run_rank(rank: int, argv: list[str], num_ranks: int, port: int, output: str) -> None:
    """Makes this process a rank of the trainer."""
    file = os.open(f"{output}-{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    for stream in (1, 2):
        os.dup2(file, stream)
    # The program that started this may be a rank in a job's step, whose world is another one.
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    if num_ranks > 1:
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        os.environ |= {"WORLD_SIZE": str(num_ranks), "LOCAL_WORLD_SIZE": str(num_ranks)}
    from muster.train.__main__ import main

    sys.argv = ["train", *argv]
    main()


def launch(case: Case, steps: str, folder: Path) -> dict[str, Any]:
    """Trains `case` with the options STEPS[`steps`] on this machine; returns the state in its last checkpoint."""
    run = Path(tempfile.mkdtemp(dir=folder))
    argv = [case.strategy, *COMMON, *STEPS[steps], *case.options, f"--name={run.name}", f"--runs-dir={folder}"]
    run_ranks(argv, case.num_ranks, run / "rank")
    return manager.load_newest(run)[1]


def relative_difference(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
    """The norm of the difference of two sets of tensors, relative to the norm of `one`."""
    mine, theirs = (torch.cat([values[name].double().flatten() for name in sorted(values)]) for values in (one, other))
    return ((mine - theirs).norm() / mine.norm()).item()


def compare(case: Case, singles: Mapping[str, Any], folder: Path, limit: float = LIMITS["cpu"]) -> dict[str, Any]:
    """Trains `case`; returns its row, with the differences from the states `singles` of the single process."""
    started = time.perf_counter()
    row: dict[str, Any] = {"strategy": case.strategy, "ranks": case.num_ranks, "options": " ".join(case.options)}
    row |= dict.fromkeys(COLUMNS)
    try:
        for steps, single in singles.items():
            found = launch(case, steps, folder)
            row[steps] = relative_difference(single["model"], found["model"])
            loss, its = (state["progress"]["history"][-1]["valid_loss"] for state in (single, found))
            # numpy's maximum of NaN and a number is NaN, which fails.
            row["loss"] = float(np.maximum(row["loss"] or 0.0, abs(loss - its) / loss))
        row["passed"] = all(row[column] is None or row[column] < limit for column in COLUMNS)
    except MusterError as error:
        row |= {"passed": False, "error": error.wrong}
    return row | {"seconds": round(time.perf_counter() - started, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(prog="train selftest")
    parser.add_argument("--ranks", type=int)
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    # One thread: another number of threads changes the order of sums.
    os.environ["OMP_NUM_THREADS"] = "1"
    # Containers may have switched on TF32 in place of fp32; its mantissa has 10 bits.
    os.environ |= {"NVIDIA_TF32_OVERRIDE": "0", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "0"}
    num_gpus = torch.cuda.device_count()
    num_ranks = asked.ranks or max((number for number in (1, 2, 4, 8) if number <= num_gpus), default=2)
    device = "cuda" if num_ranks <= num_gpus else "cpu"
    # On GPUs gradients are not added up exactly, and AdamW would magnify the differences.
    trainings = [steps for steps in STEPS if steps != "adamw" or device == "cpu"]
    with interruption.command(parser.prog), tempfile.TemporaryDirectory(prefix="selftest-") as name:
        # Ends as without this handler, but removes the folder, which may lie in the node's memory.
        signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
        try:
            rows = make_rows(cases(num_ranks), trainings, Path(name), device, sys.stderr if asked.json else sys.stdout)
        except (KeyboardInterrupt, SystemExit):
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a second one would leave a part of the folder
            processes.kill_descendants()
            raise
    passed = sum(row["passed"] for row in rows)
    if asked.json:
        print(json.dumps(rows, indent=2))
    else:
        where = "CPU" if device == "cpu" else "1 GPU" if num_ranks == 1 else f"{num_ranks} GPUs"
        limit = f"{LIMITS[device]:.0e}"
        print(f"{passed} of {len(rows)} pass on {where}, torch {torch.__version__}; the limit is {limit}")
    sys.exit(0 if passed == len(rows) else ExitCode.FAILED)


def make_rows(
    wanted: Sequence[Case], trainings: Sequence[str], folder: Path, device: str, out: TextIO
) -> list[dict[str, Any]]:
    """Trains the cases `wanted`; returns their rows, and prints each to `out` when done: together they take minutes.

    Raises:
        MusterError: the single process failed.
    """
    what = "each shows how far its weights (after 3 steps of SGD, of AdamW) and its loss are from the single's, in fp32"
    print(f"muster: trains a single process, then {len(wanted)} rows: {what}", file=sys.stderr, flush=True)
    on_device = f"--device={device}"
    singles = {steps: launch(Case("single", 1, (*split(1), on_device)), steps, folder) for steps in trainings}
    rows: list[dict[str, Any]] = []
    for case in wanted:
        case = replace(case, options=(*case.options, on_device))
        rows.append(row := compare(case, singles, folder, LIMITS[device]))
        verdict = "PASS" if row["passed"] else "FAIL"
        who = f"{case.strategy} on {case.num_ranks} rank{'s' if case.num_ranks > 1 else ''}"
        numbers = [f"{name} {row[name]:.0e}" for name in COLUMNS if row[name] is not None]
        own = [word for word in case.options if not word.startswith(EVERYWHERE)]
        words = [f"{verdict}  {who:<20}", *numbers, f"{row['seconds']:.0f} s", row.get("error") or " ".join(own)]
        print("  ".join(words).rstrip(), file=out, flush=True)
    return rows


if __name__ == "__main__":
    main()
