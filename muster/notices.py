"""Lines for the user while nothing else is to be seen."""

import threading
from collections.abc import Generator
from contextlib import contextmanager, suppress

from muster import errors

SILENCE_S = 1.0
"""For so long nobody asks whether a command hangs."""


@contextmanager
def notice_if_slow(what: str, *, is_shown: bool = True, after_s: float = SILENCE_S) -> Generator[None]:
    """A context that prints `what` is being done, should it take longer than `after_s` seconds.

    Args:
        what: a few words, such as "loading PyTorch".
        is_shown: False on all ranks but the one that prints.
        after_s: how long nothing is printed.
    """

    def show() -> None:
        with suppress(ValueError):
            errors.notify(f"muster: {what} ...")

    timer = threading.Timer(after_s, show)
    timer.daemon = True
    if is_shown:
        timer.start()
    try:
        yield
    finally:
        timer.cancel()
