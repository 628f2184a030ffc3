"""The one kind of error that a user sees: what is wrong, what was seen, what to do."""

USER_MUST_CHANGE = 2
FAILED = 1
PREEMPTED = 75

RESUME = "--resume goes on from the last checkpoint"
"""What mends a run whose processes were ended from outside."""


class MusterError(Exception):
    """A condition that the user, or the job script, can mend.

    Args:
        wrong: what is wrong, one sentence.
        seen: the variable, option or file, with the value it had.
        fix: the line to type, or to put into the job script.
        code: the process's exit code: 2 when the user must change something, 1 when the run failed.
    """

    def __init__(self, wrong: str, *, seen: str, fix: str, code: int = USER_MUST_CHANGE) -> None:
        super().__init__(wrong)
        self.wrong = wrong
        self.seen = seen
        self.fix = fix
        self.code = code

    def __str__(self) -> str:
        return f"error: {one_line(self.wrong)}\n seen: {one_line(self.seen)}\n  fix: {one_line(self.fix)}"


def one_line(text: str) -> str:
    """`text` on one line: a value from the environment must not add lines, or escape codes, to a message."""
    return "".join(character if character.isprintable() else repr(character)[1:-1] for character in text)
