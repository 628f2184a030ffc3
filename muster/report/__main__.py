"""`python -m muster.report RUN...`: tables on the terminal, and a page with charts, which needs no other file."""

from muster import interruption

if __name__ == "__main__":
    interruption.start("muster report")

import argparse
import os
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from muster.errors import MusterError, explaining, one_line
from muster.report import charts, scaling, tables
from muster.report.runs import Run, read_all, record
from muster.report.scaling import Scaling
from muster.report.tables import Facts
from muster.units import NONE

PAGE = "index.html"

MARK = '<meta name="generator" content="muster report">'
"""Distinguishes a report from other pages: only a report is overwritten."""


def report(given: list[str], output: Path | None) -> Path:
    """Prints the tables and writes the page; returns the page's path.

    Raises:
        MusterError: there is no run, it can't be read, or the folder is taken or can't be written.
    """
    found, notes = read_all(given)
    folder = choose_folder(given, found, output)
    facts = tables.facts(found)
    scalings, left_out = scaling.find(found)
    notes += left_out
    tables.show(found, facts, scalings, notes)
    return write(folder, render(found, facts, scalings, notes))


def choose_folder(given: Sequence[str], runs: Sequence[Run], output: Path | None) -> Path:
    """The report's folder: `output`, else report/ in the one folder or run that was given, else report/ here.

    Raises:
        MusterError: something other than a report is there.
    """
    if output is None:
        inside = Path(given[0]) if os.path.isdir(given[0]) else runs[0].folder  # given by one of its files
        output = (inside if len(given) == 1 else Path()) / "report"
    with _writing(output):
        is_taken = os.path.lexists(output) and not (output.is_dir() and not any(output.iterdir()))
        is_foreign = is_taken and not is_report(output)
    if is_foreign:
        raise MusterError(
            "the output exists already, and is no report: it is not overwritten",
            seen=str(output),
            fix="--output FOLDER: a new one, or that of an earlier report",
        )
    return output


def is_report(folder: Path) -> bool:
    """Whether `folder` contains a report's page, or an empty one, as a full disk leaves it.

    Raises:
        OSError: the page can't be read.
    """
    page = folder / PAGE
    text = page.read_text(encoding="utf-8", errors="replace") if page.is_file() else None
    return text is not None and (not text or MARK in text[:1000])


def write(folder: Path, html: str) -> Path:
    """Writes the page; returns its path.

    Raises:
        MusterError: the folder can't be written.
    """
    with _writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / PAGE).write_text(html, encoding="utf-8")
    return folder / PAGE


def _writing(folder: Path) -> AbstractContextManager[None]:
    return explaining("the report can't be written", seen=folder, fix="--output FOLDER that this user may write")


def render(runs: Sequence[Run], facts: Mapping[str, Facts], scalings: Sequence[Scaling], notes: Sequence[str]) -> str:
    """The page with its charts as HTML, from the template page.html. The same input gives the same bytes."""
    import jinja2
    from markupsafe import Markup

    def shown(value: Any) -> Any:
        if isinstance(value, bool):
            return "yes" if value else "no"
        # The output of a macro of the template is escaped already.
        if isinstance(value, Markup):
            return value
        return NONE if value is None else one_line(str(value))

    # All values are escaped, and control characters in them are written out.
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        finalize=shown,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("page.html").render(
        title=runs[0].label if len(runs) == 1 else f"{len(runs)} runs",
        lead="; ".join(dict.fromkeys(run.work for run in runs if run.summary)),
        colors=charts.COLORS,
        notes=notes,
        runs=runs,
        facts=facts,
        scalings=[(found, *tables.of_scaling(found)) for found in scalings],
        definition=scaling.DEFINITION,
        of_scalings=charts.of_scalings(scalings),
        of_runs=charts.of_runs(runs),
        details=[(run, _software(run), record(run.value("options"))) for run in runs],
    )


def _software(run: Run) -> dict[str, Any]:
    """The run's folder, the checkpoint that it resumed from, its trace, and the versions of its software."""
    known = {"folder": str(run.folder), "resumed from": run.text("resumed_from"), "trace": run.text("profile")}
    return {name: value for name, value in {**known, **record(run.value("versions"))}.items() if value is not None}


def main() -> None:
    parser = argparse.ArgumentParser(prog="muster report")
    parser.add_argument("runs", nargs="+")
    parser.add_argument("--output", type=Path)
    asked = parser.parse_args()
    with interruption.command(parser.prog):
        print(f"page     {one_line(str(report(asked.runs, asked.output)))}")


if __name__ == "__main__":
    main()
