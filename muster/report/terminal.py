"""The report on the terminal."""

import sys
from collections.abc import Mapping, Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from muster.report import scaling, tables
from muster.report.runs import Run
from muster.report.scaling import Scaling
from muster.report.tables import Facts
from muster.units import NONE

WIDTH = 80
LABEL, LEAST = 27, 13


def show(runs: Sequence[Run], facts: Mapping[str, Facts], scalings: Sequence[Scaling], notes: Sequence[str]) -> None:
    """Prints runs side by side, as many as fit, how they scale, and what the reader should know."""
    console = Console(width=None if sys.stdout.isatty() else WIDTH, highlight=False)
    at_once = max(1, (console.width - LABEL) // (LEAST + 3))
    for start in range(0, len(runs), at_once):
        shown = runs[start : start + at_once]
        table = Table(box=box.ROUNDED, padding=(0, 1))
        table.add_column("", style="dim", overflow="fold", width=LABEL - 4)
        for run in shown:
            table.add_column(Text(run.label), justify="right", overflow="fold", min_width=LEAST)
        for rows in facts.values():
            for label, row in rows.items():
                cells = row[start : start + len(shown)]
                if set(cells) != {NONE}:
                    table.add_row(Text(label), *map(Text, cells))
            table.add_section()
        console.print(table)
    for found in scalings:
        heads, rows = tables.of_scaling(found)
        table = Table(box=box.ROUNDED, padding=(0, 1))
        for head in heads:
            table.add_column(head, justify="right", style="bold" if head == "efficiency" else "")
        for point, row in zip(found.points, rows, strict=True):
            color = "green" if point.efficiency >= 0.9 else "yellow" if point.efficiency >= 0.7 else "red"
            table.add_row(*map(Text, row), style=color)
        console.print()
        console.print(Text(found.title, style="bold"))
        console.print(table)
        for note in found.notes:
            console.print(Text(f"note: {note}", style="yellow"))
    if scalings:
        console.print(Text(scaling.DEFINITION, style="dim"))
    for note in [*notes, *(f"{run.label}: {note}" for run in runs for note in run.notes)]:
        console.print(Text(f"note: {note}", style="yellow"))
