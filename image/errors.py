"""Running a program whose failure becomes an error of three lines, and a command line whose errors are such."""

import argparse
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from train.errors import MusterError


class Parser(argparse.ArgumentParser):
    """A parser whose complaints are the three lines of an error."""

    def error(self, message: str) -> NoReturn:
        """Raises MusterError in place of an exit."""
        raise MusterError(message, seen=shlex.join(sys.argv[1:]), fix="make help lists what may be given")


def run(argv: Sequence[Any], **options: Any) -> subprocess.CompletedProcess[str]:
    """The ended program, its output on this terminal.

    Raises:
        MusterError: it is not there, failed, or took longer than the `timeout` that it was given.
    """
    words = [str(word) for word in argv]
    try:
        ended = subprocess.run(words, text=True, check=False, **options)
    except OSError as reason:
        raise MusterError(f"{words[0]} can't be started", seen=str(reason.strerror), fix="install it") from None
    except subprocess.TimeoutExpired as late:
        raise MusterError(
            f"{words[0]} did not end in time",
            seen=f"waited {late.timeout:.0f} s for {shlex.join(words[:6])}",
            fix="see what it waits for, the network most often, and try again",
        ) from None
    if ended.returncode:
        raise MusterError(
            f"{words[0]} failed with exit code {ended.returncode}",
            seen=f"{shlex.join(words[:6])}{' ...' if len(words) > 6 else ''} {_last_line(ended.stderr)}".rstrip(),
            fix="read its messages above" if ended.stderr is None else "mend what it names, and try again",
        )
    return ended


def output(argv: Sequence[Any], **options: Any) -> str:
    """What the program prints, without the last line's end.

    Raises:
        MusterError: it failed.
    """
    return run(argv, capture_output=True, **options).stdout.strip()


def succeeds(argv: Sequence[Any], timeout_s: float = 60) -> bool:
    """Whether the program is there and ends with 0 within `timeout_s`; what it prints is dropped."""
    try:
        return not subprocess.run([str(word) for word in argv], capture_output=True, timeout=timeout_s).returncode
    except (OSError, subprocess.TimeoutExpired):
        return False


def command(main: Callable[[Sequence[str]], None], argv: Sequence[str] | None = None) -> NoReturn:
    """Runs `main` and exits: 0, 2 with three lines on stderr, or 130 where the user interrupted it."""
    try:
        main(sys.argv[1:] if argv is None else argv)
    except MusterError as error:
        print(error, file=sys.stderr)
        sys.exit(error.code)
    except KeyboardInterrupt:
        sys.exit(130)
    sys.exit(0)


def _last_line(text: str | None) -> str:
    lines = (text or "").strip().splitlines()
    return f"-> {lines[-1][:300]}" if lines else ""
