"""Lines that tell why nothing is to be seen."""

import sys
import threading
from collections.abc import Generator
from contextlib import contextmanager, suppress

SILENCE_S = 1.0
"""For so long nobody asks whether a command hangs."""


@contextmanager
def said_if_slow(what: str, *, is_said: bool = True) -> Generator[None]:
    """A context that says `what` is being done, should it take longer than SILENCE_S.

    Args:
        what: a few words, such as "loading PyTorch".
        is_said: False on all ranks but the one that speaks.
    """

    def say() -> None:
        with suppress(OSError, ValueError):
            print(f"muster: {what} ...", file=sys.stderr, flush=True)

    timer = threading.Timer(SILENCE_S, say)
    timer.daemon = True
    if is_said:
        timer.start()
    try:
        yield
    finally:
        timer.cancel()
