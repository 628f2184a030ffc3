"""Lines that tell why nothing is to be seen."""

import threading
from collections.abc import Generator
from contextlib import contextmanager, suppress

from muster import errors

SILENCE_S = 1.0
"""For so long nobody asks whether a command hangs."""


@contextmanager
def said_if_slow(what: str, *, is_said: bool = True, after_s: float = SILENCE_S) -> Generator[None]:
    """A context that says `what` is being done, should it take longer than `after_s` seconds.

    Args:
        what: a few words, such as "loading PyTorch".
        is_said: False on all ranks but the one that speaks.
        after_s: how long nothing is said.
    """

    def say() -> None:
        with suppress(ValueError):
            errors.say(f"muster: {what} ...")

    timer = threading.Timer(after_s, say)
    timer.daemon = True
    if is_said:
        timer.start()
    try:
        yield
    finally:
        timer.cancel()
