"""Which options go together: refused before anything is started, with the nearest that works. Without torch."""

from dataclasses import dataclass

from train.arguments import to_argv
from train.errors import MusterError
from train.options import Options

ONLY = {
    "comm_hook": ("ddp",),
    "powersgd_rank": ("ddp",),
    "powersgd_start": ("ddp",),
    "zero1": ("ddp",),
    "local_sgd": ("ddp",),
    "local_sgd_start": ("ddp",),
    "static_graph": ("ddp",),
    "bucket_view": ("ddp",),
    "bucket_mb": ("ddp",),
    "sync_bn": ("ddp",),
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
        flag = typed(options, name)
        if strategy not in strategies and flag:
            raise MusterError(
                f"the strategy {strategy} knows nothing of {flag.partition('=')[0]}",
                seen=f"train {strategy} {flag}",
                fix=f"'train {strategies[0]} {flag}', or leave it out",
            )
    check_replication(options)
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
    if options.compile != "off":
        check_compilation(strategy, options)
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


def check_compilation(strategy: str, options: Options) -> None:
    """Raises MusterError where what `options` ask for can't be compiled."""
    if strategy == "dp":
        raise MusterError(
            "the strategy dp copies the model at each step, and copies can't be compiled",
            seen=f"train dp {typed(options, 'compile')}",
            fix=f"'train ddp {typed(options, 'compile')}', which is faster in any case",
        )
    if options.schedule == "zero-bubble":
        raise MusterError(
            "the zero-bubble schedule parts the backward pass, and what is compiled can't be parted",
            seen=typed(options, "schedule", "compile"),
            fix="--schedule=interleaved, or leave out --compile",
        )


def typed(options: Options, *names: str) -> str:
    """What a user types for those of `names` that are not at their default."""
    return " ".join(to_argv(Options(**{name: getattr(options, name) for name in names})))


def check_replication(options: Options) -> None:
    """Raises MusterError where the options of ddp contradict each other."""
    hook, start = options.comm_hook, options.local_sgd_start
    of_power = ("comm_hook", "powersgd_rank", "powersgd_start")
    of_local = ("local_sgd", "local_sgd_start")
    if hook != "powersgd" and typed(options, *of_power[1:]):
        raise MusterError(
            "--powersgd-rank and --powersgd-start are for gradients that travel by PowerSGD",
            seen=typed(options, *of_power),
            fix="--comm-hook=powersgd, or leave them out",
        )
    if options.sync_bn and (options.predicts_tokens or options.device == "cpu"):
        what = f"{options.model} has no" if options.predicts_tokens else "torch has no kernel for CPUs for a common"
        raise MusterError(
            f"{what} batch normalisation", seen=typed(options, "sync_bn", "model", "device"), fix="leave out --sync-bn"
        )
    if options.static_graph and options.accumulate > 1:
        raise MusterError(
            "of a graph that is static torch sends the gradients of each micro-batch: none can be held back",
            seen=typed(options, "static_graph", "accumulate"),
            fix=f"leave out --static-graph, or --batch-size={options.accumulate * options.batch_size} --accumulate=1",
        )
    if options.local_sgd is None:
        if start:
            raise MusterError(
                "--local-sgd-start is where ranks begin to train apart, and they don't",
                seen=typed(options, *of_local),
                fix="--local-sgd=8 with it, or leave it out",
            )
        return
    if options.zero1:
        raise MusterError(
            "ranks that train apart step all of their weights, and by --zero1 each steps some",
            seen=typed(options, "zero1", *of_local),
            fix="leave out --zero1, or --local-sgd",
        )
    if options.ema is not None:
        raise MusterError(
            "ranks that train apart have no common weights after each step, of which to keep a moving average",
            seen=typed(options, "ema", *of_local),
            fix="leave out --ema: --local-sgd averages weights too",
        )
    first = {"none": -1, "powersgd": options.warmup_steps if options.powersgd_start is None else options.powersgd_start}
    if start <= first.get(hook, 0):
        raise MusterError(
            f"--comm-hook={hook} would never be used: no gradients are sent any more",
            seen=typed(options, *of_power, *of_local),
            fix=f"--local-sgd-start={first.get(hook, 0) + 100}, or leave out --comm-hook",
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
        in_turn = number == 1 or number >= plan.size if options.schedule == "1f1b" else True
        in_rounds = number % max(1, number // plan.size) == 0 if plan.stages_each > 1 else True
        return options.batch_size % number == 0 and in_turn and in_rounds

    if not works(plan.num_parts):
        fits = [number for number in range(2, options.batch_size + 1) if works(number)]
        nearest = min(fits, key=lambda number: abs(number - plan.num_parts), default=None)
        raise MusterError(
            f"a batch of {options.batch_size} can't pass in {plan.num_parts} parts by the schedule {options.schedule}",
            seen=seen,
            fix=f"--batch-size={2 * plan.size}" if nearest is None else f"--microbatches={nearest}",
        )
