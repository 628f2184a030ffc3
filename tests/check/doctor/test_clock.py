"""Clocks that do not agree."""

import pytest

from muster.check.doctor import clock
from muster.check.doctor.clock import Facts
from muster.check.doctor.finding import Finding


def facts_of(*readings: tuple[str, float, float]) -> dict[str, list[Facts]]:
    """Facts of hosts, given as (name, seconds ahead of the first host's clock, largest error of that)."""
    return {host: [Facts(ahead_s - doubt_s, ahead_s + doubt_s)] for host, ahead_s, doubt_s in readings}


def findings(*readings: tuple[str, float, float]) -> list[Finding]:
    return clock.findings(facts_of(*readings))


def found(*readings: tuple[str, float, float]) -> list[tuple[str, str]]:
    return [(finding.level, finding.host) for finding in findings(*readings)]


def test_clocks_that_agree_but_for_what_can_not_be_told():
    told = facts_of(("a", 0, 0), ("b", 0.9, 0.01), ("c", -5.0, 4.5))
    assert clock.findings(told) == []
    assert clock.summary(told).startswith("the clocks of 3 nodes agree to")


def test_two_clocks_may_differ_by_what_is_in_doubt_of_both():
    assert clock.summary(facts_of(("a", 0, 0), ("b", 0.2, 1), ("c", 0, 1))).endswith(" agree to 2.200 s")


@pytest.mark.parametrize("off_s", [90.0, -3.5])
def test_a_clock_that_is_off_is_named_with_its_offset(off_s):
    (finding,) = findings(("a", 0, 0), ("b", off_s, 0.01), ("c", 0, 0))
    assert (finding.level, finding.about, finding.host) == ("warning", "clock", "b")
    assert f"differ by up to {abs(off_s):.1f} s" in finding.wrong
    assert f"{off_s:+.3f} s on b, with an error of at most 0.010 s" in finding.seen


def test_the_first_nodes_own_clock_is_the_odd_one_where_all_others_agree():
    assert found(("a", 0, 0), ("b", 60, 0.1), ("c", 60.2, 0.1)) == [("warning", "a")]


def test_of_two_none_is_blamed():
    (finding,) = findings(("a", 0, 0), ("b", -60, 0.1))
    assert finding.host == "a, b"
    assert "differ by up to 60.0 s" in finding.wrong


@pytest.mark.parametrize(
    ("ahead", "widest"), [((0, 0, -5, -5), "5.0 s"), ((0, 100, 200), "200.0 s"), ((0, -5, 0, 60), "65.0 s")]
)
def test_where_no_time_has_a_majority_no_clock_is_blamed(ahead, widest):
    readings = [(host, off_s, 0.01 if off_s else 0.0) for host, off_s in zip("abcd", ahead, strict=False)]
    (finding,) = findings(*readings)
    assert f"differ by up to {widest}: " in finding.wrong
    assert finding.host == ", ".join("abcd"[: len(ahead)])
    middle = sorted(ahead)[(len(ahead) - 1) // 2]
    for host, off_s in zip("abcd", ahead, strict=False):
        assert (off_s == middle) != (f"{off_s - middle:+.3f} s on {host}" in finding.seen)


def test_a_small_majority_is_one():
    readings = [(host, off_s, 0.0) for host, off_s in zip("abcde", (0, 0, 0, -5, 5), strict=True)]
    assert found(*readings) == [("warning", "d, e")]
