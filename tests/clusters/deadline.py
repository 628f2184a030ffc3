"""Waiting with a deadline: nothing in the cluster tests sleeps blindly or waits for ever."""

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def wait_for(what: str, condition: Callable[[], T | None], timeout_s: float, interval_s: float = 0.05) -> T:
    """The first true value of `condition`.

    Args:
        what: What is waited for, as the error says it: "node01 to be idle".
        condition: Called again and again; what it raises is not caught, so it can end the wait early.

    Raises:
        TimeoutError: It was never true; the message has `what` and the last value.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        # The clock is read before the call: on a busy machine the condition gets one look after the deadline, too.
        expired = time.monotonic() >= deadline
        value = condition()
        if value:
            return value
        if expired:
            raise TimeoutError(f"waited {timeout_s:g} s for {what}; last seen: {value!r}")
        time.sleep(interval_s)
