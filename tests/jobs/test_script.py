"""Time limits, as users type them and as schedulers take them."""

import pytest

from muster.entrypoint.jobs import script
from muster.errors import MusterError


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("1:30:00", 5400),
        ("2-12:00:00", 216_000),
        ("90m", 5400),
        ("1h30m", 5400),
        ("1d", 86_400),
        ("100:00:00", 360_000),
    ],
)
def test_times(text: str, seconds: int) -> None:
    assert script.seconds(text) == seconds


@pytest.mark.parametrize("text", ["", "90", "1:30", "0:00:10", "1:70:00", "-1h", "400d", "$(id)", "٣h"])
def test_what_schedulers_would_read_in_different_ways_or_not_at_all_is_refused(text: str) -> None:
    with pytest.raises(MusterError, match="--time is a time limit"):
        script.seconds(text)


def test_formats() -> None:
    assert script.clock(216_001) == "60:00:01"
    # Never shorter than what was asked for.
    assert script.hours_and_minutes(3601) == "1:01"
