"""`python -m muster.report RUN...`: tables on the terminal, and a page with charts."""

import sys

from muster import interruption

if __name__ == "__main__":
    interruption.start("muster report")

import argparse
import os
from pathlib import Path

from muster.errors import MusterError, one_line
from muster.report import charts, page, runs, scaling, tables


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
    html = page.render(found, facts, scalings, charts.of_scalings(scalings), charts.of_runs(found), notes)
    return page.write(folder, html)


def main() -> None:
    parser = argparse.ArgumentParser(prog="muster report")
    parser.add_argument("runs", nargs="+")
    parser.add_argument("--output", type=Path)
    asked = parser.parse_args()
    try:
        with interruption.clearing_up():
            made = report(asked.runs, asked.output)
        print(f"page     {one_line(str(made))}", flush=True)
    except BrokenPipeError:
        # Who reads has seen enough (head, less). Python would try again as it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        sys.exit(1)
    except MusterError as error:
        sys.stdout.flush()
        print(error, file=sys.stderr)
        sys.exit(error.code)
    interruption.finish()


if __name__ == "__main__":
    main()
