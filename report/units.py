"""Numbers as people read them."""

import math

NONE = "-"


def rate(value: float | None) -> str:
    """Images, tokens or FLOP a second: three to four digits, thousands set apart."""
    if value is None:
        return NONE
    for size, letter in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M")):
        if abs(value) >= size:
            return (
                f"{value / size:,.{0 if abs(value) >= 1e3 * size else 1 if abs(value) >= 100 * size else 2}f} {letter}"
            )
    return f"{value:,.{0 if abs(value) >= 1000 else 1 if abs(value) >= 10 else 2}f}"


def share(value: float | None) -> str:
    """A part of 1, in percent."""
    return NONE if value is None else f"{value:.1%}".replace("%", " %")


def accuracy(value: float | None) -> str:
    """A share of right answers: models differ in its last digits."""
    return NONE if value is None else f"{value:.2%}".replace("%", " %")


def seconds(value: float | None) -> str:
    """A short time, in the unit that reads well."""
    if value is None:
        return NONE
    if abs(value) >= 1:
        return f"{value:.2f} s"
    return f"{value * 1e3:.{1 if abs(value) >= 0.001 else 3}f} ms"


def duration(value: float | None) -> str:
    """A long time: 42 s, 3 min 20 s, 2 h 05 min."""
    if value is None:
        return NONE
    whole = round(value)
    if whole < 60:
        return f"{value:.1f} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def memory(value: float | None) -> str:
    """GiB."""
    return NONE if value is None else f"{value:.{2 if value < 10 else 1}f} GiB"


def loss(value: float | None) -> str:
    """A loss: four digits after the point, or as many as a small one needs."""
    if value is None:
        return NONE
    return f"{value:.4f}" if value == 0 or abs(value) >= 0.001 else f"{value:.2e}"


def count(value: float | None) -> str:
    """A whole number, thousands set apart."""
    return NONE if value is None else f"{value:,.0f}"


def parameters(value: float | None) -> str:
    """Numbers of weights, in millions or billions."""
    if value is None:
        return NONE
    return f"{value / 1e9:.2f} B" if value >= 1e9 else f"{value / 1e6:.1f} M"


def plain(value: float) -> str:
    """A number on an axis, short."""
    if value == 0:
        return "0"
    for size, letter in ((1e15, " P"), (1e12, " T"), (1e9, " G"), (1e6, " M")):
        if abs(value) >= size:
            return f"{value / size:g}{letter}"
    if abs(value) >= 1000:
        return f"{value:,.6g}" if value % 1 else f"{value:,.0f}"
    return f"{value:.6g}" if abs(value) >= 1e-3 else f"{value:.0e}"


def is_apart(low: float, high: float) -> bool:
    """Whether `high` is so far above `low` that an axis can show both: ticks have 12 digits."""
    return 1e-9 * max(abs(low), abs(high), 1e-290) < high - low < math.inf


def ticks(low: float, high: float, at_most: int = 6) -> list[float]:
    """Round numbers from at or below `low` to at or above `high`, evenly apart; `low` alone where they are as one."""
    span = high - low
    if not is_apart(low, high):
        return [low]
    power = 10.0 ** math.floor(math.log10(span / at_most))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10, 20) if span / (power * factor) <= at_most)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    # By a product and not by sums: 0.1 added up ten times is not 1.
    return [float(f"{index * step:.12g}") for index in range(first, last + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Round numbers between `low` and `high`, both above 0, for an axis of equal ratios."""
    for factors in (
        (1,),
        (1, 3),
        (1, 2, 5),
        (1, 1.5, 2, 3, 5, 7),
        (1, 1.2, 1.4, 1.6, 1.8, 2, 2.5, 3, 3.5, 4, 5, 6, 7, 8, 9),
    ):
        powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        found = [float(f"{factor * 10.0**power:.12g}") for power in powers for factor in factors]
        found = [value for value in found if low <= value <= high]
        if len(found) >= 4:
            return found[:: math.ceil(len(found) / 6)]
    found = [value for value in ticks(low, high, 5) if low <= value <= high]
    return found if len(found) > 1 else [low, high]
