"""Which options go together: refused before anything is started, with the nearest that works. Without torch."""

from train.errors import MusterError
from train.options import Options

ONLY = {"replicate": ("fsdp",), "cpu_offload": ("fsdp",), "tensor_parallel": ("tp",)}
"""Options that mean something to some strategies only."""

OF_TRANSFORMERS = ("tp",)


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
    """Raises MusterError where the world can't be divided into `--replicate` groups."""
    if world_size % options.replicate:
        fits = [number for number in range(1, world_size + 1) if world_size % number == 0]
        nearest = min(fits, key=lambda number: abs(number - options.replicate))
        raise MusterError(
            f"{world_size} processes can't be divided into {options.replicate} groups",
            seen=f"--replicate={options.replicate}, {world_size} processes",
            fix=f"--replicate={nearest}, or a number of processes that {options.replicate} divides",
        )
