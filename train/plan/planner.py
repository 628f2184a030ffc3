"""The simplest strategy that fits, and what to turn where none does.

Nothing is trained, and no GPU is needed: the model computes on tensors without content (memory.py), and what the
strategies divide is divided by formulas (needs.py).
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING

from train import combinations
from train.errors import MusterError
from train.options import Options
from train.plan.candidates import Candidate, kinds
from train.plan.hardware import GIB, Hardware

if TYPE_CHECKING:
    from train.plan.memory import Subject
    from train.plan.needs import Need

MOST_GPUS = 4096
SHORTEST = 128
"""Where the search for what would fit ends: GPUs, and tokens of a sequence."""


@dataclass(frozen=True)
class Estimate:
    """A candidate and what it needs."""

    candidate: Candidate
    need: "Need"

    def fits(self, memory: float) -> bool:
        """Whether `memory` bytes a GPU are enough."""
        return self.need.total <= memory


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What was found.

    Attributes:
        rows: an estimate of each kind, the simplest first.
        choice: the simplest that fits and uses all GPUs, perhaps with smaller micro-batches than asked for; None where
            nothing fits.
        nearest: where nothing fits, what needs the least, with the smallest micro-batch.
        more_gpus: where nothing fits, how many GPUs would do; None where no number does.
        seq_len: where nothing fits, the length of the sequences that would; None where none does.
    """

    subject: "Subject"
    machines: Hardware
    rows: list[Estimate]
    choice: Estimate | None
    nearest: Estimate | None = None
    more_gpus: int | None = None
    seq_len: int | None = None

    @property
    def memory(self) -> float:
        """Bytes of a GPU."""
        return (self.machines.memory or 0) * GIB


