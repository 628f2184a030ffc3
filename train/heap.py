"""What the C library does with memory that tensors leave, and Python with objects that stay."""

import ctypes
import gc
import os
from collections.abc import Mapping

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
NEVER = 2**31 - 1
LARGE_BYTES = 2**30, 2**25
"""Blocks below this come from the heap; older versions of glibc take 32 MiB at most."""


def keep(environ: Mapping[str, str] = os.environ) -> bool:
    """True where from now on the heap keeps what it was given back, for the next step to use again.

    By itself glibc returns large blocks to the system at once, which fills them with zeros when they are needed again:
    9 % of a step of ResNet-18 on a CPU. Variables of the user's, of another allocator too, have precedence.

    Source: https://man7.org/linux/man-pages/man3/mallopt.3.html
    """
    if any(name.startswith("MALLOC_") or name in ("GLIBC_TUNABLES", "LD_PRELOAD") for name in environ):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return any(mallopt(M_MMAP_THRESHOLD, size) for size in LARGE_BYTES) and bool(mallopt(M_TRIM_THRESHOLD, NEVER))


def collect_again() -> None:
    """From now on Python collects garbage, which it has not done while modules were loaded.

    Imports make some hundred thousand objects that stay. To look through them again and again while they are made is
    an eighth of the start-up. Here they count as old at once: the first steps need not look through them either.

    Source: https://docs.python.org/3/library/gc.html#gc.unfreeze
    """
    gc.freeze()
    gc.unfreeze()  # into the oldest generation
    gc.enable()
