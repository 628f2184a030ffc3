"""`python -m report RUN...`: the tables, the plots and the page."""

import argparse
import sys
from pathlib import Path

from report import charts, facts, folder, page, runs, scaling
from train.errors import MusterError, one_line


def report(given: list[str], output: Path | None) -> Path:
    """The page's file, after printing the tables and writing page and plots.

    Raises:
        MusterError: there is no run, it can't be read, or the folder is taken or can't be written.
    """
    found, notes = runs.read_all(given)
    to = folder.choose(given, found, output)
    sections = facts.sections(found)
    scalings, left_out = scaling.find(found)
    notes += left_out
    # Here and not above: what can't be read must not wait for rich.
    from report import terminal

    terminal.show(found, sections, scalings, notes)
    drawn = [(one, charts.of_scaling(one, index)) for index, one in enumerate(scalings)]
    over_steps = charts.of_runs(found)
    html = page.page(found, sections, drawn, over_steps, notes)
    return folder.write(to, html, [*(chart for _, of_one in drawn for chart in of_one), *over_steps])


def main() -> None:
    parser = argparse.ArgumentParser(prog="muster report")
    parser.add_argument("runs", nargs="+")
    parser.add_argument("--output", type=Path)
    asked = parser.parse_args()
    try:
        made = report(asked.runs, asked.output)
    except MusterError as error:
        sys.stdout.flush()
        print(error, file=sys.stderr)
        sys.exit(error.code)
    num_plots = len(list(made.parent.glob("*.png")))
    print(f"page     {one_line(str(made))}\nplots    {num_plots} PNG files beside it")


if __name__ == "__main__":
    main()
