"""How far something that takes minutes is, said on stderr now and then."""

import sys
import time

EVERY_S = {True: 0.5, False: 15.0}
"""Seconds between two words, on a terminal and in a log file."""


class Progress:
    """Says how many of so many bytes are done.

    Args:
        what: what is done with them ("packed").
    """

    def __init__(self, what: str, total: int, *, enabled: bool = True) -> None:
        self.what, self.total, self.enabled = what, total, enabled
        self.on_terminal = sys.stderr.isatty()
        self.started = time.monotonic()
        self.due = self.started + EVERY_S[self.on_terminal]

    def show(self, done: int, more: str = "") -> None:
        """Says that `done` bytes are done, where it is time to."""
        if not self.enabled or time.monotonic() < self.due:
            return
        self.due = time.monotonic() + EVERY_S[self.on_terminal]
        self.say(done, more, end="\r" if self.on_terminal else "\n")

    def end(self, done: int, more: str = "") -> None:
        """Says how it ended."""
        if self.enabled:
            self.say(done, more, end="\n")

    def say(self, done: int, more: str, end: str) -> None:
        """Says it."""
        seconds = time.monotonic() - self.started
        rate = f", {done / 1e6 / seconds:,.0f} MB/s" if seconds > 0.1 else ""
        share = done / self.total if self.total else 1.0
        unit, size = ("GB", 1e9) if self.total >= 1e9 else ("MB", 1e6)
        line = f"{self.what} {done / size:,.2f} of {self.total / size:,.2f} {unit} ({share:.0%}{rate}){more}"
        print(line, end=end, file=sys.stderr, flush=True)