class Planner:
    """Estimates for one model."""

    def __init__(self, subject: "Subject", memory: float) -> None:
        self.subject = subject
        self.memory = memory

    def refusal(self, candidate: Candidate) -> MusterError | None:
        """Why `candidate` can't be; None where it can."""
        strategy, options, world_size = candidate.strategy, candidate.options, candidate.num_gpus
        try:
            combinations.check(strategy, options)
            if strategy == "fsdp":
                combinations.check_replicas(options, world_size)
            if strategy == "tp" and self.subject.shape is not None:
                heads, seq_len = self.subject.shape.num_kv_heads, self.subject.size
                combinations.check_tensor_parallel(options, world_size, heads, seq_len)
            if strategy == "pipeline" and self.subject.shape is not None:
                combinations.check_pipeline(options, world_size, self.subject.shape.num_layers)
        except MusterError as error:
            return error
        return None

    def estimate(self, candidate: Candidate) -> Estimate:
        """What `candidate` needs."""
        from train.plan.needs import need

        return Estimate(candidate, need(self.subject, candidate.strategy, candidate.options, candidate.num_gpus))

    def best(self, kind: list[Candidate]) -> Estimate | None:
        """The first of `kind` that fits, else the last, which needs least; None where none can be."""
        possible = [candidate for candidate in kind if self.refusal(candidate) is None]
        if not possible:
            return None
        last = self.estimate(possible[-1])
        if not last.fits(self.memory):
            return last
        return next(one for candidate in possible if (one := self.estimate(candidate)).fits(self.memory))

    def smaller(self, candidate: Candidate, *, keeps: bool) -> Estimate | None:
        """`candidate` with the largest micro-batch, a half or a quarter or so on, that fits; None where none does.

        Args:
            keeps: with as many more of them, so that the global batch stays; or with one, where that takes too much,
                since gradients have to be kept.
        """
        options = candidate.options
        sizes = [options.batch_size // 2**power for power in range(1, 12) if options.batch_size % 2**power == 0]
        tried = [
            candidate.with_batch(size, options.accumulate * options.batch_size // size if keeps else 1)
            for size in sizes
            if size >= self.smallest
        ]
        tried = [one for one in tried if self.refusal(one) is None]
        if not tried or not self.estimate(tried[-1]).fits(self.memory):
            return None
        return next(estimate for one in tried if (estimate := self.estimate(one)).fits(self.memory))

    def least(self, candidate: Candidate) -> Estimate:
        """`candidate` with the smallest micro-batch, or as it is where it can't be smaller."""
        small = candidate.with_batch(self.smallest, 1)
        return self.estimate(small if self.refusal(small) is None else candidate)

    @property
    def smallest(self) -> int:
        """The smallest micro-batch: batch normalisation wants two images."""
        return 1 if self.subject.shape is not None else 2


def make(options: Options, machines: Hardware) -> Plan:
    """The plan for `options` on `machines`, which are all known.

    Raises:
        MusterError: there is no such model, or the options go with no strategy.
    """
    planner = planner_for(options, machines)
    listed = list(kinds(options, machines))
    rows = [row for kind in listed if (row := planner.best(kind)) is not None]
    if not rows:
        refusal = planner.refusal(listed[0][0])
        assert refusal is not None
        raise refusal
    on_all = [row for row in rows if row.candidate.num_gpus == machines.gpus]
    choice = choose(planner, on_all)
    if choice is not None:
        return Plan(subject=planner.subject, machines=machines, rows=rows, choice=choice)
    nearest = min((planner.least(row.candidate) for row in on_all), key=lambda estimate: estimate.need.total)
    return Plan(
        subject=planner.subject,
        machines=machines,
        rows=rows,
        choice=None,
        nearest=nearest,
        more_gpus=enough_gpus(planner, nearest.candidate),
        seq_len=short_enough(planner, nearest.candidate, machines),
    )


def choose(planner: Planner, rows: list[Estimate]) -> Estimate | None:
    """The simplest of `rows` that fits, with smaller micro-batches if need be; None where none does.

    Smaller micro-batches come before the host's memory, which is far slower, and that before a smaller global batch,
    which trains something else.
    """
    fitting = [row for row in rows if row.fits(planner.memory)]
    on_gpu = [row for row in rows if not row.candidate.options.cpu_offload]
    if fitting and fitting[0] in on_gpu:
        return fitting[0]

    def less(some: list[Estimate], *, keeps: bool) -> Iterator[Estimate]:
        return (one for row in some if (one := planner.smaller(row.candidate, keeps=keeps)) is not None)

    ways = (less(on_gpu, keeps=True), iter(fitting), less(rows, keeps=True), less(rows, keeps=False))
    return next(chain.from_iterable(ways), None)


def planner_for(options: Options, machines: Hardware) -> Planner:
    """A planner of what `options` name."""
    from train.plan.memory import Subject

    subject = Subject(options.settled(), is_gpu=options.device != "cpu")
    return Planner(subject, (machines.memory or 0) * GIB)


def enough_gpus(planner: Planner, nearest: Candidate) -> int | None:
    """With how many GPUs the model would fit by fsdp; None where no number helps."""
    options = replace(nearest.options, tensor_parallel=None, pipeline_parallel=None, microbatches=None)
    options = replace(options, batch_size=planner.smallest, replicate=1)
    number = nearest.num_gpus
    while number < MOST_GPUS:
        number *= 2
        if planner.estimate(Candidate(strategy="fsdp", options=options, num_gpus=number)).fits(planner.memory):
            return number
    return None


def short_enough(planner: Planner, nearest: Candidate, machines: Hardware) -> int | None:
    """With sequences of which length `nearest` would fit; None where none is."""
    seq_len = planner.subject.size if planner.subject.shape is not None else 0
    while (seq_len := seq_len // 2) >= SHORTEST:
        shorter = replace(nearest, options=replace(nearest.options, seq_len=seq_len))
        other = planner_for(shorter.options, machines)
        if other.refusal(shorter) is None and other.estimate(shorter).fits(other.memory):
            return seq_len
    return None


def here(machines: Hardware) -> Hardware:
    """`machines`, with what was left open as it is on this one.

    Raises:
        MusterError: there is no GPU here to go by.
    """
    import torch

    num_gpus, memory = machines.gpus, machines.memory
    if (num_gpus is None or memory is None) and not torch.cuda.is_available():
        missing = [name for name, value in (("--gpus", num_gpus), ("--memory", memory)) if value is None]
        raise MusterError(
            "no GPU can be seen here, whose number and memory could be taken",
            seen=f"no {' and no '.join(missing)}",
            fix="train plan --gpus 8 --memory 80: GPUs in all, and GiB of each",
        )
    if memory is None:
        memory = round(torch.cuda.get_device_properties(0).total_memory / GIB, 1)
    num_gpus = num_gpus or torch.cuda.device_count()
    return replace(machines, gpus=num_gpus, memory=memory, gpus_per_node=machines.gpus_per_node or min(num_gpus, 8))
