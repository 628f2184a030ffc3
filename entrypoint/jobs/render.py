"""A profile and a wanted job -> a job script, by the template of the profile's scheduler."""

from pathlib import Path
from typing import Any

from entrypoint import ROOT
from entrypoint.jobs import quoting, walltime
from entrypoint.jobs.context import context
from entrypoint.jobs.directives import mentions
from entrypoint.jobs.wanted import Wanted
from entrypoint.sites.schema import Site

TEMPLATES = ROOT / "jobs" / "templates"


def script(name: str, site: Site, wanted: Wanted, file: str, templates: Path = TEMPLATES) -> str:
    """The job script for `site`, whose profile is called `name`; its own file is called `file`.

    Raises:
        MusterError: this site does not run such jobs, or a value can't be written where it belongs.
    """
    return by_template(f"{site.scheduler.replace('_', '-')}.j2", context(name, site, wanted, file), templates)


def by_template(template: str, names: dict[str, Any], templates: Path = TEMPLATES) -> str:
    """What the template of that file name makes of `names`; a name that it has and they don't is an error of ours."""
    # Here and not above: no other command needs it.
    import jinja2

    engine = jinja2.Environment(
        loader=jinja2.FileSystemLoader(templates),
        undefined=jinja2.StrictUndefined,
        autoescape=False,
        # A shell's ${#list[@]} would begin a comment.
        comment_start_string="<#",
        comment_end_string="#>",
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    engine.filters.update(  # pyright: ignore[reportUnknownMemberType]
        word=quoting.word,
        words=quoting.words,
        expanded=quoting.expanded,
        directive=quoting.directive,
        comment=quoting.comment,
        wrapped=quoting.wrapped,
        clock=walltime.clock,
        hours_and_minutes=walltime.hours_and_minutes,
        mentions=mentions,
    )
    return engine.get_template(template).render(names)
