"""`python -m muster.report RUN...`: tables on the terminal, and a page with charts."""

from muster import interruption

if __name__ == "__main__":
    interruption.start("muster report")

import argparse
from contextlib import suppress
from pathlib import Path

from muster.errors import one_line
from muster.report import page, runs, scaling, tables


def report(given: list[str], output: Path | None) -> Path:
    """The page's file, after printing the tables and writing the page.

    Raises:
        MusterError: there is no run, it can't be read, or the folder is taken or can't be written.
    """
    # `runs/*` names the page of an earlier `muster report runs` too.
    found, notes = runs.read_all([path for path in given if not is_page_alone(Path(path))] or given)
    folder = page.choose_folder(given, found, output)
    facts = tables.facts(found)
    scalings, left_out = scaling.find(found)
    notes += left_out
    tables.show(found, facts, scalings, notes)
    return page.write(folder, page.render(found, facts, scalings, notes))


def is_page_alone(folder: Path) -> bool:
    """Whether `folder` is a report's, and no run's."""
    with suppress(OSError):
        return page.is_report(folder) and not runs.holds_run(folder)
    return False  # what can't be looked at is told as any other


def main() -> None:
    parser = argparse.ArgumentParser(prog="muster report")
    parser.add_argument("runs", nargs="+")
    parser.add_argument("--output", type=Path)
    asked = parser.parse_args()
    with interruption.command(parser.prog):
        print(f"page     {one_line(str(report(asked.runs, asked.output)))}")


if __name__ == "__main__":
    main()
