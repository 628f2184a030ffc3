"""Who differs from most."""

from muster.check.doctor.finding import outliers


def test_a_majority_is_more_than_half() -> None:
    assert outliers({"a": 1, "b": 1, "c": 2}) == (1, {2: ["c"]})
    assert outliers({"a": 1, "b": 2}) == (None, {1: ["a"], 2: ["b"]})
    assert outliers({"a": 1, "b": 1, "c": 2, "d": 3}) == (None, {1: ["a", "b"], 2: ["c"], 3: ["d"]})
    assert outliers({"a": None, "b": 1}) == (1, {})
    assert outliers({}) == (None, {})
