"""Which options go together: refused before anything is started, with the nearest that works. Without torch."""

from dataclasses import dataclass

from train.errors import MusterError
from train.options import Options

ONLY = {
    "replicate": ("fsdp",),
    "cpu_offload": ("fsdp",),
    "tensor_parallel": ("tp",),
    "pipeline_parallel": ("pipeline",),
    "microbatches": ("pipeline",),
    "schedule": ("pipeline",),
}
"""Options that mean something to some strategies only."""

WHICH = """\
Which one?  nodes  GPUs a node  when
single      1      1            what you measure the others against
dp          1      some         only to compare
ddp         any    any          it fits on one GPU: the first choice
fsdp        any    any          it does not; see --replicate on many nodes
tp          any    2 to 8       gpt-...: its layers are too large for fsdp
pipeline    any    any          gpt-...: slow network between many nodes
"""
"""Which strategy is for what, for the help text."""

OF_TRANSFORMERS = ("tp", "pipeline")


def check(strategy: str, options: Options) -> None:
    """Raises MusterError where `options` contradict each other or the strategy, whatever the world."""
    for name, strategies in ONLY.items():
        value = getattr(options, name)
        if strategy not in strategies and value != getattr(Options(), name):
            flag = f"--{name.replace('_', '-')}" + ("" if value is True else f"={value}")
            raise MusterError(
                f"the strategy {strategy} knows nothing of {flag.partition('=')[0]}",
                seen=f"train {strategy} {flag}",
                fix=f"'train {strategies[0]} {flag}', or leave it out",
            )
    if strategy in OF_TRANSFORMERS and not options.predicts_tokens:
        raise MusterError(
            f"the strategy {strategy} cuts transformers, not {options.model}",
            seen=f"train {strategy} --model={options.model}",
            fix=f"'train fsdp --model={options.model}', or a transformer: --model=gpt-tiny",
        )
    if options.mixup and options.predicts_tokens:
        raise MusterError(
            "tokens can't be mixed, only images",
            seen=f"--model={options.model} --mixup={options.mixup}",
            fix="leave out --mixup; --label-smoothing is for both",
        )
    if options.lr_schedule != "cosine" and (options.lr_steps is not None or options.lr_end):
        name, value = ("lr-steps", options.lr_steps) if options.lr_steps is not None else ("lr-end", options.lr_end)
        raise MusterError(
            "a constant learning rate has no end to go to",
            seen=f"--lr-schedule={options.lr_schedule} --{name}={value}",
            fix="--lr-schedule=cosine",
        )
    if options.schedule == "zero-bubble" and options.activation_checkpoint != "none":
        raise MusterError(
            "the zero-bubble schedule parts the backward pass, and what is computed again can't be parted",
            seen=f"--schedule=zero-bubble --activation-checkpoint={options.activation_checkpoint}",
            fix="--schedule=interleaved, or leave out --activation-checkpoint",
        )
    if options.activation_checkpoint != "none" and not options.predicts_tokens:
        raise MusterError(
            f"{options.model} can't compute its activations again",
            seen=f"--activation-checkpoint={options.activation_checkpoint}",
            fix="leave it out, or train a transformer: --model=gpt-tiny",
        )


def tensor_parallel_of(options: Options, world_size: int) -> int:
    """How many ranks cut a layer between them."""
    return options.tensor_parallel or world_size


def check_tensor_parallel(options: Options, world_size: int, num_kv_heads: int, seq_len: int) -> None:
    """Raises MusterError where the groups don't divide the world, or their ranks a layer or a sequence."""
    size = tensor_parallel_of(options, world_size)
    numbers = {"processes": world_size, "heads of keys": num_kv_heads, "tokens of a sequence": seq_len}
    for name, number in numbers.items():
        if number % size:
            fits = [s for s in range(1, world_size + 1) if not any(number % s for number in numbers.values())]
            raise MusterError(
                f"{number} {name} can't be divided by {size} ranks",
                seen=f"--tensor-parallel={size}, {world_size} processes, --model={options.model}",
                fix=f"--tensor-parallel={max((s for s in fits if s <= size), default=1)}",
            )


