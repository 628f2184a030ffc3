"""The tables of runs as text, the same on the page and on the terminal, where `show` prints them."""

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from muster.errors import one_line
from muster.report.runs import Run, number
from muster.report.scaling import DEFINITION, Scaling
from muster.units import NONE, count, duration, memory, percent, perplexity, quantity

WIDTH = 80
"""The width of the output in characters, where it does not go to a terminal."""

LABEL, MIN_RUN_WIDTH = 27, 13
"""The width of the column of labels, and the least width of a run's column, in characters."""

ONE = {"images": "an image", "tokens": "a token"}

Facts = dict[str, list[str]]
"""Rows of a table by their labels, with a cell for each run."""


def facts(runs: Sequence[Run]) -> dict[str, Facts]:
    """The tables of `runs` by their headings, without the rows that have no known value."""
    seen = sorted({run.unit for run in runs})
    device = "GPU" if all((run.text("device") or "").startswith("cuda") for run in runs) else "process"
    cells: dict[str, list[tuple[str, Callable[[Run], str]]]] = {
        "What ran": [
            ("model", lambda run: run.text("model") or NONE),
            ("data", lambda run: run.text("data") or NONE),
            ("strategy", lambda run: run.text("strategy") or NONE),
            ("ranks", lambda run: count(run.world_size)),
            ("hosts", hosts),
            ("device", lambda run: run.text("versions", "gpu") or (run.text("device") or NONE).replace("cpu", "CPU")),
            ("precision", precision),
            ("batch of all ranks", lambda run: count(run.number("global_batch"))),
            ("parameters", lambda run: quantity(run.number("num_parameters"))),
        ],
        "Speed": [
            *((f"{unit} a second", _of_unit(unit, lambda run: quantity(run.rate))) for unit in seen),
            *((f"{unit} a second, a rank", _of_unit(unit, rate_per_rank)) for unit in seen),
            ("step, median", lambda run: duration(run.number("step_time_s", "p50"))),
            ("step, p95", lambda run: duration(run.number("step_time_s", "p95"))),
            ("step, p99", lambda run: duration(run.number("step_time_s", "p99"))),
            ("first step", lambda run: duration(run.number("first_step_s"))),
            ("steps measured", lambda run: count(run.number("num_timed_steps"))),
            ("time for compute", lambda run: percent(run.number("shares", "compute"))),
            ("time for communication", lambda run: percent(run.number("shares", "communication"))),
            ("time for data", lambda run: percent(run.number("shares", "data"))),
            ("waiting for stages", lambda run: percent(run.number("bubble_share"))),
            ("slowest rank, to median", slowest),
            ("FLOP/s a rank", lambda run: quantity(run.number("flops_per_second_per_rank"))),
            ("MFU", lambda run: percent(run.number("mfu"))),
            (f"peak memory, a {device}", lambda run: memory(run.number("peak_memory_gib"))),
            *((f"energy, {ONE[unit]}", _of_unit(unit, energy)) for unit in seen),
        ],
        "Learning": [
            # For next tokens accuracy says little.
            ("valid. accuracy", _of_unit("images", accuracy)),
            ("valid. accuracy, best", _of_unit("images", best_accuracy)),
            ("valid. perplexity", _of_unit("tokens", valid_perplexity)),
            ("training loss", lambda run: quantity(last(run, "train_loss"))),
            ("validation loss", lambda run: quantity(last(run, "valid_loss"))),
            ("steps in all", lambda run: count(run.last_step)),
            ("time of this run", lambda run: duration(run.number("seconds"))),
            ("state", state),
        ],
    }
    found: dict[str, Facts] = {}
    for title, rows in cells.items():
        known = {label: [cell(run) for run in runs] for label, cell in rows}
        found[title] = {label: row for label, row in known.items() if set(row) != {NONE}}
    return {title: rows for title, rows in found.items() if rows}


def of_scaling(scaling: Scaling) -> tuple[list[str], list[list[str]]]:
    heads = ["ranks", f"{scaling.unit} a second", "efficiency", "speed-up", "a rank", "batch"]
    return heads, [
        [
            count(point.world),
            quantity(point.rate),
            percent(point.efficiency),
            f"{point.speedup:.2f}",
            quantity(point.rate / point.world),
            count(point.batch),
        ]
        for point in scaling.points
    ]


def _of_unit(unit: str, cell: Callable[[Run], str]) -> Callable[[Run], str]:
    """`cell` for the runs that count in `unit`, else NONE: images and tokens can't be compared."""
    return lambda run: cell(run) if run.unit == unit else NONE


