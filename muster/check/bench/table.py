"""The rows of a measurement: their figures, as a table and JSON."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from muster.check.bench.collectives import ALL
from muster.check.bench.sizes import shown
from muster.check.bench.timing import Timing

FACTORS = {one.name: one.bus for one in ALL}

GIGA = 1e9
"""Bandwidths are in 10^9 bytes a second, as nccl-tests' are."""

NONE = "N/A"
COLUMNS = ("collective", "size", "algbw", "busbw", "time", "p50", "p99", "values")
UNITS = "algbw and busbw in 10^9 bytes/s, as by nccl-tests; times in us"


@dataclass(frozen=True)
class Row:
    """A collective at a size.

    Attributes:
        size: bytes of the message; 0 where there is none.
        passes: the timing of each time it was measured; empty where it was not.
        num_checks: how often its values were checked, and were right on all ranks.
        num_wrong: how often they were wrong.
        note: why it was not measured.
    """

    collective: str
    size: int
    num_ranks: int
    passes: tuple[Timing, ...] = ()
    num_checks: int = 0
    num_wrong: int = 0
    note: str = ""

    @property
    def middle(self) -> Timing | None:
        """The timing of the pass that stands for the row: the middle one, by its mean."""
        ordered = sorted(self.passes, key=lambda one: one.mean_s)
        return ordered[(len(ordered) - 1) // 2] if ordered else None

    @property
    def time_s(self) -> float | None:
        return None if self.middle is None else self.middle.mean_s

    @property
    def algbw(self) -> float | None:
        """The algorithm bandwidth: size by time."""
        return self.size / self.time_s / GIGA if self.size and self.time_s else None

    @property
    def busbw(self) -> float | None:
        """The bus bandwidth; None where one rank has no others to speak to."""
        if self.algbw is None or self.num_ranks == 1:
            return None
        return self.algbw * FACTORS[self.collective](self.num_ranks)

    @property
    def is_right(self) -> bool | None:
        """Whether all values were; None where none were checked."""
        return None if self.num_checks + self.num_wrong == 0 else self.num_wrong == 0

    def figures(self) -> dict[str, Any]:
        """The row as JSON has it; what does not apply is None."""
        middle = self.middle
        return {
            "collective": self.collective,
            "size": self.size,
            "ranks": self.num_ranks,
            "time_us": _micro(self.time_s),
            "p50_us": _micro(middle and middle.p50_s),
            "p99_us": _micro(middle and middle.p99_s),
            "algbw": _short(self.algbw),
            "busbw": _short(self.busbw),
            "values_ok": self.is_right,
            "checks": self.num_checks + self.num_wrong,
            "passes_us": [_micro(one.mean_s) for one in self.passes],
            "note": self.note,
        }

    def cells(self) -> list[str]:
        """The row as the table has it, by COLUMNS."""
        if self.note:
            return [self.collective, *["-"] * (len(COLUMNS) - 2), self.note]
        middle = self.middle
        times = [NONE] * 3
        if middle is not None:
            times = [f"{each * 1e6:.1f}" for each in (middle.mean_s, middle.p50_s, middle.p99_s)]
        values = {True: "ok", False: "WRONG", None: NONE}[self.is_right]
        size = shown(self.size) if self.size else "-"
        return [self.collective, size, _bandwidth(self.algbw), _bandwidth(self.busbw), *times, values]


def _micro(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1e6, 3)


def _short(bandwidth: float | None) -> float | None:
    return None if bandwidth is None else float(f"{bandwidth:.6g}")


def _bandwidth(value: float | None) -> str:
    return NONE if value is None else f"{value:.4g}" if value < 1000 else f"{value:.0f}"


def print_rows(console: Console, rows: Sequence[Row]) -> None:
    """Prints a line for each row, with a gap between collectives."""
    console.print(Text(UNITS), soft_wrap=True)
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for name in COLUMNS:
        table.add_column(name, justify="left" if name in ("collective", "values") else "right", no_wrap=True)
    for number, row in enumerate(rows):
        if number and row.collective != rows[number - 1].collective:
            table.add_row()
        table.add_row(*row.cells())
    console.print(table)
