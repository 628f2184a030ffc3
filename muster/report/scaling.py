"""Scaling: the throughput of runs of the same work, compared over different numbers of ranks."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from muster.report.runs import Run

DEFINITION = (
    "Efficiency = rate(W) / (W/W0 x rate(W0)): the rate on W ranks as a part of what W ranks would reach if each did "
    "as much as on W0, the smallest number of ranks here. Weak scaling: the batch of a rank is the same, so that work "
    "grows with the ranks. Strong scaling: the batch of all ranks together is the same, and each rank has less of it."
)

ON_CPUS = (
    "ranks on CPUs: the efficiency shows how well the software scales only if each rank had cores of its own, and the "
    "same number of threads (OMP_NUM_THREADS) in all runs"
)

OPTIONS = (
    *("image_size", "seq_len", "vocab_size", "num_classes", "activation_checkpoint", "optimizer", "accumulate"),
    *("bf16", "channels_last", "fused", "compile", "deterministic", "zero1", "comm_hook", "sync_bn", "clip_norm"),
    *("cpu_offload", "replicate", "schedule", "microbatches", "backend", "bucket_mb", "powersgd_rank", "decoder"),
    *("share_gpus", "powersgd_start", "tensor_parallel", "pipeline_parallel"),
)
"""Options that change what a step computes or sends: runs in which they differ are not compared."""


@dataclass(frozen=True)
class Point:
    """The results on one number of ranks.

    Attributes:
        world: the number of ranks.
        batch: samples of a step of all ranks together.
        rate: images or tokens a second of all ranks; the median where there are several runs.
        speedup: the rate divided by that on the smallest number of ranks.
        efficiency: the speedup as a fraction of the ideal one.
    """

    world: int
    batch: float
    rate: float
    speedup: float
    efficiency: float


@dataclass(frozen=True)
class Scaling:
    """Runs of the same work on different numbers of ranks.

    Attributes:
        kind: `weak` where the batch of a rank is the same, `strong` where that of all ranks is.
        batch: that batch, in samples.
        work: model, data, strategy and device, as text.
        unit: what the rates count.
        points: by number of ranks; at least two.
        notes: what the reader should know.
    """

    kind: str
    batch: float
    work: str
    unit: str
    points: tuple[Point, ...]
    notes: tuple[str, ...]

    @property
    def title(self) -> str:
        """The kind of scaling, the work and the batch, on one line."""
        where = "a rank" if self.kind == "weak" else "over all ranks"
        return f"{self.kind.capitalize()} scaling: {self.work}, batch of {self.batch:,.0f} {where}"


def find(runs: Sequence[Run]) -> tuple[list[Scaling], list[str]]:
    """The scalings that `runs` show, and notes on the runs that are in none of them.

    Runs of other work (another model, strategy, precision ...) are never compared.
    """
    left_out: dict[str, str] = {}
    usable: list[Run] = []
    for run in runs:
        if not run.is_finished:
            left_out[run.label] = "it is not finished"
        elif not run.world_size or not run.rate or not run.number("global_batch"):
            left_out[run.label] = "its summary lacks the rate, the number of ranks or the batch"
        else:
            usable.append(run)
    if len({run.world_size for run in runs} - {None}) < 2:
        return [], []
    groups: dict[tuple[object, ...], list[Run]] = {}
    for run in usable:
        for kind in ("weak", "strong"):
            groups.setdefault((kind, _batch(run, kind), *_work(run)), []).append(run)
    groups = {key: group for key, group in groups.items() if len({run.world_size for run in group}) > 1}
    compared = {run.label for group in groups.values() for run in group}
    for run in usable:
        if run.label not in compared:
            left_out[run.label] = "no other run does the same work with the same batch on another number of ranks"
    notes = [f"{label} is in no scaling table: {reason}" for label, reason in left_out.items()]
    return [_scaling(str(kind), group) for (kind, *_), group in groups.items()], notes


def _work(run: Run) -> tuple[str, ...]:
    """The values that have to be equal for two rates to be comparable."""
    own = [run.value(name) for name in ("model", "data", "strategy", "device")]
    return tuple(map(str, (*own, run.text("versions", "gpu"), *(run.value("options", name) for name in OPTIONS))))


def _batch(run: Run, kind: str) -> float:
    """The batch of a rank for weak scaling, of all ranks for strong scaling."""
    batch, world = run.number("global_batch") or 0.0, run.world_size or 1
    return batch / world if kind == "weak" else batch


def _scaling(kind: str, runs: Sequence[Run]) -> Scaling:
    worlds: dict[int, list[Run]] = {}
    for run in sorted(runs, key=lambda run: run.world_size or 0):
        worlds.setdefault(run.world_size or 0, []).append(run)
    rates = {world: median(run.rate or 0.0 for run in same) for world, same in worlds.items()}
    first = min(rates)
    points = tuple(
        Point(
            world=world,
            batch=worlds[world][0].number("global_batch") or 0.0,
            rate=rate,
            speedup=rate / rates[first],
            efficiency=rate / (world / first * rates[first]),
        )
        for world, rate in rates.items()
    )
    run = runs[0]
    is_cpu = run.text("device") == "cpu"
    device = run.text("versions", "gpu") or ("CPU" if is_cpu else run.text("device"))
    work = run.work + (f", {device}" if device else "")
    notes: list[str] = []
    if several := [f"{len(same)} on {world}" for world, same in worlds.items() if len(same) > 1]:
        notes.append(f"where several runs have the same number of ranks, their median is shown: {', '.join(several)}")
    if is_cpu:
        notes.append(ON_CPUS)
    return Scaling(kind, _batch(run, kind), work, run.unit, points, tuple(notes))
