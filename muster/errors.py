"""The one kind of error that users see (what is wrong, what was seen, how to fix it), exit codes, and notices."""

import os
import sys
from collections.abc import Generator, Mapping
from contextlib import contextmanager, suppress
from enum import IntEnum
from typing import Any


class ExitCode(IntEnum):
    """The exit codes of all commands."""

    DONE = 0
    FAILED = 1
    USER_MUST_CHANGE = 2
    """The user, or the job script, has to change something first."""
    PREEMPTED = 75
    """Stopped early, with a checkpoint: the same job can go on later. The value is EX_TEMPFAIL of sysexits.h."""
    INTERRUPTED = 130
    """Ended by Ctrl-C: 128 + SIGINT, as in a shell."""


RESUME = "--resume goes on from the last checkpoint"
"""The advice for a run whose processes were ended from outside."""


MAX_TEXT = 1000
"""The most characters that are shown of `wrong`, and of `seen`: a variable may have 100,000."""


class MusterError(Exception):
    """An error that the user can fix, for instance on the command line or in the job script.

    Args:
        wrong: what is wrong, one sentence.
        seen: the variable, option or file, with the value it had.
        fix: the line to type, or to put into the job script.
        code: the process's exit code: 2 when the user must change something, 1 when the run failed.
    """

    def __init__(self, wrong: str, *, seen: str, fix: str, code: int = ExitCode.USER_MUST_CHANGE) -> None:
        super().__init__(wrong)
        self.wrong = wrong
        self.seen = seen or "''"  # an empty value, such as that of an unset variable
        self.fix = fix
        self.code = code

    @property
    def parts(self) -> dict[str, Any]:
        """The fields to make the error again in another process; texts are cut to MAX_TEXT + 1, as no more is shown."""
        texts = {"wrong": self.wrong, "seen": self.seen, "fix": self.fix}
        return {name: text[: MAX_TEXT + 1] for name, text in texts.items()} | {"code": int(self.code)}

    def __str__(self) -> str:
        wrong, seen = (text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]}..." for text in (self.wrong, self.seen))
        return f"error: {one_line(wrong)}\n seen: {one_line(seen)}\n  fix: {one_line(self.fix)}"


@contextmanager
def explaining(wrong: str, *, seen: object, fix: str, code: int = ExitCode.USER_MUST_CHANGE) -> Generator[None]:
    """A context that turns an OSError or a UnicodeError into a MusterError: what is `wrong`, and the reason."""
    try:
        yield
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise MusterError(f"{wrong}: {reason}", seen=str(seen), fix=fix, code=code) from error


def one_line(text: str) -> str:
    """`text` on one line: a value from the environment must not add lines, or escape codes, to a message."""
    return "".join(character if character.isprintable() else repr(character)[1:-1] for character in text)


def notify(text: object) -> None:
    """Prints `text` to standard error. A full disk, or a closed pipe, must not change how a process ends."""
    with suppress(OSError):
        print(text, file=sys.stderr, flush=True)


@contextmanager
def notify_if_slow(what: str, *, is_shown: bool = True, after_s: float = 1.0) -> Generator[None]:
    """A context that prints `what` is being done if it takes longer than `after_s` seconds.

    Args:
        what: a few words, such as "loading PyTorch".
        is_shown: False on all ranks but the one that prints.
        after_s: seconds until the line is printed; by default few enough that nobody takes the command for hung.
    """
    import threading  # here and not above: a launch has no use for it

    def show() -> None:
        with suppress(ValueError):  # standard error is closed
            notify(f"muster: {what} ...")

    timer = threading.Timer(after_s, show)
    timer.daemon = True
    if is_shown:
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


ATTEMPT = "MUSTER_ATTEMPT"
"""How often the job was started before, from 0."""
MAX_REQUEUES = "MUSTER_MAX_REQUEUES"
"""The most requeues, set by a job script that puts its job back into the queue after exit code 75."""


def whole_number(env: Mapping[str, str], name: str) -> int:
    """The number in a variable; 0 where it is not set, or empty.

    Raises:
        MusterError: it holds something else.
    """
    text = env.get(name) or "0"
    if not (text.isascii() and text.isdecimal() and len(text) < 10):
        raise MusterError(f"{name} is no number", seen=f"{name}={text}", fix=f"export {name}=10, or leave it out")
    return int(text)


def code_for_job(code: int, env: Mapping[str, str] = os.environ, *, prints: bool = True) -> int:
    """The exit code of a launch: `code`, but 1 in place of 75 where the job may not be requeued any more.

    Args:
        code: the exit code of the training.
        env: the launch's variables.
        prints: whether to print a line on the attempts so far: one process of the launch does.
    """
    if code != ExitCode.PREEMPTED or not env.get(MAX_REQUEUES):
        return code
    attempt, most = whole_number(env, ATTEMPT), whole_number(env, MAX_REQUEUES)
    is_last = attempt >= most
    if prints:
        what = "was the last one" if is_last else "ends with 75, on which the job script requeues the job"
        notify(f"muster: attempt {attempt + 1} of {most + 1} {what} ({MAX_REQUEUES}={most})")
    return ExitCode.FAILED if is_last else code
