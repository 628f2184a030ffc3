"""Findings on nodes that differ from most others."""

import pytest

from muster.check.doctor.finding import differences


@pytest.mark.parametrize(
    ("values", "host", "seen"),
    [
        ({"a": 1, "b": 1, "c": 2}, "c", "2 on c, 1 on a, b"),
        ({"a": 1, "b": 2}, "a, b", "1 on a, 2 on b"),
        # A majority is more than half.
        ({"a": 1, "b": 1, "c": 2, "d": 3}, "c, d, a, b", "2 on c, 3 on d, 1 on a, b"),
        ({"a": 1, "b": 1, "c": 1, "d": 2, "e": 3}, "d, e", "2 on d, 3 on e, 1 on a, b, c"),
    ],
)
def test_a_node_that_differs_from_most_is_named(values: dict[str, int], host: str, seen: str) -> None:
    (finding,) = differences(values, "warning", "x", "number", "-")
    assert (finding.host, finding.wrong, finding.seen) == (host, "not all nodes have the same number", seen)


def test_what_nobody_can_tell_does_not_differ() -> None:
    assert differences({"a": None, "b": 1}, "warning", "x", "number", "-") == []
    assert differences({}, "warning", "x", "number", "-") == []
