"""Prints as JSON how much room a folder has, and whether a file can be written there: its one argument.

A process of its own: a file system that is gone answers no call, and what waits for it can't be ended.
"""

import json
import os
import sys
import tempfile
from typing import Any

BYTES = 64 * 1024
"""As much is written: more than a file system hides in an entry of a folder."""


def measure(folder: str) -> dict[str, Any]:
    """The nearest `path` of `folder` that exists, its bytes, and the `trouble` of writing there."""
    path = os.path.abspath(folder)
    while not os.path.lexists(path):
        path = os.path.dirname(path)
    found: dict[str, Any] = {"path": path}
    try:
        state = os.statvfs(path)
        # A file system that counts no blocks has no limit of them, or does not tell.
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
