"""Prints as JSON the space in the folder that is its one argument, and whether a file can be written there.

It runs in its own process: a call to a file system that is gone does not return, and can't be interrupted.
"""

import json
import os
import sys
import tempfile
from typing import Any

BYTES = 64 * 1024
"""Bytes that are written: more than a file system stores in a directory entry or inode."""


def measure(folder: str) -> dict[str, Any]:
    """`folder` or its nearest existing parent as `path`; its `size` and `free` bytes; `trouble` if writing fails."""
    path = os.path.abspath(folder)
    while not os.path.lexists(path):
        path = os.path.dirname(path)
    found: dict[str, Any] = {"path": path}
    try:
        state = os.statvfs(path)
        # A file system that reports 0 blocks has no limit, or does not report it.
        if state.f_blocks:
            found |= {"size": state.f_blocks * state.f_frsize, "free": state.f_bavail * state.f_frsize}
        with tempfile.TemporaryFile(dir=path) as file:
            file.write(bytes(BYTES))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        found["trouble"] = error.strerror or str(error)
    return found


if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[1])))
