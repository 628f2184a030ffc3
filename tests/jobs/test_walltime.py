"""Time limits, as typed and as schedulers want them."""

import pytest

from entrypoint.jobs import walltime
from train.errors import MusterError


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
    assert walltime.parse(text) == seconds


@pytest.mark.parametrize("text", ["", "90", "1:30", "0:00:10", "1:70:00", "-1h", "400d", "$(id)", "٣h"])
def test_what_schedulers_would_read_in_different_ways_or_not_at_all_is_refused(text: str) -> None:
    with pytest.raises(MusterError, match="--time is a time limit"):
        walltime.parse(text)


def test_formats() -> None:
    assert walltime.clock(216_001) == "60:00:01"
    # Never shorter than what was asked for.
    assert walltime.hours_and_minutes(3601) == "1:01"
    assert (walltime.warning(600), walltime.warning(86_400)) == (60, 300)
