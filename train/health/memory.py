"""Memory: settings of the C library's heap and of Python's garbage collection; and the error for exhausted memory, with
the rank, the amount, and options that need less."""

import ctypes
import errno
import gc
import os
import re
import resource
import traceback
from collections.abc import Mapping

import psutil
import torch

from muster import interruption
from muster.config import Options
from muster.errors import ExitCode, MusterError
from muster.train.distributed.world import COMPUTING, DATA, World
from muster.train.reporting.metrics import peak_memory_gib

GIB = 2**30

WORDS = (
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough memory",
    "std::bad_alloc",
    "CUDA error: out of memory",
    "CUDA driver error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
    "Cuda failure 2 'out of memory'",
    "Cuda failure 'out of memory'",
)
"""Messages of exhausted memory in plain RuntimeErrors: of torch on CPUs, CUDA, cuBLAS, cuDNN and NCCL."""

WORKER = re.compile(r"DataLoader worker \(pid.*(?:killed by signal|exited unexpectedly).*")
"""torch's message on a data worker that has ended; only SIGKILL from outside ends ours in that way."""

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
NEVER = 2**31 - 1
LARGE_BYTES = 2**30, 2**25
"""Blocks below this size come from the heap; older versions of glibc accept 32 MiB at most."""


def keep_heap(environ: Mapping[str, str] = os.environ) -> bool:
    """Makes the heap keep freed memory for the next step; returns whether it does.

    By default glibc returns large blocks to the system, which fills them with zeros when they are needed again: 9 % of
    a step of ResNet-18 on a CPU. Variables of the user that configure or replace the allocator have precedence.

    Source: https://man7.org/linux/man-pages/man3/mallopt.3.html
    """
    if any(name.startswith("MALLOC_") or name in ("GLIBC_TUNABLES", "LD_PRELOAD") for name in environ):
        return False
    if (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)) is None:  # not glibc
        return False
    return any(mallopt(M_MMAP_THRESHOLD, size) for size in LARGE_BYTES) and bool(mallopt(M_TRIM_THRESHOLD, NEVER))


def collect_garbage() -> None:
    """Switches on Python's garbage collection, which would take an eighth of the start-up while modules are loaded.

    The hundred thousand objects of these modules stay, and count as old, so that the first steps don't scan them.

    Source: https://docs.python.org/3/library/gc.html#gc.unfreeze
    """
    gc.freeze()
    gc.unfreeze()  # into the oldest generation
    gc.enable()


def explain(error: BaseException, strategy: str, options: Options, world: World) -> MusterError | None:
    """The error for memory that was used up, by this process or by one that loads data; None for any other error."""
    if (lost := WORKER.search(str(error))) and isinstance(error, RuntimeError):
        return MusterError(
            f"a process that loads data has ended on rank {world.rank} of {world.world_size} ({world.host})",
            seen=lost[0].strip(" ."),
            fix="more memory for the job (the system kills what takes too much), or fewer --train-num-workers; "
            + interruption.current.advice,
            code=ExitCode.FAILED,
        )
    if (cause := find(error)) is None:
        return None
    # Frees the tensors that were being computed: an orderly end needs some memory too.
    traceback.clear_frames(cause.__traceback__)
    # "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has ...", "you tried to allocate 1234 bytes"
    asked = re.search(r"ried to allocate ([\d.]+ ?\w+)", str(cause))
    seen = [
        f"{'some' if asked is None else asked[1]} more requested",
        f"{peak_memory_gib(world.device):.2f} of {size_of(world.device):.2f} GiB used at the peak",
        f"--batch-size={options.batch_size}",
        *([f"step {world.status.step + 1}"] if world.status.phase in (DATA, COMPUTING) else []),
    ]
    device = torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else "CPU"
    return MusterError(
        f"out of memory on rank {world.rank} of {world.world_size} ({world.host}, {device})",
        seen=", ".join(seen),
        fix=" or ".join(memory_options(strategy, options.settled(), world.world_size)),
    )


def find(error: BaseException | None) -> BaseException | None:
    """The error of an allocator among `error` and its causes; None where there is none."""
    while error is not None:
        is_word = isinstance(error, RuntimeError) and any(word in str(error) for word in WORDS)
        is_number = isinstance(error, OSError) and error.errno == errno.ENOMEM
        if is_word or is_number or isinstance(error, MemoryError | torch.OutOfMemoryError):
            return error
        error = error.__cause__ or error.__context__
    return None


def size_of(device: torch.device) -> float:
    """GiB of memory that this process may use."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory / GIB
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    total = psutil.virtual_memory().total
    return (total if limit == resource.RLIM_INFINITY else min(limit, total)) / GIB


def memory_options(strategy: str, options: Options, world_size: int) -> list[str]:
    """Options that reduce the memory that `strategy` takes, the cheapest first."""
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
    if strategy == "ddp":
        found.append("'train fsdp' in place of ddp")
    elif strategy == "fsdp" and options.replicate > 1:
        found.append("--replicate=1")
    elif strategy == "fsdp" and world_size > 1 and not options.cpu_offload:
        found.append("--cpu-offload")
    return found or ["more processes, with 'train fsdp'"]
