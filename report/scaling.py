"""Scaling: what more ranks gave, over runs of the same work on different numbers of ranks."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from report import units
from report.runs import Run, number, record

DEFINITION = (
    "Efficiency = rate(W) / (W/W0 x rate(W0)): the rate on W ranks as a part of what W ranks would reach if each did "
    "as much as on W0, the smallest number of ranks here. Weak scaling: the batch of a rank is the same, so that work "
    "grows with the ranks. Strong scaling: the batch of all ranks together is the same, and each rank has less of it."
)

WORK = (
    *("model", "data", "image_size", "seq_len", "vocab_size", "num_classes", "activation_checkpoint", "optimizer"),
    *("bf16", "channels_last", "fused", "compile", "deterministic", "device", "accumulate", "zero1", "comm_hook"),
    *("cpu_offload", "replicate", "local_sgd", "schedule", "microbatches", "sync_bn", "ema", "mixup", "clip_norm"),
)
"""Options that change what a step computes or sends: runs in which they differ are not compared."""


@dataclass(frozen=True)
class Point:
    """One number of ranks.

    Attributes:
        world: the ranks.
        batch: samples of a step of all ranks together.
        rate: images or tokens a second of all ranks; the median where there are several runs.
        speedup: how many times the rate of the smallest world.
        efficiency: of that, the part of what is ideal, 1 is all.
        runs: their labels.
    """

    world: int
    batch: float
    rate: float
    speedup: float
    efficiency: float
    runs: tuple[str, ...]


@dataclass(frozen=True)
class Scaling:
    """Runs of the same work on different numbers of ranks.

    Attributes:
        kind: `weak` where the batch of a rank is the same, `strong` where that of all ranks is.
        batch: that batch, in samples.
        work: model, data and strategy, as text.
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
        """One line that says what scales."""
        where = "a rank" if self.kind == "weak" else "over all ranks"
        return f"{self.kind.capitalize()} scaling: {self.work}, batch of {self.batch:,.0f} {where}"


def find(runs: Sequence[Run]) -> tuple[list[Scaling], list[str]]:
    """The scalings that `runs` show, and why some are in none of them.

    Runs of other work (another model, strategy, precision ...) are never compared.
    """
    left_out: dict[str, str] = {}
    usable: list[Run] = []
    for run in runs:
        reason = _unusable(run)
        if reason:
            left_out[run.label] = reason
        else:
            usable.append(run)
    if len({run.world_size for run in usable}) < 2:
        return [], []
    scalings: list[Scaling] = []
    used: set[str] = set()
    for work in dict.fromkeys(map(_work, usable)):
        same = [run for run in usable if _work(run) == work]
        for kind in ("weak", "strong"):
            for batch in dict.fromkeys(_batch(run, kind) for run in same):
                of_batch = [run for run in same if _batch(run, kind) == batch]
                if len({run.world_size for run in of_batch}) > 1:
                    scalings.append(_scaling(kind, batch, of_batch))
                    used |= {run.label for run in of_batch}
    for run in usable:
        if run.label not in used:
            left_out[run.label] = "no other run does the same work, by the same batch, on another number of ranks"
    notes = [f"{label} is in no scaling table: {reason}" for label, reason in left_out.items()]
    return scalings, notes if scalings or usable else []


def rows(found: Scaling) -> tuple[list[str], list[list[str]]]:
    """The heads and the rows of its table."""
    heads = ["ranks", f"{found.unit} a second", "efficiency", "speedup", "a rank", "batch"]
    return heads, [
        [
            units.count(point.world),
            units.rate(point.rate),
            units.share(point.efficiency),
            f"{point.speedup:.2f}",
            units.rate(point.rate / point.world),
            units.count(point.batch),
        ]
        for point in found.points
    ]


def _unusable(run: Run) -> str:
    if not run.is_finished:
        return "it is not finished"
    if not run.world_size or not run.rate or not run.number("global_batch"):
        return "its summary has no rate, world or batch"
    return ""


def _work(run: Run) -> tuple[str, ...]:
    """What has to be equal for two rates to be comparable."""
    options = record(run.summary.get("options"))
    own = [run.summary.get(name) for name in ("model", "data", "strategy", "device")]
    return (
        *(str(value) for value in own),
        str(run.text("versions", "gpu")),
        *(str(options.get(name)) for name in WORK),
    )


def _batch(run: Run, kind: str) -> float:
    batch, world = run.number("global_batch") or 0.0, run.world_size or 1
    return batch / world if kind == "weak" else batch


def _scaling(kind: str, batch: float, runs: Sequence[Run]) -> Scaling:
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
            runs=tuple(run.label for run in worlds[world]),
        )
        for world, rate in rates.items()
    )
    run = runs[0]
    device = run.text("versions", "gpu") or ("CPU" if run.text("device") == "cpu" else run.text("device") or "")
    work = f"{run.text('model')} on {run.text('data')}, {run.text('strategy')}" + (f", {device}" if device else "")
    several = [f"{len(same)} on {world}" for world, same in worlds.items() if len(same) > 1]
    notes = [f"of several runs on as many ranks the median counts: {', '.join(several)}"] if several else []
    return Scaling(kind, batch, work, run.unit, points, (*notes, *_shared_cores(worlds), *_few_steps(runs)))


def _shared_cores(worlds: dict[int, list[Run]]) -> list[str]:
    """A note where ranks on CPUs had fewer cores than threads; only `train scale` leaves what tells it."""
    for world, runs in worlds.items():
        for run in runs:
            cores, threads = number(run.scale.get("cores")), number(run.scale.get("threads"))
            if cores and threads and run.text("device") == "cpu" and world * threads > cores:
                return [
                    f"{world} ranks, with {units.count(threads)} thread{'s' if threads > 1 else ''} each, share "
                    f"{units.count(cores)} cores: from there on "
                    "the efficiency measures the machine's cores, not the software"
                ]
    return []


def _few_steps(runs: Sequence[Run]) -> list[str]:
    if any(run.number("num_timed_steps") == 0 for run in runs):
        return ["a run has one step only: its rate is that of the first step, which is slower than the others"]
    return []
