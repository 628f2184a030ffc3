"""Whatever a profile's file holds, it is valid or told what is wrong: no value makes the check fail itself."""

import tomllib
from datetime import date, datetime, time
from typing import Any

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from entrypoint.sites import checking, showing
from entrypoint.sites.schema import Site
from tests.sites.profile import VALID

FABRICS = ("infiniband",)
TODAY = date(2026, 12, 1)

WORDS = st.text(max_size=8) | st.sampled_from(["value", "source", "when", "docs", "$HOME", "*", ">1", "recognise", "0"])
LEAVES = (
    WORDS | st.integers() | st.floats() | st.booleans() | st.dates() | st.just(datetime(2026, 1, 1)) | st.just(time(1))
)
VALUES = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=3), max_leaves=6
)


def places(value: Any, place: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    """Where something stands in a profile, at all depths."""
    if isinstance(value, dict):
        return [place, *(each for name, item in value.items() for each in places(item, (*place, name)))]
    if isinstance(value, list):
        return [place, *(each for index, item in enumerate(value) for each in places(item, (*place, index)))]
    return [place]


PLACES = [place for place in places(tomllib.loads(VALID)) if place]


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(PLACES), VALUES, st.none() | WORDS)
def test_a_profile_with_anything_in_a_place_is_valid_or_told(
    place: tuple[str | int, ...], value: Any, name: str | None
) -> None:
    tables = tomllib.loads(VALID)
    inner: Any = tables
    for each in place[:-1]:
        inner = inner[each]
    if name is not None and isinstance(inner, dict):
        inner[name] = value
    else:
        inner[place[-1]] = value
    problems = checking.problems(tables, Site, FABRICS, TODAY)
    assert all(isinstance(problem, str) and problem for problem in problems)
    if not problems:
        site = msgspec.convert(tables, Site)
        assert "\x1b" not in showing.text("any", site, None)
