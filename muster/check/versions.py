"""Prints the versions of torch and of the libraries that it loads as JSON: `python -P -m muster.check.versions`.

The version in a wheel's file name, or in a constant of torch, need not be the one that runs: LD_PRELOAD, or a file
mounted over it, replaces NCCL. So the loaded library is asked.
"""

import ctypes
import json
import os
import platform
from pathlib import Path
from typing import Any

from muster.paths import installed


def versions() -> dict[str, Any]:
    """The versions of Python, torch and its libraries, and the machine type, by name; None for what is missing."""
    # Not imported above, so that callers of `file_of` need not wait for torch.
    import torch

    try:
        cudnn = torch.backends.cudnn.version() if torch.version.cuda else None
    except RuntimeError:
        # torch refuses to use a cuDNN that is older than the one it was built with.
        cudnn = None
    return {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "torchvision": installed("torchvision"),
        "cuda": torch.version.cuda,
        "nccl": nccl(),
        "cudnn": None if cudnn is None else dotted(cudnn),
        "glibc": platform.libc_ver()[1] or None,
        "machine": platform.machine(),
    }


def nccl() -> dict[str, str] | None:
    """The `version` and the `path` of the NCCL that torch's calls go to; None for a torch without it."""
    import torch

    # In the order in which the loader resolves torch's own calls: first the global scope, with what LD_PRELOAD names;
    # then libtorch_cuda.so and its dependencies.
    library = Path(torch.__file__).parent / "lib" / "libtorch_cuda.so"
    if not library.exists():
        return None
    for scope in (None, str(library)):
        try:
            function = ctypes.CDLL(scope).ncclGetVersion
        except (OSError, AttributeError):
            continue
        number = ctypes.c_int()
        if function(ctypes.byref(number)) != 0:
            return None
        return {"version": dotted(number.value), "path": file_of(function)}
    return None


class _Symbol(ctypes.Structure):
    """The C struct Dl_info. Source: https://man7.org/linux/man-pages/man3/dladdr.3.html"""

    _fields_ = [
        ("file", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("name", ctypes.c_char_p),
        ("address", ctypes.c_void_p),
    ]


def file_of(function: Any) -> str:
    """The path of the library that contains `function`, with links resolved; empty where the loader knows none."""
    symbol = _Symbol()
    found = ctypes.CDLL(None).dladdr(ctypes.cast(function, ctypes.c_void_p), ctypes.byref(symbol))
    return os.path.realpath(os.fsdecode(symbol.file)) if found and symbol.file else ""


def dotted(number: int) -> str:
    """A version number as text: 2.30.7 for NCCL's 23007, 9.26.0 for cuDNN's 92600.

    Source: https://github.com/NVIDIA/nccl/blob/master/src/nccl.h.in (NCCL_VERSION)
    """
    return f"{number // 10000}.{number % 10000 // 100}.{number % 100}"


if __name__ == "__main__":
    print(json.dumps(versions()))
