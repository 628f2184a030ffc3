"""The one kind of error that a user sees (what is wrong, what was seen, what to do), exit codes, and notices."""

import os
import sys
from collections.abc import Generator, Mapping
from contextlib import contextmanager, suppress
from enum import IntEnum
from typing import Any


class ExitCode(IntEnum):
    """How a command ends."""

    DONE = 0
    FAILED = 1
    USER_MUST_CHANGE = 2
    """The user, or the job script, has to change something first."""
    PREEMPTED = 75
    """Stopped early, with a checkpoint: the same job can go on later. The value is EX_TEMPFAIL of sysexits.h."""
    INTERRUPTED = 130
    """Ctrl-C, as a shell has it."""


RESUME = "--resume goes on from the last checkpoint"
"""What mends a run whose processes were ended from outside."""


MOST_TEXT = 1000
"""Characters of a sentence, and of what was seen: a variable may have 100,000."""


class MusterError(Exception):
    """A condition that the user, or the job script, can mend.

    Args:
        wrong: what is wrong, one sentence.
        seen: the variable, option or file, with the value it had.
        fix: the line to type, or to put into the job script.
        code: the process's exit code: 2 when the user must change something, 1 when the run failed.
    """

    def __init__(self, wrong: str, *, seen: str, fix: str, code: int = ExitCode.USER_MUST_CHANGE) -> None:
        super().__init__(wrong)
        self.wrong = wrong
        self.seen = seen or "''"  # an empty word, as of a variable that is not set
        self.fix = fix
        self.code = code

    @property
    def parts(self) -> dict[str, Any]:
        """What another process makes the error of; more of a text than is left here is shown nowhere."""
        texts = {"wrong": self.wrong, "seen": self.seen, "fix": self.fix}
        return {name: text[: MOST_TEXT + 1] for name, text in texts.items()} | {"code": int(self.code)}

    def __str__(self) -> str:
        wrong, seen = (text if len(text) <= MOST_TEXT else f"{text[:MOST_TEXT]}..." for text in (self.wrong, self.seen))
        return f"error: {one_line(wrong)}\n seen: {one_line(seen)}\n  fix: {one_line(self.fix)}"


@contextmanager
def explaining(wrong: str, *, seen: object, fix: str, code: int = ExitCode.USER_MUST_CHANGE) -> Generator[None]:
    """A context in which an OSError, or text that is no UTF-8, is a MusterError: what is `wrong`, with the reason."""
    try:
        yield
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise MusterError(f"{wrong}: {reason}", seen=str(seen), fix=fix, code=code) from error


def one_line(text: str) -> str:
    """`text` on one line: a value from the environment must not add lines, or escape codes, to a message."""
    return "".join(character if character.isprintable() else repr(character)[1:-1] for character in text)


def notify(text: object) -> None:
    """Prints lines for the user. A full disk, or a reader that is gone, must not change how a process ends."""
    with suppress(OSError):
        print(text, file=sys.stderr, flush=True)


@contextmanager
def notify_if_slow(what: str, *, is_shown: bool = True, after_s: float = 1.0) -> Generator[None]:
    """A context that prints `what` is being done, should it take longer than `after_s` seconds.

    Args:
        what: a few words, such as "loading PyTorch".
        is_shown: False on all ranks but the one that prints.
        after_s: how long nothing is printed; by default as long as nobody asks whether a command hangs.
    """
    import threading  # here and not above: a launch has no use for it

    def show() -> None:
        with suppress(ValueError):  # of a stream that is closed
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
"""Set by a job script that puts its job back into the queue after exit code 75: how often, at most."""


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
    """The exit code of a launch: 1 in place of 75 where the job must not go back into the queue again. A line says so.

    Args:
        code: how the training ended.
        env: the launch's variables.
        prints: whether this process prints the line: one of the launch's does.
    """
    if code != ExitCode.PREEMPTED or not env.get(MAX_REQUEUES):
        return code
    attempt, most = whole_number(env, ATTEMPT), whole_number(env, MAX_REQUEUES)
    is_last = attempt >= most
    if prints:
        what = "was the last one" if is_last else "ends with 75, by which the job script asks for the next"
        notify(f"muster: attempt {attempt + 1} of {most + 1} {what} ({MAX_REQUEUES}={most})")
    return ExitCode.FAILED if is_last else code
