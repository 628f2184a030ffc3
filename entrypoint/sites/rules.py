"""What a profile's values may not be, though they are of the right type.

A profile's values end up in job scripts, in variables and in messages: none may hold what ends a line.
"""

import re
from collections.abc import Iterator
from datetime import date, timedelta
from typing import Any, cast

Place = tuple[str, ...]
Found = Iterator[tuple[Place, str]]

NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
VARIABLE = re.compile(r"\$(?:\{([A-Za-z_][A-Za-z0-9_]*)\}|([A-Za-z_][A-Za-z0-9_]*))")
URL = re.compile(r"https?://[A-Za-z0-9.-]+\.[A-Za-z]{2,}(?::[0-9]+)?(?:/[^\s\"'<>`\\]*)?")

# Values that are one word of a command.
_WORDS: dict[Place, str] = {
    ("launch", "launcher"): r"[A-Za-z0-9_./+-]+",
    ("launch", "partition"): r"[A-Za-z0-9_.,@+-]+",
    ("container", "command"): r"[A-Za-z0-9_./+-]+",
    ("network", "address_suffix"): r"[A-Za-z0-9.-]+",
    ("network", "interface"): r"[A-Za-z0-9_.,:-]+",
}
# Values that a container's command gets by --bind.
_BINDS: set[Place] = {("storage", "scratch"), ("storage", "node_local"), ("container", "binds")}
# Options that say how many nodes, or slots, a job has; Grid Engine's parallel environments are each site's own.
_SIZES = {
    "slurm": r"(?:--nodes|-N)(?![A-Za-z-])",
    "pbs": r"-l\s*(?:\S*,)?(?:select|nodes)=",
    "lsf": r"-(?:n|nnodes)(?![A-Za-z_])",
    "flux": r"(?:--nodes|-N)(?![A-Za-z-])",
}
# Values in which a shell, or this program, puts variables.
_FOLDERS: set[Place] = {("caches",), ("storage", "scratch"), ("storage", "node_local"), ("container", "binds")}


def problems(tables: dict[str, Any], fabrics: tuple[str, ...], today: date) -> Found:
    """What is wrong, and where; what the schema says on types is not said again."""
    sources = tables.get("sources")
    names = tuple(cast("dict[str, Any]", sources)) if isinstance(sources, dict) else ()
    for place, value in _every(tables, ()):
        if isinstance(value, str):
            yield from _text(place, value)
        elif isinstance(value, dict) and "value" in value and place[0] != "sources":
            yield from _fact(place, cast("dict[str, Any]", value), names)
        elif isinstance(value, int) and not isinstance(value, bool) and value < 0:
            yield place, f"{value} is less than nothing"
    yield from _sources(_table(tables, "sources"), today)
    extends = tables.get("extends")
    if isinstance(extends, str) and fabrics and extends not in fabrics:
        yield ("extends",), f'there is no fabric "{extends}"; there are: {" ".join(fabrics)}'
    documentation = tables.get("documentation")
    if isinstance(documentation, str) and not URL.fullmatch(documentation):
        yield ("documentation",), f'"{documentation}" is no address like https://docs.example.org/gpu'
    yield from _recognise(_table(tables, "recognise"))
    yield from _directives(tables)
    for table in ("variables", "caches"):
        for name in _table(tables, table):
            if not NAME.fullmatch(name):
                yield (table, name), "a variable's name has letters, digits and _ only, and begins with no digit"


def unsafe_folder(text: str) -> str | None:
    """What a shell would do with a folder besides putting variables in; None if nothing."""
    rest = VARIABLE.sub("", text)
    if text.startswith("~"):
        return "~ is not expanded between quotes: write $HOME"
    bad = re.search(r"[$`\"'\\;&|<>()*?!]", rest)
    return f"a folder has $NAME or ${{NAME}} in it, and no {bad[0]}" if bad else None


