"""Numbers as text."""

from collections.abc import Callable

import pytest

from muster import units


@pytest.mark.parametrize(
    ("write", "value", "said"),
    [
        (units.quantity, 2470.4, "2,470"),
        (units.quantity, 318.39, "318.4"),
        (units.quantity, 1.23456, "1.235"),
        (units.quantity, 0.00001234, "1.234e-05"),
        (units.quantity, 9.89e14, "989 T"),
        (units.quantity, None, "-"),
        (units.count, 1281167, "1,281,167"),
        (units.duration, 0.0117, "11.7 ms"),
        (units.duration, 0.00042, "0.42 ms"),
        (units.duration, 8.64, "8.64 s"),
        (units.duration, 200, "3 min 20 s"),
        (units.duration, 7500, "2 h 05 min"),
        (units.percent, 0.577, "57.7%"),
        (units.memory, 1.026, "1.03 GiB"),
    ],
)
def test_numbers_read_well(write: Callable[[float | None], str], value: float | None, said: str) -> None:
    assert write(value) == said


@pytest.mark.parametrize(("text", "number"), [("0", 0), ("007", 7), ("1000000", 1_000_000)])
def test_whole_numbers(text: str, number: int) -> None:
    assert units.whole_number(text) == number


@pytest.mark.parametrize(
    "text", ["", "-1", "+1", " 1", "1 ", "1_0", "1.0", "x", "\u0663", "1000001", "9" * 18, "9" * 5000]
)
def test_what_is_no_whole_number_or_too_large(text: str) -> None:
    assert units.whole_number(text) is None