def check_replicas(options: Options, world_size: int) -> None:
    """Raises MusterError where the world can't be divided into `--replicate` groups of more than one rank."""
    if options.replicate == world_size > 1:
        raise MusterError(
            "a group of one rank has nothing to cut its model over",
            seen=f"--replicate={options.replicate}, {world_size} processes",
            fix="'train ddp', which is the same with whole models; or fewer groups",
        )
    if world_size % options.replicate:
        fits = [number for number in range(1, world_size + 1) if world_size % number == 0]
        nearest = min(fits, key=lambda number: abs(number - options.replicate))
        raise MusterError(
            f"{world_size} processes can't be divided into {options.replicate} groups",
            seen=f"--replicate={options.replicate}, {world_size} processes",
            fix=f"--replicate={nearest}, or a number of processes that {options.replicate} divides",
        )


@dataclass(frozen=True, kw_only=True)
class Pipelines:
    """How the ranks stand in lines.

    Attributes:
        size: ranks in a line.
        stages_each: groups of layers that a rank has; stage s is on the rank at place s modulo size.
        num_parts: micro-batches in which a rank's batch passes.
    """

    size: int
    stages_each: int
    num_parts: int

    @classmethod
    def of(cls, options: Options, world_size: int) -> "Pipelines":
        """The lines that `options` make of `world_size` ranks."""
        size = options.pipeline_parallel or world_size
        stages_each = 2 if options.schedule in ("interleaved", "zero-bubble") else 1
        return cls(size=size, stages_each=stages_each, num_parts=options.microbatches or 2 * size)

    @property
    def num_stages(self) -> int:
        """Groups of layers, over all ranks of a line."""
        return self.size * self.stages_each

    @property
    def bubble(self) -> float:
        """The share of a step in which a rank waits for others, where every stage takes as long (arXiv 2104.04473)."""
        return (self.size - 1) / (self.stages_each * self.num_parts + self.size - 1)

    def stages_of(self, rank: int) -> list[int]:
        """The stages of `rank`."""
        return list(range(rank % self.size, self.num_stages, self.size))


def check_pipeline(options: Options, world_size: int, num_layers: int) -> None:
    """Raises MusterError where the lines don't divide the world, the layers or the batch."""
    if world_size == 1:
        return
    plan = Pipelines.of(options, world_size)
    seen = f"--pipeline-parallel={plan.size} --schedule={options.schedule}, {world_size} processes"
    if world_size % plan.size:
        fits = [size for size in range(2, plan.size) if world_size % size == 0] or [world_size]
        fix = f"--pipeline-parallel={fits[-1]}"
        raise MusterError(f"{world_size} processes can't stand in lines of {plan.size}", seen=seen, fix=fix)
    if plan.num_stages > num_layers:
        fits = [
            size for size in range(2, world_size) if not world_size % size and size * plan.stages_each <= num_layers
        ]
        other = f"--pipeline-parallel={fits[-1]}" if fits else "--schedule=1f1b" if world_size <= num_layers else None
        raise MusterError(
            f"{num_layers} layers are too few for {plan.num_stages} stages",
            seen=f"{seen}, --model={options.model}",
            fix=f"{other or 'fewer processes'}, or a larger model",
        )
    seen = f"--batch-size={options.batch_size} --microbatches={plan.num_parts}, lines of {plan.size} ranks"

    def works(number: int) -> bool:
        in_turn = number >= plan.size if options.schedule == "1f1b" else True
        in_rounds = number % max(1, number // plan.size) == 0 if plan.stages_each > 1 else True
        return options.batch_size % number == 0 and in_turn and in_rounds

    if not works(plan.num_parts):
        fits = [number for number in range(1, options.batch_size + 1) if works(number)]
        nearest = min(fits, key=lambda number: abs(number - plan.num_parts), default=None)
        raise MusterError(
            f"a batch of {options.batch_size} can't pass in {plan.num_parts} parts by the schedule {options.schedule}",
            seen=seen,
            fix=f"--batch-size={2 * plan.size}" if nearest is None else f"--microbatches={nearest}",
        )
