"""Prints as JSON what is loaded when torch is: `python -P -m muster.check.versions`.

What a wheel's file name or a constant in torch says need not be what runs: LD_PRELOAD, or a file bound over it,
replaces NCCL. So the loaded library is asked.
"""

import ctypes
import json
import os
import platform
from pathlib import Path
from typing import Any

from muster.paths import installed


def versions() -> dict[str, Any]:
    """The versions of what this process has loaded, by name; None for what torch was built without."""
    # Here and not above: what asks for the file of a function need not wait for torch.
    import torch

    try:
        cudnn = torch.backends.cudnn.version() if torch.version.cuda else None
    except RuntimeError:
        # An older one is loaded than torch was built with: torch refuses to use it.
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

    # As the loader resolves torch's own calls: what is visible to all comes first, and so does what LD_PRELOAD names;
    # then what libtorch_cuda.so brings with it.
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
    """Dl_info. Source: https://man7.org/linux/man-pages/man3/dladdr.3.html"""

    _fields_ = [
        ("file", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("name", ctypes.c_char_p),
        ("address", ctypes.c_void_p),
    ]


def file_of(function: Any) -> str:
    """The path of the library that `function` is from, after all links; empty where the loader does not tell."""
    symbol = _Symbol()
    found = ctypes.CDLL(None).dladdr(ctypes.cast(function, ctypes.c_void_p), ctypes.byref(symbol))
    return os.path.realpath(os.fsdecode(symbol.file)) if found and symbol.file else ""


def dotted(number: int) -> str:
    """2.30.7 for NCCL's 23007, 9.26.0 for cuDNN's 92600.

    Source: https://github.com/NVIDIA/nccl/blob/master/src/nccl.h.in (NCCL_VERSION)
    """
    return f"{number // 10000}.{number % 10000 // 100}.{number % 100}"


if __name__ == "__main__":
    print(json.dumps(versions()))
