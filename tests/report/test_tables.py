"""Numbers as text."""

from collections.abc import Callable

import pytest

from muster.report import tables


@pytest.mark.parametrize(
    ("write", "value", "said"),
    [
        (tables.quantity, 2470.4, "2,470"),
        (tables.quantity, 318.39, "318.4"),
        (tables.quantity, 1.23456, "1.235"),
        (tables.quantity, 0.00001234, "1.234e-05"),
        (tables.quantity, 9.89e14, "989 T"),
        (tables.quantity, None, "-"),
        (tables.count, 1281167, "1,281,167"),
        (tables.duration, 0.0117, "11.7 ms"),
        (tables.duration, 0.00042, "0.42 ms"),
        (tables.duration, 8.64, "8.64 s"),
        (tables.duration, 200, "3 min 20 s"),
        (tables.duration, 7500, "2 h 05 min"),
        (tables.percent, 0.577, "57.7 %"),
        (tables.memory, 1.026, "1.03 GiB"),
    ],
)
def test_numbers_read_well(write: Callable[[float | None], str], value: float | None, said: str) -> None:
    assert write(value) == said
