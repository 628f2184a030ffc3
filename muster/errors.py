"""The one kind of error that a user sees: what is wrong, what was seen, what to do."""

from enum import IntEnum


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
        self.seen = seen
        self.fix = fix
        self.code = code

    def __str__(self) -> str:
        wrong, seen = (text if len(text) <= MOST_TEXT else f"{text[:MOST_TEXT]}..." for text in (self.wrong, self.seen))
        return f"error: {one_line(wrong)}\n seen: {one_line(seen)}\n  fix: {one_line(self.fix)}"


def one_line(text: str) -> str:
    """`text` on one line: a value from the environment must not add lines, or escape codes, to a message."""
    return "".join(character if character.isprintable() else repr(character)[1:-1] for character in text)
