"""A site's profile as text: each value with where it was read and when, and what nobody could find out."""

import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from entrypoint.sites.schema import Fact, Site

WIDTH = 80

# None there means that nothing more is needed, or that it is the fabric's to say.
_OPTIONAL = {
    "refused", "modules", "launch.directives", "launch.flags", "launch.launcher", "container.modules",
    "container.options", "container.binds", "storage.hints", "launch.account",
}  # fmt: skip
# What a launch finds out by itself.
_FOUND = {"nodes.gpus", "nodes.gpu", "nodes.cores", "network.interface", "extends"}

STATUS = {
    "verified": "seen to work there",
    "documented": "in the site's own words, not tried",
    "unverified": "no words of the site's on such containers were found, not tried",
}


@dataclass(frozen=True)
class Row:
    """A value of a profile: its key, the words for it, the key of its source, when it holds, and its note."""

    key: str
    value: str
    source: str
    when: str
    note: str


def rows(site: Site) -> tuple[Row, ...]:
    """All values that have a source, in the schema's order."""
    return tuple(_rows(site, ""))


def unknown(site: Site) -> tuple[str, ...]:
    """The keys of what the profile does not say, though there is something to say."""
    missing = [name for name in ("extends", "documentation", "contact") if getattr(site, name) is None]
    for table in ("recognise", "nodes", "launch", "network", "container", "storage"):
        inner = getattr(site, table)
        empty = [name for name in inner.__struct_fields__ if getattr(inner, name) is None]
        # One of its three is enough.
        if table == "recognise":
            missing += ["recognise"] if len(empty) == len(inner.__struct_fields__) else []
        else:
            missing += [f"{table}.{name}" for name in empty]
    return tuple(name for name in [*missing, *([] if site.caches else ["caches"])] if name not in _OPTIONAL)


def values(name: str, site: Site, why: str | None) -> dict[str, Any]:
    """A profile for programs: all of it, with its name, why it is this site's, and what is unknown."""
    return {"name": name, "why": why, **msgspec.to_builtins(site), "unknown": list(unknown(site))}


def text(name: str, site: Site, why: str | None) -> str:
    """A profile for people."""
    console = Console()
    with console.capture() as capture:
        for line in _heading(name, site, why):
            console.print(line)
        if rows(site):
            console.print(_table(site))
            for key, source in site.sources.items():
                # Not wrapped: an address is to be copied.
                console.print(Text.assemble((key, "bold"), f" {source.read} {source.url}"), soft_wrap=True)
        for line in _gaps(site):
            console.print(Text(line))
    return capture.get().rstrip("\n")


def listing(sites: dict[str, Site]) -> str:
    """A line for each site."""
    console = Console()
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading, style in (("name", "bold"), ("", ""), ("scheduler", ""), ("fabric", ""), ("status", "dim")):
        table.add_column(heading, style=style, overflow="fold")
    for name, site in sites.items():
        status = "refused" if site.refused else site.status
        fabric = site.extends or "-"
        table.add_row(Text(name), Text(site.title), Text(site.scheduler.replace("_", " ")), Text(fabric), Text(status))
    with console.capture() as capture:
        console.print(table)
    return capture.get().rstrip("\n")


def _heading(name: str, site: Site, why: str | None) -> Iterator[Text]:
    centre = f", {site.centre}" if site.centre else ""
    yield Text.assemble((site.title, "bold"), f"{centre} ({name})")
    if why:
        yield Text(f"this site: {why}")
    if site.refused:
        yield Text("this image does not run there: see refused", style="bold")
    yield Text(f"status: {site.status}, {STATUS[site.status]}")
    yield Text(f"scheduler: {site.scheduler.replace('_', ' ')}; fabric: {site.extends or 'by its devices'}")
    if site.documentation:
        yield Text(f"documentation: {site.documentation}")


def _table(site: Site) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading, style in (("", "bold"), ("value", ""), ("from", "dim")):
        table.add_column(heading, style=style, overflow="fold")
    group = ""
    for row in rows(site):
        first, _, rest = row.key.partition(".")
        if rest and first != group:
            table.add_row(Text(first, style="not bold underline"), "", "")
        group = first
        value = Text(row.value)
        if row.when:
            value.append(f"\nif {row.when}", style="italic")
        if row.note:
            value.append(f"\n{row.note}", style="dim")
        table.add_row(Text(f"  {rest}" if rest else first), value, Text(row.source))
    return table


def _gaps(site: Site) -> Iterator[str]:
    missing = unknown(site)
    for told, names in (
        ("not known, found at the start", [name for name in missing if name in _FOUND]),
        ("not known", [name for name in missing if name not in _FOUND]),
    ):
        if names:
            yield textwrap.fill(f"{told}: {', '.join(names)}", width=WIDTH, subsequent_indent="    ")


def _rows(value: Any, key: str) -> Iterator[Row]:
    if isinstance(value, Fact):
        yield _row(key, value)  # pyright: ignore[reportUnknownArgumentType]
    elif isinstance(value, dict):
        for name, item in value.items():  # pyright: ignore[reportUnknownVariableType]
            yield from _rows(item, f"{key}.{name}")
    elif isinstance(value, msgspec.Struct):
        for name in value.__struct_fields__:
            yield from _rows(getattr(value, name), f"{key}.{name}" if key else name)


def _row(key: str, fact: Fact[Any]) -> Row:
    when = fact.when
    terms = [] if when is None else [f"{name} {getattr(when, name)}" for name in ("nodes", "gpu", "nccl")
                                     if getattr(when, name)]  # fmt: skip
    return Row(key, _words(fact.value), fact.source, ", ".join(terms), fact.note)


def _words(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, dict):
        return "\n".join(f"{name}={item}" for name, item in value.items())  # pyright: ignore[reportUnknownVariableType]
    if isinstance(value, tuple):
        return "\n".join(map(_words, value))  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
    return str(value)
