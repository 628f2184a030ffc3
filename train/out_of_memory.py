"""Memory that is used up, as three lines: who ran out, of what, and what to turn."""

import errno
import re
import resource
import traceback

import psutil
import torch

from train.errors import MusterError
from train.loop import Loop
from train.metrics import peak_memory_gib
from train.options import Options
from train.plan.hardware import GIB
from train.world import World

WORDS = ("DefaultCPUAllocator: can't allocate memory", "DefaultCPUAllocator: not enough memory", "std::bad_alloc")
"""How torch says on CPUs that there is no more: by a plain RuntimeError."""


def explain(error: BaseException, strategy: str, options: Options, world: World) -> MusterError | None:
    """What the user is told where `error` comes of memory that is used up; None where it does not."""
    cause = find(error)
    if cause is None:
        return None
    step = step_of(cause)
    # Lets go of the tensors that were being computed: to end well takes some memory too.
    traceback.clear_frames(cause.__traceback__)
    size_gib = size_of(world.device)
    seen = [
        asked_for(cause),
        f"{peak_memory_gib(world.device):.2f} of {size_gib:.2f} GiB held at most",
        f"--batch-size={options.batch_size}",
        *([] if step is None else [f"step {step}"]),
    ]
    device = torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else "CPU"
    return MusterError(
        f"out of memory on rank {world.rank} of {world.world_size} ({world.host}, {device})",
        seen=", ".join(seen),
        fix=f"{' or '.join(turns(strategy, options.settled(), world.world_size))}; "
        f"what fits, says: {plan_for(options, world, size_gib)}",
    )


def find(error: BaseException | None) -> BaseException | None:
    """The error of an allocator among `error` and those it comes from; None where there is none."""
    while error is not None:
        is_word = isinstance(error, RuntimeError) and any(word in str(error) for word in WORDS)
        is_number = isinstance(error, OSError) and error.errno == errno.ENOMEM
        if is_word or is_number or isinstance(error, MemoryError | torch.OutOfMemoryError):
            return error
        error = error.__cause__ or error.__context__
    return None


def step_of(error: BaseException) -> int | None:
    """The step that was under way, from 1; None outside of training."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        loop = frame.f_locals.get("self")
        if isinstance(loop, Loop) and frame.f_code.co_name == "step":
            return loop.progress.step + 1
    return None


def asked_for(error: BaseException) -> str:
    """How much was asked for at last."""
    # "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has ...", "you tried to allocate 1234 bytes"
    found = re.search(r"[Tt]ried to allocate ([\d.]+) ?(\w+)", str(error))
    if found is None:
        return "some more was asked for"
    number, unit = found.groups()
    return f"{int(number) / 2**20:,.1f} MiB more asked for" if unit == "bytes" else f"{number} {unit} more asked for"


def size_of(device: torch.device) -> float:
    """GiB of memory that this process may use."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory / GIB
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    total = psutil.virtual_memory().total
    return (total if limit == resource.RLIM_INFINITY else min(limit, total)) / GIB


def turns(strategy: str, options: Options, world_size: int) -> list[str]:
    """What lessens the memory that `strategy` takes, the cheapest first."""
    found = []
    if strategy == "pipeline" and world_size > 1:
        found.append("more --microbatches")
    elif options.batch_size > 1:
        half, odd = divmod(options.batch_size, 2)
        same = "" if odd else f" --accumulate={2 * options.accumulate}"
        found.append(f"--batch-size={half}{same}")
    if options.predicts_tokens and options.activation_checkpoint != "full":
        level = "selective" if options.activation_checkpoint == "none" else "full"
        found.append(f"--activation-checkpoint={level}")
    if strategy == "ddp" or (strategy == "fsdp" and options.replicate > 1):
        found.append("'train fsdp' in place of ddp" if strategy == "ddp" else "--replicate=1")
    elif strategy == "fsdp" and world_size > 1 and not options.cpu_offload:
        found.append("--cpu-offload")
    return found or ["more processes, with 'train fsdp'"]


def plan_for(options: Options, world: World, size_gib: float) -> str:
    """The command that says what fits here."""
    words = [f"--model={options.model}", f"--gpus={world.world_size}", f"--memory={max(0.5, size_gib):.1f}"]
    words += [f"--batch-size={options.batch_size}"]
    words += [f"--seq-len={options.seq_len}"] if options.seq_len else []
    words += [f"--image-size={options.image_size}"] if options.image_size else []
    words += ["--device=cpu"] if world.device.type == "cpu" else []
    return " ".join(["train plan", *words])
