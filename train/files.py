"""Files that are whole or not there."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO


def write_atomically(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Puts what `write` writes at `path`, in one move after it has reached the disk.

    What stood there before stays until then; when writing fails, nothing is left behind.
    """
    partial = path.with_name(f".{path.name}.partial")
    try:
        with partial.open("wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
        sync_folder(path.parent)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def write_text(path: Path, text: str) -> None:
    """Puts `text` at `path`, whole or not at all."""
    write_atomically(path, lambda file: file.write(text.encode()))


def sync_folder(folder: Path) -> None:
    """Makes the names in `folder` survive a crash, on file systems that can."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError:
        pass  # some network file systems have no such call for folders
    finally:
        os.close(descriptor)
