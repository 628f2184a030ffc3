"""What a person sees: a line on what was measured, a table, and the verdict last."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from check.bench.results import Row
from check.bench.sizes import shown
from check.bench.verdict import Verdict

NONE = "N/A"

COLUMNS = ("collective", "size", "algbw", "busbw", "time", "p50", "p99", "values")
UNITS = "algbw and busbw in 10^9 bytes/s, as by nccl-tests; times in us"

COLOURS = {"PASS": "green", "FAIL": "red", "NO BASELINE": "yellow"}


def header(console: Console, lines: Sequence[str]) -> None:
    """What is measured, and over which network."""
    for line in lines:
        console.print(Text(line), soft_wrap=True)


def table(console: Console, rows: Sequence[Row]) -> None:
    """A line for each row, with a gap between collectives."""
    console.print(Text(UNITS), soft_wrap=True)
    found = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for name in COLUMNS:
        found.add_column(name, justify="left" if name in ("collective", "values") else "right", no_wrap=True)
    before = ""
    for row in rows:
        if before and row.collective != before:
            found.add_row()
        before = row.collective
        found.add_row(*cells(row))
    console.print(found)


def cells(row: Row) -> list[str]:
    """The words of a row's line."""
    if row.note:
        return [row.collective, *["-"] * (len(COLUMNS) - 2), row.note]
    middle = row.middle
    times = (
        [NONE] * 3 if middle is None else [f"{each * 1e6:.1f}" for each in (middle.mean_s, middle.p50_s, middle.p99_s)]
    )
    values = {True: "ok", False: "WRONG", None: NONE}[row.is_right]
    return [row.collective, shown(row.size) if row.size else "-", _of(row.algbw), _of(row.busbw), *times, values]


def _of(bandwidth: float | None) -> str:
    return NONE if bandwidth is None else f"{bandwidth:.4g}" if bandwidth < 1000 else f"{bandwidth:.0f}"


def answer(console: Console, verdict: Verdict) -> None:
    """What speaks against the run, then the verdict, in the last line."""
    for each in verdict.against:
        console.print(Text(str(each)), soft_wrap=True)
    console.print(Text(str(verdict), style=f"bold {COLOURS[verdict.word]}"), soft_wrap=True)
