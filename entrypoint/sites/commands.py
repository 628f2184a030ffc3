"""`muster site`: a profile as text, with where each value was read and what nobody could find out; and its check."""

import json
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from muster.entrypoint import environment
from muster.entrypoint.environment import Environment
from muster.entrypoint.options import LaunchOptions
from muster.entrypoint.sites import recognise
from muster.errors import MusterError, one_line

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

    from muster.entrypoint.sites.schema import Site, When

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


def add_to(app: typer.Typer) -> None:
    """Adds the command to `muster`."""
    app.command("site", help="Show what is known of this site, or check a profile.")(_site)


def _site(
    what: Annotated[
        str | None, typer.Argument(metavar="[NAME|list|check]", help="A site's name or file. Default: this site.")
    ] = None,
    file: Annotated[str | None, typer.Argument(metavar="[FILE]", help="With check: the profile.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
    env_file: Annotated[
        str | None, typer.Option("--env-file", help="Recognise the site of a recorded environment, not of this one.")
    ] = None,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks.")] = False,
) -> None:
    env = environment.load(Path(env_file)) if env_file else environment.live()
    if (file is not None) != (what == "check"):
        raise MusterError(
            "muster site check takes the file of a profile",
            seen=" ".join(filter(None, (what, file))),
            fix="muster site, muster site NAME, muster site list or muster site check FILE",
        )
    if what == "list":
        _list(as_json)
    elif file is not None:
        _check(Path(file), env, as_json)
    else:
        _show(what, env, as_json)


def _show(name: str | None, env: Environment, as_json: bool) -> None:
    # Here and not above, as all that reads whole profiles: the launch loads this module too.
    from muster.entrypoint.sites import profiles

    if name is None:
        # Where launches are to take none, the question is still which it would be.
        wanted = env.get("MUSTER_SITE") or "auto"
        here = recognise.here(env, LaunchOptions(site="auto" if wanted == "off" else wanted))
        if here is None:
            _print_none(env, as_json)
            return
        name, site, why = here.name, here.site, here.why
    else:
        site, why = profiles.load_site(name), ", ".join(recognise.matches(env).get(name, ())) or None
    if as_json:
        from msgspec import to_builtins

        print(json.dumps({"name": name, "why": why, **to_builtins(site), "unknown": unknown(site)}, indent=2))
    else:
        print(text(name, site, why))


def _print_none(env: Environment, as_json: bool) -> None:
    if as_json:
        print("null")
        return
    told = [f"host {env.host}", *(f"{name}={env[name]}" for name in recognise.CLUSTER if env.get(name))]
    print(f"no profile is of this site ({one_line(', '.join(told))}): all is found at the start.")
    print("muster site list shows those there are; docs/sites.md tells how to write one.")


def _list(as_json: bool) -> None:
    from muster.entrypoint.sites import profiles

    if not as_json:
        print(listing())
        return
    keys = ("title", "centre", "scheduler", "extends", "status")
    sites = {name: profiles.load_site(name) for name in profiles.site_names()}
    answer = [
        {"name": name, **{key: getattr(site, key) for key in keys}, "refused": bool(site.refused)}
        for name, site in sites.items()
    ]
    print(json.dumps(answer, indent=2))


def _check(path: Path, env: Environment, as_json: bool) -> None:
    from muster.entrypoint.sites import profiles
    from muster.entrypoint.sites.schema import facts

    try:
        site = profiles.load_site(path)
    except profiles.BadProfile as bad:
        if as_json:
            print(json.dumps({"file": str(path), "problems": list(bad.problems)}, indent=2))
            sys.exit(bad.code)
        for problem in bad.problems:
            print(one_line(f"{path}: {problem}"), file=sys.stderr)
        raise MusterError(bad.wrong, seen=str(path), fix=bad.fix) from None
    if as_json:
        print(json.dumps({"file": str(path), "problems": []}, indent=2))
        return
    whys = recognise.told_by(path, env)
    num_values = len(list(facts(site)))
    print(f"valid: {site.title} ({one_line(str(path))}): values {num_values}, sources {len(site.sources)}")
    print(f"recognised here: {', '.join(whys) if whys else 'no, this is another place'}")


def unknown(site: "Site") -> list[str]:
    """The keys of what the profile does not say, though there is something to say."""
    missing = [name for name in ("extends", "documentation", "contact") if getattr(site, name) is None]
    # One of its three is enough.
    if not any((site.recognise.cluster, site.recognise.hosts, site.recognise.variables)):
        missing.append("recognise")
    for table in ("nodes", "launch", "network", "container", "storage"):
        inner = getattr(site, table)
        missing += [f"{table}.{name}" for name in inner.__struct_fields__ if getattr(inner, name) is None]
    return [name for name in [*missing, *([] if site.caches else ["caches"])] if name not in _OPTIONAL]


def text(name: str, site: "Site", why: str | None) -> str:
    """A profile for people."""
    from rich.console import Console
    from rich.text import Text

    console = Console()
    with console.capture() as capture:
        for line in _heading(name, site, why):
            console.print(line)
        if site.sources:
            console.print(_table(site))
            for key, source in site.sources.items():
                # Not wrapped: an address is to be copied.
                console.print(Text.assemble((key, "bold"), f" {source.read} {source.url}"), soft_wrap=True)
        missing = unknown(site)
        for told, names in (
            ("not known, found at the start", [name for name in missing if name in _FOUND]),
            ("not known", [name for name in missing if name not in _FOUND]),
        ):
            if names:
                console.print(Text(textwrap.fill(f"{told}: {', '.join(names)}", 80, subsequent_indent="    ")))
    return capture.get().rstrip("\n")


def listing() -> str:
    """A line for each site."""
    from rich.console import Console
    from rich.text import Text

    from muster.entrypoint.sites import profiles

    table = _new_table("name", "", "scheduler", "fabric", "status")
    for name in profiles.site_names():
        site = profiles.load_site(name)
        status = "refused" if site.refused else site.status
        words = (name, site.title, site.scheduler.replace("_", " "), site.extends or "-", status)
        table.add_row(*map(Text, words))
    console = Console()
    with console.capture() as capture:
        console.print(table)
    return capture.get().rstrip("\n")


def _heading(name: str, site: "Site", why: str | None) -> "Iterator[Text]":
    from rich.text import Text

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


def _new_table(first: str, *headings: str) -> "Table":
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column(first, style="bold", overflow="fold")
    for heading in headings:
        table.add_column(heading, overflow="fold")
    return table


def _table(site: "Site") -> "Table":
    from rich.text import Text

    from muster.entrypoint.sites.schema import facts

    table = _new_table("", "value", "from")
    group = ""
    for key, fact in facts(site):
        first, _, rest = key.partition(".")
        if rest and first != group:
            table.add_row(Text(first, style="not bold underline"), "", "")
        group = first
        value = Text(_words(fact.value))
        if fact.when:
            value.append(f"\nif {_condition(fact.when)}", style="italic")
        if fact.note:
            value.append(f"\n{fact.note}", style="dim")
        table.add_row(Text(f"  {rest}" if rest else first), value, Text(fact.source, style="dim"))
    return table


def _condition(when: "When") -> str:
    terms = {"nodes": when.nodes, "gpu": when.gpu, "nccl": when.nccl}
    return ", ".join(f"{name} {term}" for name, term in terms.items() if term)


def _words(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, dict):
        return "\n".join(f"{name}={item}" for name, item in value.items())  # pyright: ignore[reportUnknownVariableType]
    if isinstance(value, tuple):
        return "\n".join(map(_words, value))  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
    return str(value)
