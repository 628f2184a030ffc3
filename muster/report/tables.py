"""Facts of runs as text: rows of the tables, the same on the terminal and on the page."""

from collections.abc import Callable, Sequence
from typing import Any

from muster.errors import one_line
from muster.report.runs import Run, number, record, records
from muster.report.scaling import Scaling

NONE = "-"

ONE = {"images": "an image", "tokens": "a token"}

MOST_RANKS = 64


Facts = dict[str, list[str]]
"""Rows of a table by their labels, with a cell for each run."""


def facts(runs: Sequence[Run]) -> dict[str, Facts]:
    """What is known of `runs`, by the heading; rows of which nothing is known are left out."""
    seen = sorted({run.unit for run in runs})
    device = "GPU" if all((run.text("device") or "").startswith("cuda") for run in runs) else "process"
    cells: dict[str, list[tuple[str, Callable[[Run], str]]]] = {
        "What ran": [
            ("model", lambda run: run.text("model") or NONE),
            ("data", lambda run: run.text("data") or NONE),
            ("strategy", lambda run: run.text("strategy") or NONE),
            ("ranks", lambda run: count(run.world_size)),
            ("hosts", hosts),
            ("device", hardware),
            ("precision", precision),
            ("batch of all ranks", lambda run: count(run.number("global_batch"))),
            ("parameters", lambda run: quantity(run.number("num_parameters"))),
        ],
        "Speed": [
            *((f"{unit} a second", _of_unit(unit, lambda run: quantity(run.rate))) for unit in seen),
            *((f"{unit} a second, a rank", _of_unit(unit, lambda run: quantity(run.rate_per_rank))) for unit in seen),
            ("step, median", lambda run: duration(run.number("step_time_s", "p50"))),
            ("step, p95", lambda run: duration(run.number("step_time_s", "p95"))),
            ("step, p99", lambda run: duration(run.number("step_time_s", "p99"))),
            ("first step", lambda run: duration(run.number("first_step_s"))),
            ("steps measured", lambda run: count(run.number("num_timed_steps"))),
            ("time for compute", lambda run: percent(run.number("shares", "compute"))),
            ("time for communication", lambda run: percent(run.number("shares", "communication"))),
            ("time for data", data_share),
            ("waiting for stages", lambda run: percent(run.number("bubble_share"))),
            ("slowest rank, to median", slowest),
            ("FLOP/s a rank", lambda run: quantity(run.number("flops_per_second_per_rank"))),
            ("MFU", lambda run: percent(run.number("mfu"))),
            (f"peak memory, a {device}", lambda run: memory(run.number("peak_memory_gib"))),
            *((f"energy, {ONE[unit]}", _of_unit(unit, energy)) for unit in seen),
        ],
        "Learning": [
            ("valid. accuracy", lambda run: percent(accuracy(run), digits=2)),
            ("valid. accuracy, best", lambda run: percent(best_accuracy(run), digits=2)),
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
    """The heads and the rows of a scaling's table."""
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


def of_ranks(run: Run) -> tuple[list[str], list[list[str]]]:
    """The heads and the rows of the run's ranks: the slowest of them where there are too many."""
    found = records(run.summary.get("ranks"))
    if len(found) > MOST_RANKS:
        found = sorted(found, key=lambda rank: -(number(rank.get("busy_s")) or 0.0))[:MOST_RANKS]
    slowest_rank = run.number("slowest_rank", "rank")
    heads = ["rank", "host", "busy a step", "step", "waiting for data", "peak memory"]
    return heads, [
        [
            count(number(rank.get("rank"))) + (" (slowest)" if number(rank.get("rank")) == slowest_rank else ""),
            str(rank.get("host") or NONE),
            duration(number(rank.get("busy_s"))),
            duration(number(rank.get("step_s"))),
            duration(number(rank.get("data_wait_s"))),
            memory(number(rank.get("peak_memory_gib"))),
        ]
        for rank in found
    ]


def _of_unit(unit: str, cell: Callable[[Run], str]) -> Callable[[Run], str]:
    """`cell` for the runs that count `unit`: images and tokens can't be compared."""
    return lambda run: cell(run) if run.unit == unit else NONE


def hosts(run: Run) -> str:
    """The run's hosts: the names of a few, the number of many."""
    listed: Any = run.summary.get("hosts")
    names = [one_line(str(name)) for name in listed] if isinstance(listed, list) else []  # type: ignore[misc]
    if len(names) > 4:
        return f"{names[0]} ... {names[-1]} ({len(names)})"
    return " ".join(names) or count(run.number("num_nodes"))


def hardware(run: Run) -> str:
    """The card's name, or CPU."""
    return run.text("versions", "gpu") or (run.text("device") or NONE).replace("cpu", "CPU")


def precision(run: Run) -> str:
    """bf16 or fp32, as far as the options tell."""
    bf16 = record(run.summary.get("options")).get("bf16")
    return {True: "bf16", False: "fp32"}.get(bf16, NONE) if isinstance(bf16, bool) else NONE


def data_share(run: Run) -> str:
    """The share of a step that went to waiting for data; by the older name where the new one is not there."""
    new = run.number("shares", "data")
    return percent(run.number("data_wait_share") if new is None else new)


def slowest(run: Run) -> str:
    """The rank that took longest, its host, and by how much."""
    rank, ratio = run.number("slowest_rank", "rank"), run.number("slowest_rank", "ratio")
    if rank is None:
        return NONE
    host = run.text("slowest_rank", "host")
    more = f", {ratio - 1:+.0%}".replace("%", " %") if ratio is not None else ""
    return f"{rank:.0f}" + (f" on {host}" if host else "") + more


def energy(run: Run) -> str:
    """Joules an image, or a token."""
    value = run.number(f"energy_j_per_{run.unit.removesuffix('s')}")
    return NONE if value is None else f"{value:.3g} J"


def last(run: Run, name: str) -> float | None:
    """The value of `name` at the end: by the summary, else by the last line that has it."""
    value = run.number(f"final_{name}") if run.is_finished else None
    return next(reversed(run.curve(name).values()), None) if value is None else value


def accuracy(run: Run) -> float | None:
    """The last validation's accuracy, from 0 to 1."""
    value = run.number("final_accuracy") if run.is_finished else None
    return last(run, "valid_accuracy") if value is None else value


def best_accuracy(run: Run) -> float | None:
    """The best validation's accuracy, from 0 to 1."""
    best = run.number("best_accuracy")
    return max([*run.curve("valid_accuracy").values(), *([] if best is None else [best])], default=None)


def state(run: Run) -> str:
    """Whether the run came to its end."""
    if not run.summary:
        return "not finished"
    if not run.is_finished:
        return f"goes on: speeds are of the part up to step {count(run.number('step'))}"
    return "done, resumed once or more" if run.text("resumed_from") else "done"


def quantity(value: float | None) -> str:
    """A number in four digits, thousands set apart, with M, G, T or P where it is large."""
    if value is None:
        return NONE
    for size, letter in ((1e15, " P"), (1e12, " T"), (1e9, " G"), (1e6, " M")):
        if abs(value) >= size:
            return f"{value / size:.4g}{letter}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def count(value: float | None) -> str:
    """A whole number, thousands set apart."""
    return NONE if value is None else f"{value:,.0f}"


def percent(value: float | None, digits: int = 1) -> str:
    """A part of 1, in percent."""
    return NONE if value is None else f"{value * 100:.{digits}f} %"


def duration(value: float | None) -> str:
    """A time in seconds, as it reads well: 11.7 ms, 1.67 s, 3 min 20 s, 2 h 05 min."""
    if value is None:
        return NONE
    if abs(value) < 1:
        return f"{value * 1e3:.3g} ms"
    if abs(value) < 60:
        return f"{value:.2f} s"
    whole = round(value)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def memory(value: float | None) -> str:
    """GiB."""
    return NONE if value is None else f"{value:.{2 if value < 10 else 1}f} GiB"
