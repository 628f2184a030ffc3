"""`muster site`: the profile of a site, and whether this is the site."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from muster.entrypoint import environment, recording
from muster.entrypoint.options import LaunchOptions
from muster.entrypoint.sites import recognise
from muster.errors import one_line

if TYPE_CHECKING:
    from rich.table import Table

    from muster.entrypoint.sites.schema import Site


def site(
    what: Annotated[
        str | None, typer.Argument(metavar="NAME|FILE|list", help="A site's name or file. Default: this site.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")] = False,
    env_file: Annotated[str | None, typer.Option("--env-file", help="The site of a recorded environment.")] = None,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks.")] = False,
) -> None:
    """`muster site`."""
    from muster.entrypoint.sites import profiles

    env = recording.load(Path(env_file)) if env_file else environment.live()
    if what == "list" and as_json:
        _print_json({name: profiles.load_site(name) for name in profiles.names_in(profiles.SITES)})
    elif what == "list":
        print_list()
    elif what is not None:
        found = profiles.load_site(what)
        _show(what, found, ", ".join(recognise.evidence_for(profiles.path_of(what), env)) or None, as_json)
    else:
        # MUSTER_SITE=off is for launches: here the site is shown all the same.
        wanted = env.get("MUSTER_SITE") or "auto"
        if here := recognise.here(env, LaunchOptions(site="auto" if wanted == "off" else wanted)):
            _show(here.name, here.site, here.why, as_json)
        elif as_json:
            print("null")
        else:
            known = [f"{name}={env[name]}" for name in recognise.CLUSTER if env.get(name)]
            known.insert(0, f"host {env.host or 'unknown'}")
            print(f"there is no profile of this site ({one_line(', '.join(known))}): everything is found at the start.")
            print("muster site list shows all profiles; docs/sites.md explains how to write one.")


def _print_json(value: Any) -> None:
    from msgspec import to_builtins

    print(json.dumps(to_builtins(value), indent=2))


def print_list() -> None:
    """Prints a line for each site."""
    from rich.console import Console
    from rich.text import Text

    from muster.entrypoint.sites import profiles

    table = new_table("name", "", "scheduler", "fabric", "status")
    for name in profiles.names_in(profiles.SITES):
        site = profiles.load_site(name)
        status = "refused" if site.refused else site.status
        table.add_row(*map(Text, (name, site.title, site.scheduler.replace("_", " "), site.extends or "-", status)))
    Console().print(table)


def new_table(first: str, *headings: str) -> "Table":
    """An empty table with these headings, which wraps long values."""
    from rich import box, get_console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, int(get_console().width >= 80), 0, 0))
    table.add_column(first, style="bold", overflow="fold")
    for heading in headings:
        table.add_column(heading, overflow="fold")
    return table


def _show(name: str, site: "Site", why: str | None, as_json: bool) -> None:
    if as_json:
        from msgspec.structs import asdict

        _print_json({"name": name, "why": why, **asdict(site)})
        return
    from muster.entrypoint.sites import profiles
    from muster.entrypoint.sites.schema import STATUS

    print(f"{site.title}{', ' if site.centre else ''}{site.centre} ({name})")
    if why:
        print(f"this site: {why}")
    if site.refused:
        print("this image does not run there: see refused")
    print(f"status: {site.status}, {STATUS[site.status]}\n")
    for line in profiles.path_of(name).read_text(encoding="utf-8-sig").splitlines():
        print(one_line(line))
