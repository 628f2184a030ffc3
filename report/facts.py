"""Runs side by side: the rows of the tables, the same on the terminal and on the page."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from report import units
from report.runs import Run, number, record
from report.units import NONE
from train.errors import one_line


@dataclass(frozen=True)
class Row:
    """One fact of all runs.

    Attributes:
        cells: as text, one a run.
    """

    label: str
    cells: tuple[str, ...]


@dataclass(frozen=True)
class Section:
    """Rows that belong together."""

    title: str
    rows: tuple[Row, ...]


def sections(runs: Sequence[Run]) -> list[Section]:
    """What is known of `runs`; rows of which nothing is known are left out."""
    seen = sorted({run.unit for run in runs})
    device = "GPU" if all((run.text("device") or "").startswith("cuda") for run in runs) else "process"
    tables: dict[str, list[tuple[str, Callable[[Run], str]]]] = {
        "What ran": [
            ("model", lambda run: run.text("model") or NONE),
            ("data", lambda run: run.text("data") or NONE),
            ("strategy", lambda run: run.text("strategy") or NONE),
            ("ranks", lambda run: units.count(run.world_size)),
            ("hosts", hosts),
            ("device", hardware),
            ("precision", precision),
            ("batch of all ranks", lambda run: units.count(run.number("global_batch"))),
            ("parameters", lambda run: units.parameters(run.number("num_parameters"))),
        ],
        "Speed": [
            *((f"{unit} a second", _of_unit(unit, lambda run: units.rate(run.rate))) for unit in seen),
            *((f"{unit} a second, a rank", _of_unit(unit, lambda run: units.rate(run.rate_per_rank))) for unit in seen),
            ("step, median", lambda run: units.seconds(run.number("step_time_s", "p50"))),
            ("step, p95", lambda run: units.seconds(run.number("step_time_s", "p95"))),
            ("step, p99", lambda run: units.seconds(run.number("step_time_s", "p99"))),
            ("first step", lambda run: units.seconds(run.number("first_step_s"))),
            ("steps measured", lambda run: units.count(run.number("num_timed_steps"))),
            ("time for compute", lambda run: units.share(run.number("shares", "compute"))),
            ("time for communication", lambda run: units.share(run.number("shares", "communication"))),
            ("time for data", data_share),
            ("waiting for stages", lambda run: units.share(run.number("bubble_share"))),
            ("slowest rank, to median", slowest),
            ("FLOP/s a rank", lambda run: units.rate(run.number("flops_per_second_per_rank"))),
            ("MFU", lambda run: units.share(run.number("mfu"))),
            (f"peak memory, a {device}", lambda run: units.memory(run.number("peak_memory_gib"))),
            *((f"energy, {ONE[unit]}", _of_unit(unit, energy)) for unit in seen),
        ],
        "Learning": [
            ("valid. accuracy", lambda run: units.accuracy(accuracy(run))),
            ("valid. accuracy, best", lambda run: units.accuracy(best_accuracy(run))),
            ("training loss", lambda run: units.loss(last(run, "train_loss"))),
            ("validation loss", lambda run: units.loss(last(run, "valid_loss"))),
            ("steps in all", lambda run: units.count(run.last_step)),
            ("time of this run", lambda run: units.duration(run.number("seconds"))),
            ("state", state),
        ],
    }
    found: list[Section] = []
    for title, rows in tables.items():
        made = [Row(label, tuple(cell(run) for run in runs)) for label, cell in rows]
        kept = tuple(row for row in made if set(row.cells) != {NONE})
        if kept:
            found.append(Section(title, kept))
    return found


ONE = {"images": "an image", "tokens": "a token"}


def _of_unit(unit: str, cell: Callable[[Run], str]) -> Callable[[Run], str]:
    """`cell` for the runs that count `unit`: images and tokens can't be compared."""
    return lambda run: cell(run) if run.unit == unit else NONE


def hosts(run: Run) -> str:
    """The run's hosts: the names of a few, the number of many."""
    listed: Any = run.summary.get("hosts")
    names = [one_line(str(name)) for name in listed] if isinstance(listed, list) else []  # type: ignore[misc]
    if len(names) > 4:
        return f"{names[0]} ... {names[-1]} ({len(names)})"
    return " ".join(names) or units.count(run.number("num_nodes"))


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
    return units.share(run.number("data_wait_share") if new is None else new)


def slowest(run: Run) -> str:
    """The rank that took longest, its host, and by how much."""
    found = record(run.summary.get("slowest_rank"))
    rank, ratio = number(found.get("rank")), number(found.get("ratio"))
    if rank is None:
        return NONE
    host = f" on {one_line(str(found['host']))}" if found.get("host") else ""
    return f"{rank:.0f}{host}" + (f", {ratio - 1:+.0%}".replace("%", " %") if ratio is not None else "")


def energy(run: Run) -> str:
    """Joules an image, or a token."""
    value = run.number(f"energy_j_per_{run.unit.removesuffix('s')}")
    return NONE if value is None else f"{value:.3g} J"


def last(run: Run, name: str) -> float | None:
    """The value of `name` at the end: by the summary, else by the last line that has it."""
    value = run.number(f"final_{name}") if run.is_finished else None
    if value is None:
        known = [found for line in run.lines if (found := number(line.get(name))) is not None]
        value = known[-1] if known else None
    return value


def accuracy(run: Run) -> float | None:
    """The last validation's accuracy, from 0 to 1."""
    value = run.number("final_accuracy") if run.is_finished else None
    return last(run, "valid_accuracy") if value is None else value


def best_accuracy(run: Run) -> float | None:
    """The best validation's accuracy, from 0 to 1."""
    known = [number(line.get("valid_accuracy")) for line in run.lines] + [run.number("best_accuracy")]
    return max((value for value in known if value is not None), default=None)


def state(run: Run) -> str:
    """Whether the run came to its end."""
    if not run.summary:
        return "not finished"
    if not run.is_finished:
        return f"goes on: speeds are of the part up to step {units.count(run.number('step'))}"
    return "done, resumed once or more" if run.text("resumed_from") else "done"
