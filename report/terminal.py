"""The report on the terminal."""

import sys
from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from report import scaling
from report.facts import Section
from report.runs import Run
from report.scaling import Scaling
from report.units import NONE

WIDTH = 80
LABEL, LEAST = 27, 13


def show(runs: Sequence[Run], sections: Sequence[Section], scalings: Sequence[Scaling], notes: Sequence[str]) -> None:
    """Prints runs side by side, as many as fit, then how they scale, then what the reader should know."""
    console = Console(width=None if sys.stdout.isatty() else WIDTH, highlight=False)
    at_once = max(1, (console.width - LABEL) // (LEAST + 3))
    for start in range(0, len(runs), at_once):
        console.print(_side_by_side(runs[start : start + at_once], sections, start))
    for found in scalings:
        console.print()
        console.print(Text(found.title, style="bold"))
        heads, rows = scaling.rows(found)
        table = Table(box=box.ROUNDED, padding=(0, 1))
        for head in heads:
            table.add_column(head, justify="right", style="bold" if head == "efficiency" else "")
        for row in rows:
            table.add_row(*map(Text, row))
        console.print(table)
        for note in found.notes:
            console.print(Text(f"note: {note}", style="yellow"))
    if scalings:
        console.print(Text(scaling.DEFINITION, style="dim"))
    for note in [*notes, *(f"{run.label}: {note}" for run in runs for note in run.notes)]:
        console.print(Text(f"note: {note}", style="yellow"))


def _side_by_side(runs: Sequence[Run], sections: Sequence[Section], start: int) -> Table:
    table = Table(box=box.ROUNDED, padding=(0, 1))
    table.add_column("", style="dim", overflow="fold", width=LABEL - 4)
    for run in runs:
        table.add_column(Text(run.label), justify="right", overflow="fold", min_width=LEAST)
    for section in sections:
        for row in section.rows:
            cells = row.cells[start : start + len(runs)]
            if set(cells) != {NONE}:
                table.add_row(Text(row.label), *(Text(cell) for cell in cells))
        table.add_section()
    return table
