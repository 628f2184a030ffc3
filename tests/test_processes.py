"""Programs that are run with a deadline."""

import subprocess
import time

import pytest

from muster import processes


def test_what_does_not_end_is_given_up() -> None:
    """A process in another session keeps the pipe open, like a child that not even SIGKILL ends."""
    started = time.monotonic()
    with pytest.raises(subprocess.TimeoutExpired):
        processes.run(["sh", "-c", "setsid sleep 8 & wait"], timeout_s=0.3)
    assert time.monotonic() - started < 5


def test_what_was_said_and_how_it_ended() -> None:
    done = processes.run(["sh", "-c", "echo $X; echo no >&2; exit 3"], env={"X": "yes"}, timeout_s=30)
    assert (done.returncode, done.stdout, done.stderr) == (3, "yes\n", "no\n")