def _every(value: Any, place: Place) -> Iterator[tuple[Place, Any]]:
    """All values at all depths, with their places."""
    if place:
        yield place, value
    if isinstance(value, dict):
        for name, item in cast("dict[str, Any]", value).items():
            yield from _every(item, (*place, name))
    elif isinstance(value, list):
        for index, item in enumerate(cast("list[Any]", value)):
            yield from _every(item, (*place, str(index)))


def _text(place: Place, text: str) -> Found:
    if not all(name.isprintable() for name in place):
        yield tuple(repr(name) for name in place), "a key holds a control character"
    if not text.isprintable():
        yield place, f"{text!r} holds a control character or the end of a line"
    elif not text.strip() and place[0] != "variables" and place[-1] != "note" and place != ("centre",):
        yield place, "is empty: leave out what is not known"
    elif place[:2] == ("launch", "directives") and place[-1].isdigit() and text.startswith("#"):
        yield place, f'"{text}": leave its #SBATCH, #PBS, #BSUB or #$ out'
    if place[-1] == "value" or place[-1].isdigit():
        word = _WORDS.get(place[:2])
        if word and not re.fullmatch(word, text):
            yield place, f'"{text}" is not one word of {word}'
        if place[:1] in _FOLDERS or place[:2] in _FOLDERS:
            wrong = unsafe_folder(text)
            if wrong:
                yield place, f'"{text}": {wrong}'
            elif place[:2] in _BINDS and "," in text:
                yield place, f'"{text}": a container\'s command takes what follows the comma for another folder'


def _fact(place: Place, fact: dict[str, Any], sources: tuple[str, ...]) -> Found:
    source = fact.get("source")
    if isinstance(source, str) and source not in sources:
        yield (*place, "source"), f'there is no [sources] key "{source}"; there are: {" ".join(sources) or "none"}'


def _sources(sources: dict[str, Any], today: date) -> Found:
    for name in sources:
        url, read = _table(sources, name).get("url"), _table(sources, name).get("read")
        if isinstance(url, str) and not URL.fullmatch(url):
            yield ("sources", name, "url"), f'"{url}" is no address like https://docs.example.org/gpu'
        # It may be tomorrow already where it was written.
        if type(read) is date and read - today > timedelta(days=1):
            yield ("sources", name, "read"), f"{read} is in the future"


def _directives(tables: dict[str, Any]) -> Found:
    scheduler = tables.get("scheduler")
    size = _SIZES.get(scheduler) if isinstance(scheduler, str) else None
    for index, line in enumerate(_list(_table(_table(tables, "launch"), "directives").get("value"))):
        if size and isinstance(line, str) and re.search(rf"(?<!\S){size}", line):
            wrong = f'"{line}" sets the number of nodes, which is what the user asks for: muster job SITE --nodes'
            yield ("launch", "directives", "value", str(index)), wrong


def _recognise(recognise: dict[str, Any]) -> Found:
    for kind in ("cluster", "hosts"):
        for pattern in _list(_table(recognise, kind).get("value")):
            yield from _pattern(("recognise", kind), pattern)
    values = _table(_table(recognise, "variables"), "value")
    for name, pattern in values.items():
        place = ("recognise", "variables", "value", name)
        if not NAME.fullmatch(name):
            yield place, "a variable's name has letters, digits and _ only, and begins with no digit"
        yield from _pattern(place, pattern)
    for kind in recognise:
        if "when" in _table(recognise, kind):
            yield ("recognise", kind, "when"), "what a site is recognised by has no condition"


def _pattern(place: Place, pattern: Any) -> Found:
    if isinstance(pattern, str) and not re.search(r"[A-Za-z0-9]", re.sub(r"\[[^]]*\]", "", pattern)):
        yield place, f'"{pattern}" matches whatever there is: every host would be this site'


def _list(value: Any) -> list[Any]:
    return cast("list[Any]", value) if isinstance(value, list) else []


def _table(tables: dict[str, Any], name: str) -> dict[str, Any]:
    value = tables.get(name)
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}
