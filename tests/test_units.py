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
        (units.quantity, 5.184e21, "5.184e+21"),
        (units.quantity, None, "-"),
        (units.count, 1281167, "1,281,167"),
        (units.duration, 0.0117, "11.7 ms"),
        (units.duration, 0.00042, "0.42 ms"),
        (units.duration, 0.9994, "999 ms"),
        (units.duration, 0.9996, "1.00 s"),
        (units.duration, 8.64, "8.64 s"),
        (units.duration, 59.997, "1 min 00 s"),
        (units.duration, 200, "3 min 20 s"),
        (units.duration, 7500, "2 h 05 min"),
        (units.percent, 0.577, "57.7%"),
        (units.memory, 1.026, "1.03 GiB"),
    ],
)
def test_numbers_read_well(write: Callable[[float | None], str], value: float | None, said: str) -> None:
    assert write(value) == said
