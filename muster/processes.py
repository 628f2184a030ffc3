"""Running other programs, with a time limit that holds in any case."""

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress

import psutil

REAP_S = 1.0


def kill_descendants() -> None:
    """Kills all child processes of this one, and their descendants."""
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            process.kill()


def how_ended(exitcode: int) -> str:
    """The end of a process in words: by a signal, or with a code."""
    if exitcode >= 0:
        return f"ended with exit code {exitcode}"
    try:
        return f"was ended by {signal.Signals(-exitcode).name}"
    except ValueError:
        return f"was ended by signal {-exitcode}"


def run(
    command: Sequence[str], *, timeout_s: float, env: Mapping[str, str] | None = None, errors: str = "replace",
    captures: bool = True,
) -> "subprocess.CompletedProcess[str]":  # fmt: skip
    """Runs `command`; returns its exit code and, where `captures`, its output.

    Unlike `subprocess.run` it does not wait for a child that a driver or a dead file system holds in an uninterruptible
    sleep, which not even SIGKILL ends. A terminal's Ctrl-C reaches only this process, which then kills its child.

    Raises:
        subprocess.TimeoutExpired: it did not end within `timeout_s`.
        OSError: it can't be started.
    """
    stream = subprocess.PIPE if captures else None
    child = subprocess.Popen(
        command, env=env, stdin=subprocess.DEVNULL, stdout=stream, stderr=stream, text=True, errors=errors,
        start_new_session=True,
    )  # fmt: skip
    try:
        stdout, stderr = child.communicate(timeout=timeout_s)
    except BaseException:
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            child.wait(REAP_S)
        raise
    return subprocess.CompletedProcess(list(command), child.returncode, stdout, stderr)
