"""`python -m train.plan`: what each strategy would hold on a GPU, and the simplest that fits.

Nothing is trained, and no GPU is needed: the model computes on tensors without content (train/memory.py), and what the
strategies divide is divided by formulas (train/needs.py).
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING

import typer

from train import combinations
from train.errors import USER_MUST_CHANGE, MusterError
from train.hardware import Hardware
from train.options import Options, command, to_argv

if TYPE_CHECKING:
    from train.memory import Subject
    from train.needs import Need

RECOMPUTE = ("none", "selective", "full")
MOST_GPUS = 4096
GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A strategy with its options, for so many GPUs."""

    strategy: str
    options: Options
    num_gpus: int

    @property
    def name(self) -> str:
        """What tells it from the others."""
        options, parts = self.options, [self.strategy]
        if self.strategy == "tp":
            tensor = combinations.tensor_parallel_of(options, self.num_gpus)
            parts = [f"tp {tensor}" + (f" x fsdp {self.num_gpus // tensor}" if self.num_gpus > tensor else "")]
        if self.strategy == "pipeline":
            size = combinations.Pipelines.of(options, self.num_gpus).size
            parts = [f"pipeline {size}" + (f" x {self.num_gpus // size}" if self.num_gpus > size else "")]
        parts += ["zero1"] if getattr(options, "zero1", False) else []
        parts += [] if options.activation_checkpoint == "none" else [options.activation_checkpoint]
        return ", ".join([*parts, *(["offload"] if options.cpu_offload else [])])

    @property
    def typed(self) -> str:
        """The command line."""
        options = self.options
        if options.predicts_tokens and options.data == Options().data:
            options = replace(options, data="tokens:PATH")
        return " ".join(["train", self.strategy, *to_argv(options)])

    def with_batch(self, size: int) -> "Candidate":
        """The same with micro-batches of `size`, and more of them, so that the global batch stays."""
        options = self.options
        more = options.accumulate * options.batch_size // size
        return replace(self, options=replace(options, batch_size=size, accumulate=more))


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
        choice: the simplest that fits, perhaps with smaller micro-batches than asked for; None where nothing fits.
        more_gpus: with how many something would fit; None where that is not known.
    """

    subject: "Subject"
    machines: Hardware
    rows: list[Estimate]
    choice: Estimate | None
    more_gpus: int | None = None

    @property
    def memory(self) -> float:
        """Bytes of a GPU."""
        return (self.machines.memory or 0) * GIB

    @property
    def nearest(self) -> Estimate:
        """What needs the least."""
        return min(self.rows, key=lambda row: row.need.total)


def kinds(options: Options, machines: Hardware) -> Iterator[list[Candidate]]:
    """What can be tried, the simplest first: of each kind those that differ in one number only."""
    num_gpus, per_node = machines.gpus or 1, machines.gpus_per_node or 1
    levels = RECOMPUTE[RECOMPUTE.index(options.activation_checkpoint) :] if options.predicts_tokens else ("none",)

    def one(strategy: str, gpus: int = num_gpus, **changed: object) -> Candidate:
        others = [name for name, strategies in combinations.ONLY.items() if strategy not in strategies]
        plain = {name: getattr(Options(), name) for name in others}
        return Candidate(strategy=strategy, options=replace(options, **(plain | changed)), num_gpus=gpus)

    if num_gpus == 1:
        for level in levels:
            yield [one("single", activation_checkpoint=level)]
        return
    yield [one("single", 1)]
    yield [one("ddp")]
    if any(field.name == "zero1" for field in fields(Options)):
        yield [one("ddp", zero1=True)]
    for level in levels:
        yield [one("fsdp", activation_checkpoint=level)]
    yield [one("fsdp", activation_checkpoint=levels[-1], cpu_offload=True)]
    sizes = [2**power for power in range(1, 11) if 2**power <= num_gpus]
    in_group = [options.tensor_parallel] if options.tensor_parallel else [size for size in sizes if size <= per_node]
    in_line = [options.pipeline_parallel] if options.pipeline_parallel else sizes
    yield [one("tp", tensor_parallel=size, activation_checkpoint=level) for level in levels for size in in_group]
    yield [
        one("pipeline", pipeline_parallel=size, activation_checkpoint=level, microbatches=number)
        for level in levels
        for size in in_line
        for number in [options.microbatches or (2 * size if options.batch_size % (2 * size) == 0 else size)]
    ]


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
        from train.needs import need

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

    def smaller(self, candidate: Candidate) -> Estimate | None:
        """`candidate` with the largest micro-batch, a half or a quarter or so on, that fits."""
        smallest = 1 if self.subject.shape is not None else 2  # batch normalisation wants two
        sizes = []
        while candidate.options.batch_size % 2 ** (len(sizes) + 1) == 0:
            sizes.append(candidate.options.batch_size // 2 ** (len(sizes) + 1))
        tried = [candidate.with_batch(size) for size in sizes if size >= smallest]
        tried = [one for one in tried if self.refusal(one) is None]
        if not tried or not self.estimate(tried[-1]).fits(self.memory):
            return None
        return next(estimate for one in tried if (estimate := self.estimate(one)).fits(self.memory))


def make(options: Options, machines: Hardware) -> Plan:
    """The plan for `options` on `machines`, which are all known.

    Raises:
        MusterError: there is no such model, or the options go with no strategy.
    """
    from train.memory import Subject

    subject = Subject(options.settled(), is_gpu=options.device != "cpu")
    planner = Planner(subject, (machines.memory or 0) * GIB)
    listed = list(kinds(options, machines))
    rows = [row for kind in listed if (row := planner.best(kind)) is not None]
    if not rows:
        refusal = planner.refusal(listed[0][0])
        assert refusal is not None
        raise refusal
    choice = next((row for row in rows if row.fits(planner.memory)), None)
    if choice is None:
        choice = next((less for row in rows if (less := planner.smaller(row.candidate)) is not None), None)
    more = None if choice is not None else enough(planner, options, machines)
    return Plan(subject=subject, machines=machines, rows=rows, choice=choice, more_gpus=more)


def enough(planner: Planner, options: Options, machines: Hardware) -> int | None:
    """With how many GPUs, full nodes of them, the model would fit by fsdp; None where no number helps."""
    level = RECOMPUTE[-1] if options.predicts_tokens else "none"
    smallest = 1 if options.predicts_tokens else 2
    least = replace(options, activation_checkpoint=level, batch_size=smallest, accumulate=1, replicate=1)
    number = machines.gpus or 1
    while number < MOST_GPUS:
        number *= 2
        if planner.estimate(Candidate(strategy="fsdp", options=least, num_gpus=number)).fits(planner.memory):
            return number
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


def read(argv: Sequence[str]) -> tuple[Hardware, Options]:
    """What `argv` asks for.

    Raises:
        MusterError: an option or value that does not exist.
        SystemExit: with code 0, after --help.
    """
    parsed: list[tuple[Hardware, Options]] = []
    app = typer.Typer(add_completion=False)

    def chosen(machines: Hardware, options: Options) -> None:
        parsed.append((machines, options))

    app.command()(command(chosen, Hardware, Options))
    try:
        typer.main.get_command(app).main(args=list(argv), prog_name="train plan", standalone_mode=False)
    except typer.TyperException as error:
        seen = " ".join(["train plan", *argv])
        raise MusterError(error.format_message(), seen=seen, fix="train plan --help lists what there is") from None
    if not parsed:
        raise SystemExit(0)  # --help has said what it had to say
    return parsed[0]


def main() -> None:
    try:
        machines, options = read(sys.argv[1:])
        plan = make(options, here(machines))
    except MusterError as error:
        print(error, file=sys.stderr)
        sys.exit(error.code)
    from train import plan_table

    print(plan_table.as_json(plan)) if machines.json else plan_table.show(plan)
    sys.exit(0 if plan.choice is not None else USER_MUST_CHANGE)


if __name__ == "__main__":
    main()
