"""Numbers as people read them."""

import math
import re

NONE = "-"
"""What is not known."""


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


def plural(number: int, word: str, ending: str = "s") -> str:
    """ "1 node", "2 nodes"."""
    return f"{number} {word}{'' if number == 1 else ending}"


def processes(number: int) -> str:
    """1 process, 2 processes."""
    return plural(number, "process", "es")


def perplexity(loss: float) -> float:
    """The number of tokens between which a model with this mean cross-entropy `loss`, in nats, could be choosing."""
    return math.exp(min(loss, 700.0))  # a larger one has no floating-point number


def percent(value: float | None, digits: int = 1) -> str:
    """A part of 1, in percent."""
    return NONE if value is None else f"{value:.{digits}%}"


def duration(value: float | None) -> str:
    """A time in seconds, as it reads well: 11.7 ms, 1.67 s, 3 min 20 s, 2 h 05 min."""
    if value is None:
        return NONE
    if abs(value) < 0.9995:  # which three digits would round to 1e+03
        return f"{value * 1e3:.3g} ms"
    if abs(value) < 59.995:
        return f"{value:.2f} s"
    whole = round(value)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def memory(value: float | None) -> str:
    """GiB."""
    return NONE if value is None else f"{value:.{2 if value < 10 else 1}f} GiB"


def by_numbers(text: str) -> list[tuple[int, int, str]]:
    """A key by which people sort: ib2 comes before ib10, GLIBC_2.9 before GLIBC_2.34."""
    parts = re.split("([0-9]+)", text)
    return [(0, int(part), "") if part.isdecimal() else (1, 0, part) for part in parts if part]
