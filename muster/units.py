"""Numbers and lists as people read them."""

import math
import re
from collections.abc import Iterable

NONE = "-"
"""The text for an unknown value."""

MAX_LISTED = 4
"""The number of names that are listed before the rest is only counted."""


def quantity(value: float | None) -> str:
    """A number in four digits, thousands set apart, with M, G, T or P where it is large."""
    if value is None:
        return NONE
    for size, letter in ((1e15, " P"), (1e12, " T"), (1e9, " G"), (1e6, " M")):
        if size <= abs(value) < 1e18:
            return f"{value / size:.4g}{letter}"
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e6 else f"{value:.4g}"


def count(value: float | None) -> str:
    """A whole number, thousands set apart."""
    return NONE if value is None else f"{value:,.0f}"


def plural(number: int, noun: str) -> str:
    """1 node, 2 nodes, 2 processes."""
    ending = "" if number == 1 else "es" if noun.endswith("s") else "s"
    return f"{number} {noun}{ending}"


def listed(values: Iterable[object], most: int = MAX_LISTED, between: str = ", ") -> str:
    """The distinct `values` in a few words: "a, b, c, d and 5 more"; None and empty ones are left out."""
    names = list(dict.fromkeys(str(value) for value in values if value not in (None, "")))
    # One too many is shown as it is: to say "and 1 more" takes as much room.
    if len(names) <= most + 1:
        return between.join(names)
    return f"{between.join(names[:most])} and {len(names) - most} more"


def perplexity(loss: float) -> float:
    """The perplexity of a mean cross-entropy `loss` in nats: its exponential."""
    return math.exp(min(loss, 700.0))  # a larger one has no floating-point number


def percent(value: float | None, digits: int = 1) -> str:
    """A fraction of 1, in percent."""
    return NONE if value is None else f"{value:.{digits}%}"


def duration(value: float | None) -> str:
    """A time in seconds, in units that fit its size: 11.7 ms, 1.67 s, 3 min 20 s, 2 h 05 min."""
    if value is None:
        return NONE
    if abs(value) < 0.9995:  # which three digits would round to 1e+03
        return f"{value * 1e3:.3g} ms"
    if abs(value) < 59.995:
        return f"{value:.2f} s"
    if (whole := round(value)) < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def memory(value: float | None) -> str:
    """An amount of memory in GiB, with the unit."""
    return NONE if value is None else f"{value:.{2 if value < 10 else 1}f} GiB"


def by_numbers(text: str) -> list[tuple[int, int, str]]:
    """A sort key that compares the numbers in names by value: ib2 comes before ib10, GLIBC_2.9 before GLIBC_2.34."""
    return [(0, int(part), "") if part.isdecimal() else (1, 0, part) for part in re.split("([0-9]+)", text) if part]
