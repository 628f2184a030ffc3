"""Waiting for a condition, with a deadline: the cluster tests do this in place of sleeping for a guessed time."""

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def wait_for(what: str, condition: Callable[[], T | None], timeout_s: float, interval_s: float = 0.05) -> T:
    """Waits until `condition` returns a true value; returns that value.

    Args:
        what: The condition in words, for the error message: "node01 to be idle".
        condition: Called repeatedly; its exceptions are not caught, so that it can end the wait early.

    Raises:
        TimeoutError: It was never true; the message has `what` and the last value.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        # The clock is read before the call: on a busy machine the condition is checked once after the deadline, too.
        expired = time.monotonic() >= deadline
        value = condition()
        if value:
            return value
        if expired:
            raise TimeoutError(f"waited {timeout_s:g} s for {what}; last seen: {value!r}")
        time.sleep(interval_s)
