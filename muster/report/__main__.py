"""`python -m muster.report RUN...`: tables on the terminal, and a page with charts."""

from muster import interruption

if __name__ == "__main__":
    interruption.start("muster report")

import argparse
from pathlib import Path

from muster.errors import one_line
from muster.report import page, runs, scaling, tables


def report(given: list[str], output: Path | None) -> Path:
    """The page's file, after printing the tables and writing the page.

    Raises:
        MusterError: there is no run, it can't be read, or the folder is taken or can't be written.
    """
    found, notes = runs.read_all(given)
    folder = page.choose_folder(given, found, output)
    facts = tables.facts(found)
    scalings, left_out = scaling.find(found)
    notes += left_out
    tables.show(found, facts, scalings, notes)
    return page.write(folder, page.render(found, facts, scalings, notes))


def main() -> None:
    parser = argparse.ArgumentParser(prog="muster report")
    parser.add_argument("runs", nargs="+")
    parser.add_argument("--output", type=Path)
    asked = parser.parse_args()
    with interruption.command(parser.prog):
        print(f"page     {one_line(str(report(asked.runs, asked.output)))}")


if __name__ == "__main__":
    main()
