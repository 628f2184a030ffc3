"""Numbers as text, and round numbers on axes."""

import pytest

from report import units


@pytest.mark.parametrize(
    ("write", "value", "said"),
    [
        (units.rate, 2470.4, "2,470"),
        (units.rate, 318.39, "318.4"),
        (units.rate, 1.234, "1.23"),
        (units.rate, 9.89e14, "989.0 T"),
        (units.rate, None, "-"),
        (units.seconds, 0.0117, "11.7 ms"),
        (units.seconds, 0.00042, "0.420 ms"),
        (units.seconds, 2.0, "2.00 s"),
        (units.duration, 8.64, "8.6 s"),
        (units.duration, 200, "3 min 20 s"),
        (units.duration, 7500, "2 h 05 min"),
        (units.share, 0.577, "57.7 %"),
        (units.accuracy, 0.98888, "98.89 %"),
        (units.memory, 1.026, "1.03 GiB"),
        (units.loss, 0.00001234, "1.23e-05"),
        (units.parameters, 8.03e9, "8.03 B"),
        (units.plain, 12500, "12,500"),
        (units.plain, 0.25, "0.25"),
        (units.plain, 2_500_000, "2.5 M"),
    ],
)
def test_numbers_read_well(write, value, said) -> None:
    assert write(value) == said


def test_ticks_are_round_and_hold_the_values() -> None:
    assert units.ticks(0, 1103) == [0, 200, 400, 600, 800, 1000, 1200]
    assert units.ticks(0, 1, 5) == [0, 0.2, 0.4, 0.6, 0.8, 1.0]
    assert units.ticks(5, 5) == [5]
    for low, high in ((0, 1e-9), (0.123, 0.124), (-3, 7), (0, 3e15)):
        found = units.ticks(low, high)
        assert found[0] <= low < high <= found[-1]
        assert 3 <= len(found) <= 9


@pytest.mark.parametrize(
    ("low", "high"), [(2.3025851249694824, 2.302585124969483), (0.0, 5e-324), (-1e-320, 1e-320), (-1.7e308, 1.7e308)]
)
def test_ends_that_cant_be_told_apart_have_one_tick(low: float, high: float) -> None:
    assert units.ticks(low, high) == [low]


def test_ticks_of_equal_ratios_are_within_the_axis() -> None:
    for low, high in ((0.05, 0.7), (0.1, 0.101), (1, 1e9), (33, 34), (1e-6, 1e-3)):
        found = units.log_ticks(low, high)
        assert 2 <= len(found) <= 7
        assert found == sorted(found)
        assert all(low <= value <= high for value in found)