def hosts(run: Run) -> str:
    """The run's hosts: the names of a few, the number of many."""
    listed: Any = run.summary.get("hosts")
    names = [one_line(str(name)) for name in listed] if isinstance(listed, list) else []  # type: ignore[misc]
    if len(names) > 4:
        return f"{names[0]} ... {names[-1]} ({len(names)})"
    return " ".join(names) or count(run.number("num_nodes"))


def precision(run: Run) -> str:
    """bf16 or fp32, where the options say which."""
    bf16 = run.value("options", "bf16")
    return NONE if not isinstance(bf16, bool) else "bf16" if bf16 else "fp32"


def slowest(run: Run) -> str:
    """The slowest rank, its host, and how much longer than the median it took."""
    rank, ratio = run.number("slowest_rank", "rank"), run.number("slowest_rank", "ratio")
    if rank is None:
        return NONE
    host = run.text("slowest_rank", "host")
    more = f", {ratio - 1:+.0%}" if ratio is not None else ""
    return f"{rank:.0f}" + (f" on {host}" if host else "") + more


def energy(run: Run) -> str:
    value = run.number(f"energy_j_per_{run.unit.removesuffix('s')}")
    return NONE if value is None else f"{value:.3g} J"


def rate_per_rank(run: Run) -> str:
    return quantity(run.rate / run.world_size if run.rate is not None and run.world_size else None)


def last(run: Run, name: str, in_summary: str = "") -> float | None:
    """The last value of `name`: in the summary as `in_summary` or final_NAME, else in the last line that has it.

    A loss that has become nan or infinite is nan, and not an earlier value.
    """
    in_lines = (line.get(name) for line in reversed(run.lines))
    known = (run.value(in_summary or f"final_{name}") if run.is_finished else None, *in_lines)
    found = next((value for value in known if isinstance(value, int | float)), None)
    return math.nan if found is not None and number(found) is None else number(found)


def accuracy(run: Run) -> str:
    return percent(last(run, "valid_accuracy", "final_accuracy"), 2)


def best_accuracy(run: Run) -> str:
    best = run.number("best_accuracy")
    return percent(max([*run.curve("valid_accuracy").values(), *([] if best is None else [best])], default=None), 2)


def valid_perplexity(run: Run) -> str:
    loss = last(run, "valid_loss")
    return quantity(None if loss is None else perplexity(loss))


def state(run: Run) -> str:
    if not run.summary:
        return "not finished"
    if not run.is_finished:
        return f"not finished: speeds are those up to step {count(run.number('step'))}"
    return "done, resumed once or more" if run.text("resumed_from") else "done"


def show(runs: Sequence[Run], facts: Mapping[str, Facts], scalings: Sequence[Scaling], notes: Sequence[str]) -> None:
    """Prints the tables of the runs, as many side by side as fit, the tables of the scalings, and the notes."""
    # Here and not above: an error in reading must not wait until rich is loaded.
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(width=None if sys.stdout.isatty() else WIDTH, highlight=False)
    # On a narrower terminal a table would lose letters of its last column: the terminal breaks its lines instead.
    console.width = max(console.width, LABEL + MIN_RUN_WIDTH + 3)
    at_once = max(1, (console.width - LABEL) // (MIN_RUN_WIDTH + 3))
    for start in range(0, len(runs), at_once):
        shown = runs[start : start + at_once]
        table = Table(box=box.ROUNDED, padding=(0, 1))
        table.add_column("", style="dim", overflow="fold", width=LABEL - 4)
        for run in shown:
            table.add_column(Text(run.label), justify="right", overflow="fold", min_width=MIN_RUN_WIDTH)
        for rows in facts.values():
            for label, row in rows.items():
                cells = row[start : start + len(shown)]
                if set(cells) != {NONE}:
                    table.add_row(Text(label), *map(Text, cells))
            table.add_section()
        console.print(table)
    for found in scalings:
        heads, rows = of_scaling(found)
        table = Table(box=box.ROUNDED, padding=(0, 1))
        for head in heads:
            table.add_column(head, justify="right", style="bold" if head == "efficiency" else "", overflow="fold")
        for point, row in zip(found.points, rows, strict=True):
            color = "green" if point.efficiency >= 0.9 else "yellow" if point.efficiency >= 0.7 else "red"
            table.add_row(*map(Text, row), style=color)
        console.print()
        console.print(Text(found.title, style="bold"))
        console.print(table)
        for note in found.notes:
            console.print(Text(f"note: {note}", style="yellow"))
    if scalings:
        console.print(Text(DEFINITION, style="dim"))
    for note in [*notes, *(f"{run.label}: {note}" for run in runs for note in run.notes)]:
        console.print(Text(f"note: {note}", style="yellow"))
