"""The strategies that `train plan` weighs against each other, the simplest first. Without torch."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from train import combinations
from train.arguments import to_argv
from train.options import Options
from train.plan.hardware import Hardware

RECOMPUTE = ("none", "selective", "full")


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
        parts += ["zero1"] if options.zero1 else []
        parts += [] if options.activation_checkpoint == "none" else [options.activation_checkpoint]
        return ", ".join([*parts, *(["offload"] if options.cpu_offload else [])])

    @property
    def typed(self) -> str:
        """The command line."""
        options = self.options
        if options.predicts_tokens and options.data == Options().data:
            options = replace(options, data="tokens:PATH")
        return " ".join(["train", self.strategy, *to_argv(options)])

    def with_batch(self, size: int, accumulate: int) -> "Candidate":
        """The same with `accumulate` micro-batches of `size`."""
        return replace(self, options=replace(self.options, batch_size=size, accumulate=accumulate))


def kinds(options: Options, machines: Hardware) -> Iterator[list[Candidate]]:
    """What can be tried, the simplest first: of each kind those that differ in one number only."""
    num_gpus, per_node = machines.gpus or 1, machines.gpus_per_node or 1
    asked = options.activation_checkpoint
    levels = list(RECOMPUTE[RECOMPUTE.index(asked) :]) if options.predicts_tokens else [asked]

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
