"""Records which lines a Python process runs, and for which test, in the copies that tests/mutants.py measures.

coverage.py records them. Its contexts are tests, or fixtures that several tests share: tests/reached_plugin.py names
the one that runs. A process that is killed leaves no record.
"""

import atexit
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import coverage

DATA = "coverage"
NOW = "now"
"""The file in the measurement's folder that names the test, or the fixture, that runs now."""

ENDS = ("_exit", "execv", "execve", "execvp", "execvpe")
"""Functions of `os` after which nothing of this process runs."""

running: coverage.Coverage | None = None


def measure(folder: str, files: list[str]) -> None:
    """Records the lines of `files` that this process runs from now on, and those that its forks run."""
    start(folder, files)
    os.register_at_fork(after_in_child=lambda: start(folder, files))
    atexit.register(save)
    for name in ENDS:
        setattr(os, name, saving(getattr(os, name), folder, files))


def start(folder: str, files: list[str]) -> None:
    global running
    if running is not None:
        running.stop()  # the parent records its own lines
    now = Path(folder) / NOW
    running = coverage.Coverage(
        data_file=str(Path(folder) / DATA),
        data_suffix=f"{os.getpid()}.{os.urandom(4).hex()}",
        config_file=False,
        include=files,
        messages=False,
    )
    # A process that runs none of these files would print a warning on stderr, which tests check.
    running.set_option("run:disable_warnings", ["no-data-collected"])
    running.start()
    if now.exists():
        running.switch_context(now.read_text())


def save() -> None:
    global running
    if running is not None:
        ended, running = running, None
        ended.stop()
        ended.save()


def saving(end: Callable[..., Any], folder: str, files: list[str]) -> Callable[..., Any]:
    """`end`, which first saves the recorded lines."""

    def save_and_end(*arguments: Any) -> Any:
        save()
        try:
            return end(*arguments)
        finally:
            start(folder, files)  # the exec failed, and this process goes on

    return save_and_end
