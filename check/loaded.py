"""Which file a loaded function is from: what a name promises need not be what the loader found."""

import ctypes
import os
from typing import Any


class _Symbol(ctypes.Structure):
    """Dl_info of dladdr(3)."""

    _fields_ = [
        ("file", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("name", ctypes.c_char_p),
        ("address", ctypes.c_void_p),
    ]


def file_of(function: Any) -> str:
    """The path of the library that `function` is from, after all links; empty where the loader does not tell."""
    symbol = _Symbol()
    address = ctypes.cast(function, ctypes.c_void_p)
    found = ctypes.CDLL(None).dladdr(address, ctypes.byref(symbol))
    return os.path.realpath(os.fsdecode(symbol.file)) if found and symbol.file else ""
