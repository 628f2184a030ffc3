"""Recognition of the current site, by the cluster names, host names and variables in the profiles.

Every launch does this, so only the head of each profile is parsed: the lines before its first table.
"""

import fnmatch
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from muster.entrypoint.environment import Environment
from muster.entrypoint.options import LaunchOptions
from muster.errors import MusterError, one_line
from muster.paths import JOBS

if TYPE_CHECKING:
    from muster.entrypoint.sites.schema import Site

SITES = JOBS / "sites"

# A variable in a folder's path, as in a shell.
VARIABLE = re.compile(r"\$(?:([A-Za-z_][A-Za-z0-9_]*)|\{([A-Za-z_][A-Za-z0-9_]*)\})")

# No such file, no UTF-8, no TOML, a number of thousands of digits, thousands of brackets.
UNREADABLE = (OSError, ValueError, RecursionError)

# Slurm's and Grid Engine's variables with the cluster's name; LSF and PBS have none.
CLUSTER = ("SLURM_CLUSTER_NAME", "SGE_CLUSTER_NAME")


@dataclass(frozen=True)
class Recognised:
    """The current site, with the evidence for it.

    Attributes:
        name: the profile's name, or the path of its file.
        why: the evidence: SLURM_CLUSTER_NAME=juwels, host jwb0001.juwels, --site=juwels-booster.
    """

    name: str
    why: str
    site: "Site"


def here(env: Environment, options: LaunchOptions, folder: Path = SITES) -> Recognised | None:
    """The site that the user named, or to which `env` belongs; None where no profile matches, or with --site off.

    The settings of the fabric use `libraries` and `variables` of its `.site`.

    Raises:
        MusterError: there is no such profile, one can't be read or used, or two match equally well.
    """
    if options.site == "off":
        return None
    if options.site != "auto":
        given = "MUSTER_SITE" if env.get("MUSTER_SITE") == options.site else "--site"
        why = f"{given}={options.site}"
        try:
            return _loaded(options.site, why, folder)
        except MusterError as refusal:
            seen = why if refusal.seen == options.site else f"{why}: {refusal.seen}"
            raise MusterError(refusal.wrong, seen=seen, fix=refusal.fix) from None
    found = {path.stem: evidence_for(path, env) for path in sorted(folder.glob("*.toml"))}
    # The profile with the most evidence is the most specific.
    if not (most := max(map(len, found.values()), default=0)):
        return None
    best = {name: whys for name, whys in found.items() if len(whys) == most}
    if len(best) > 1:
        seen = "; ".join(f"{name}: {', '.join(whys)}" for name, whys in best.items())
        fix = f"--site {next(iter(best))}, or --site off"
        raise MusterError(f"this site could be {' or '.join(best)}", seen=seen, fix=fix)
    ((name, whys),) = best.items()
    return _loaded(name, ", ".join(whys), folder)


def check(found: Recognised | None) -> None:
    """Refuses a site at which this image does not run.

    Raises:
        MusterError: it does not run there; the error has the profile's reason.
    """
    if found is not None and found.site.refused is not None:
        refused = found.site.refused
        wrong = f"this image does not run on {found.site.title}: {refused.value}"
        page = found.site.documentation or found.site.sources[refused.source].url
        raise MusterError(wrong, seen=found.why, fix=f"see {page}; if this is another site: --site off")


def evidence_for(path: Path, env: Environment) -> tuple[str, ...]:
    """The evidence that `env` belongs to the site with the profile at `path`; empty where there is none.

    Raises:
        MusterError: the profile can't be read.
    """
    try:
        # Not checked against the schema, which takes time: only the profile that matches is.
        recognise = tomllib.loads(head(path.read_text(encoding="utf-8-sig"))).get("recognise", {})
        return tuple(map(one_line, _evidence({kind: fact["value"] for kind, fact in recognise.items()}, env)))
    except (*UNREADABLE, AttributeError, KeyError, TypeError) as reason:
        raise MusterError(
            "a site's profile can't be read", seen=f"{path}: {reason}", fix=f"correct {path.name}, or --site off"
        ) from None


def head(text: str) -> str:
    """A profile's lines before its first table."""
    end = 0 if text.startswith("[") else text.find("\n[") + 1
    return text[:end] if end or text.startswith("[") else text


def _evidence(wanted: Mapping[str, Any], env: Environment) -> Iterator[str]:
    """The evidence that `env` belongs to the site with the patterns `wanted`."""
    for name in CLUSTER:
        if _is_like(env.get(name), wanted.get("cluster", ())):
            yield f"{name}={env[name]}"
            break
    host = env.host or ""
    # With its domain or without.
    if any(_is_like(name, wanted.get("hosts", ())) for name in (host, host.partition(".")[0])):
        yield f"host {host}"
    variables = wanted.get("variables", {})
    # All of them have to match: one alone may be set on another machine of the same centre too.
    if variables and all(_is_like(env.get(name), [pattern]) for name, pattern in variables.items()):
        for name in variables:
            yield f"{name}={env[name]}"


def _is_like(text: str | None, patterns: Iterable[str]) -> bool:
    return any(fnmatch.fnmatchcase((text or "").casefold(), pattern.casefold()) for pattern in patterns)


def _loaded(name: str, why: str, folder: Path) -> Recognised:
    from muster.entrypoint.sites import profiles

    return Recognised(name, one_line(why), profiles.load_site(name, folder))
