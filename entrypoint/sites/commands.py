"""`muster site`: parse, call, print."""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from entrypoint import environment
from entrypoint.environment import Environment
from entrypoint.options import LaunchOptions
from train.errors import MusterError, one_line

FIX = "muster site, muster site NAME, muster site list or muster site check FILE"


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
            "muster site check takes the file of a profile", seen=" ".join(filter(None, (what, file))), fix=FIX
        )
    if what == "list":
        _list(as_json)
    elif file is not None:
        _check(Path(file), env, as_json)
    else:
        _show(what, env, as_json)


@dataclass(frozen=True)
class _Shown:
    name: str
    site: Any
    why: str | None


def _show(name: str | None, env: Environment, as_json: bool) -> None:
    # Here and not above, as all that reads whole profiles: the launch loads this module too.
    from entrypoint.sites import profiles, recognise, showing

    if name is None:
        # Where launches are to take none, the question is still which it would be.
        wanted = env.get("MUSTER_SITE") or "auto"
        wanted = "auto" if wanted == "off" else wanted
        here = recognise.here(env, LaunchOptions(site=wanted))
        if here is None:
            _print_none(env, as_json)
            return
        shown = _Shown(here.name, here.site, here.why)
    else:
        whys = recognise.matches(env).get(name)
        shown = _Shown(name, profiles.load_site(name), ", ".join(whys) if whys else None)
    if as_json:
        print(json.dumps(showing.values(shown.name, shown.site, shown.why), indent=2))
    else:
        print(showing.text(shown.name, shown.site, shown.why))


def _print_none(env: Environment, as_json: bool) -> None:
    from entrypoint.sites import recognise

    if as_json:
        print("null")
        return
    told = [f"host {env.host}", *(f"{name}={env[name]}" for name in recognise.CLUSTER if env.get(name))]
    print(f"no profile is of this site ({one_line(', '.join(told))}): all is found at the start.")
    print("muster site list shows those there are; docs/sites.md tells how to write one.")


def _list(as_json: bool) -> None:
    from entrypoint.sites import profiles, showing

    sites = {name: profiles.load_site(name) for name in profiles.site_names()}
    if as_json:
        keys = ("title", "centre", "scheduler", "extends", "status")
        answer = [
            {"name": name, **{key: getattr(site, key) for key in keys}, "refused": bool(site.refused)}
            for name, site in sites.items()
        ]
        print(json.dumps(answer, indent=2))
    else:
        print(showing.listing(sites))


def _check(path: Path, env: Environment, as_json: bool) -> None:
    from entrypoint.sites import profiles, recognise, showing

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
    print(f"valid: {site.title} ({one_line(str(path))}): values {len(showing.rows(site))}, sources {len(site.sources)}")
    print(f"recognised here: {', '.join(whys) if whys else 'no, this is another place'}")
