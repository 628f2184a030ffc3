"""The time that a launch takes: from the command to the exec, by the size of the job, and to the first training step.

`muster run --no-python true` execs `true`, so its duration is the time from the command to the exec. The environment is
that of a Slurm task on the second node; the node list starts with localhost, a name that resolves everywhere.
"""

import os
import statistics
import sys
import tempfile
from functools import partial
from pathlib import Path

from results import ROOT, interleaved, middle, parser, publish, ratios, seconds, spread, start, table

BIN = Path(sys.executable).parent
SIZES = (2, 100, 10_000)
OURS, BARE, SCRIPT = "train ddp", "bare torchrun, the same trainer", "bare torchrun, the tutorial's script"
EPOCH = "train loss"
"""Part of the line that the trainer prints after its first step here."""

STEP = "first step"
"""Part of the line that contenders/first_step.py prints after its first step."""

WANTED = 1.05

DRY, TYPER = "train ddp --dry-run", "python -c 'import typer'"


def slurm_task(num_nodes: int) -> dict[str, str]:
    """The variables of rank 2, the first on the second of `num_nodes` nodes with two tasks each."""
    nodes = "localhost,nid00002" if num_nodes == 2 else f"localhost,nid[00002-{num_nodes:05}]"
    return {
        "SLURM_JOB_ID": "1",
        "SLURM_JOB_NODELIST": nodes,
        "SLURM_JOB_NUM_NODES": str(num_nodes),
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NODELIST": nodes,
        "SLURM_STEP_NUM_NODES": str(num_nodes),
        "SLURM_STEP_NUM_TASKS": str(2 * num_nodes),
        "SLURM_STEP_TASKS_PER_NODE": f"2(x{num_nodes})",
        "SLURM_NODEID": "1",
        "SLURM_LOCALID": "0",
        "SLURM_PROCID": "2",
        "SLURM_GTIDS": "2,3",
    }


def time_to_exec(rounds: int) -> list[str]:
    """The lines of the first table."""
    plain = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    become_true = [str(BIN / "muster"), "run", "--no-python", "true"]
    contenders = {"python -c pass": partial(seconds, [sys.executable, "-c", "pass"], plain)}
    contenders["no scheduler"] = partial(seconds, [*become_true[:2], "--nproc-per-node=1", *become_true[2:]], plain)
    for size in SIZES:
        contenders[f"Slurm, {size:,} nodes"] = partial(seconds, become_true, plain | slurm_task(size))
    contenders[TYPER] = partial(seconds, [sys.executable, "-c", "import typer"], plain)
    contenders[DRY] = partial(seconds, [str(BIN / "train"), "ddp", "--dry-run"], plain)
    figures = interleaved(contenders, rounds)
    rows = [[name, spread(times)] for name, times in figures.items()]
    growth = ratios(figures[f"Slurm, {SIZES[-1]:,} nodes"], figures[f"Slurm, {SIZES[0]:,} nodes"])
    against_typer = ratios(figures[DRY], figures[TYPER])
    return [
        *table(["command to exec", "seconds, median (least to most)"], rows),
        "",
        f"10,000 nodes against 2, ratio of each round: {spread(growth)}; wanted 1.5.",
        f"`{DRY}` against `{TYPER}`, ratio of each round: {spread(against_typer)}; wanted 3.",
    ]


def against_torchrun(rounds: int, folder: Path) -> list[str]:
    """The lines of the second table."""
    work = ["ddp", "--max-steps=1", "--data=synthetic", "--image-size=32", "--num-classes=10", "--num-samples=64"]
    work.append(f"--runs-dir={folder}")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2",
                "--local-addr=127.0.0.1"]  # fmt: skip
    # The trainer prints its line after one step and the validation of a batch of six images.
    figures = interleaved(
        {
            OURS: partial(start, [str(BIN / "train"), *work, "--nproc-per-node=2"], os.environ, EPOCH),
            BARE: partial(start, [*torchrun, "-m", "muster.train", *work], os.environ, EPOCH),
            SCRIPT: partial(start, [*torchrun, str(ROOT / "benchmarks/contenders/first_step.py")], os.environ, STEP),
        },
        rounds,
    )
    rows = []
    medians: dict[str, tuple[float, float]] = {}
    for name, own in figures.items():
        of_line, of_cpu = (
            ratios([getattr(one, kind) for one in figures[OURS]], [getattr(one, kind) for one in own])
            for kind in ("line_s", "cpu_s")
        )
        times = [spread([getattr(one, kind) for one in own], 2) for kind in ("line_s", "end_s", "cpu_s")]
        rows.append([name, *times, middle(of_line), middle(of_cpu)])
        medians[name] = statistics.median(of_line), statistics.median(of_cpu)
    verdicts = [
        f"`train ddp` against {name}: first step {line:.3f}, processors {cpu:.3f}; wanted {WANTED} of both: "
        f"{'met' if max(line, cpu) <= WANTED else 'MISSED'}.  "
        for name, (line, cpu) in medians.items()
        if name != OURS
    ]
    return [
        *table(["2 ranks", "first step, s", "end, s", "processors, s", "ours / it", "in CPU time"], rows),
        "",
        "Seconds are medians (least to most), ratios those of the rounds, with their middle half. The script does one "
        "step in fp32 and ends; the trainer validates and writes a checkpoint too.",
        "",
        *verdicts,
    ]


def main() -> None:
    """Measures and prints both tables."""
    options = parser(__doc__ or "").parse_args()
    lines = time_to_exec(options.rounds)
    with tempfile.TemporaryDirectory() as folder:
        lines += ["", *against_torchrun(options.rounds, Path(folder))]
    publish("Launch", lines, record=options.record)


if __name__ == "__main__":
    main()
