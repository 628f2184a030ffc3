"""All that is wrong with a profile, at once: where, what was wanted, and the nearest key for one that is misspelt.

The schema says which keys there are and what they hold; `rules` says what a value of the right type may not be.
"""

import difflib
from collections.abc import Iterator
from datetime import date
from typing import Any, cast, get_origin

from msgspec import inspect

from entrypoint.sites import conditions, rules
from entrypoint.sites.schema import Fabric, Fact, Site, Source, When

Place = tuple[str, ...]

_LIKE: dict[Any, str] = {
    Fact: ' like {value = ..., source = "..."}',
    Source: ' like {url = "https://...", read = 2026-01-31}',
    When: ' like {nodes = ">1"}',
}
_TYPES: dict[type[inspect.Type], type] = {
    inspect.StrType: str,
    inspect.IntType: int,
    inspect.BoolType: bool,
    inspect.DateType: date,
}
_NAMES: dict[type[inspect.Type], str] = {
    inspect.StrType: 'text in quotes ("...")',
    inspect.IntType: "a whole number without quotes",
    inspect.BoolType: "true or false",
    inspect.DateType: "a date without quotes, like 2026-01-31",
    inspect.VarTupleType: 'a list, like ["a", "b"]',
}


def problems(
    tables: dict[str, Any], shape: type[Site] | type[Fabric], fabrics: tuple[str, ...], today: date
) -> list[str]:
    """What is wrong with a profile: one sentence each, which begins with the key; empty for a valid one."""
    root = inspect.type_info(shape)
    found = [f"{_key(place)}: {wrong}" for place, wrong in _walk(tables, root, ())]
    found += [f"{_key(place)}: {wrong}" for place, wrong in rules.problems(tables, fabrics, today)]
    # A rule and the schema may both have something to say on one value.
    return list(dict.fromkeys(found))


def _walk(value: Any, shape: inspect.Type, place: Place) -> Iterator[tuple[Place, str]]:
    if isinstance(shape, inspect.UnionType):
        shape = next(kind for kind in shape.types if not isinstance(kind, inspect.NoneType))
    if isinstance(shape, inspect.StructType):
        yield from _struct(value, shape, place)
    elif isinstance(shape, inspect.DictType):
        if not isinstance(value, dict):
            yield place, f"wanted a table, not {_named(value)}"
            return
        for name, item in cast("dict[str, Any]", value).items():
            yield from _walk(item, shape.value_type, (*place, name))
    elif isinstance(shape, inspect.VarTupleType):
        if not isinstance(value, list):
            yield place, f'wanted a list, like ["a", "b"], not {_named(value)}'
            return
        for index, item in enumerate(cast("list[Any]", value)):
            yield from _walk(item, shape.item_type, (*place, str(index)))
    else:
        wrong = _scalar(value, shape)
        if wrong:
            yield place, wrong


def _struct(value: Any, shape: inspect.StructType, place: Place) -> Iterator[tuple[Place, str]]:
    kind = get_origin(shape.cls) or shape.cls
    if not isinstance(value, dict):
        yield place, f"wanted a table{_LIKE.get(kind, '')}, not {_named(value)}"
        return
    given = cast("dict[str, Any]", value)
    known = {field.encode_name: field for field in shape.fields}
    meant: set[str] = set()
    for name, item in given.items():
        if name in known:
            yield from _walk(item, known[name].type, (*place, name))
        else:
            nearest = difflib.get_close_matches(name, [key for key in known if key not in given], n=1)
            meant.update(nearest)
            yield (*place, name), _unknown(name, nearest, known)
    for name, field in known.items():
        if field.required and name not in given and name not in meant:
            yield (*place, name), f"is missing: wanted {_wanted(field.type)}"
    if kind is When:
        for wrong in conditions.problems(given.get("nodes"), given.get("gpu"), given.get("nccl")):
            yield place, wrong


def _unknown(name: str, nearest: list[str], known: dict[str, inspect.Field]) -> str:
    if nearest:
        return f"there is no such key here; did you mean {nearest[0]}?"
    tables = [
        key
        for key, field in known.items()
        if isinstance(field.type, inspect.StructType) and name in {inner.encode_name for inner in field.type.fields}
    ]
    if tables:
        return f"there is no such key here; it belongs into [{tables[0]}]"
    return f"there is no such key here; there are: {' '.join(known)}"


def _scalar(value: Any, shape: inspect.Type) -> str | None:
    if isinstance(shape, inspect.LiteralType):
        if value in shape.values:
            return None
        nearest = difflib.get_close_matches(str(value), map(str, shape.values), n=1)
        return f"wanted {_wanted(shape)}, not {_named(value)}" + (f"; did you mean {nearest[0]}?" if nearest else "")
    # Neither a bool for an int nor a time for a date.
    if type(value) is not _TYPES[type(shape)]:
        return f"wanted {_wanted(shape)}, not {_named(value)}"
    return None


def _wanted(shape: inspect.Type) -> str:
    if isinstance(shape, inspect.LiteralType):
        return "one of " + ", ".join(map(str, shape.values))
    return _NAMES.get(type(shape), "a table")


def _named(value: Any) -> str:
    if isinstance(value, dict):
        return "a table"
    if isinstance(value, list):
        return "a list"
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{value}"' if isinstance(value, str) else str(value)


def _key(place: Place) -> str:
    return ".".join(place) or "the profile"
