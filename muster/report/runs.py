"""A run as read from its files: finished, in progress, killed while writing, or written by an older version."""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from muster.errors import MusterError, one_line
from muster.paths import content_of
from muster.units import by_numbers, plural

SUMMARY, METRICS = "summary.json", "metrics.jsonl"

LARGEST = 1e300
"""The largest number that can be drawn: charts need room above it."""

USAGE = "muster report RUN...: a run's folder, or a folder with runs in it"

Record = Mapping[str, Any]


@dataclass(frozen=True)
class Run:
    """The results of one run.

    Attributes:
        label: its folder's name, after as much of the path as distinguishes it from the others.
        summary: the content of summary.json; empty where there is none yet.
        lines: the records of metrics.jsonl, in order.
        notes: what could not be read.
    """

    folder: Path
    label: str
    summary: Record
    lines: tuple[Record, ...]
    notes: tuple[str, ...] = ()

    @property
    def is_finished(self) -> bool:
        """True where there is a summary, of the last step in metrics.jsonl: the run was not resumed after it."""
        end, logged = self.number("step"), [number(line.get("step")) or 0.0 for line in self.lines]
        return bool(self.summary) and (end is None or not logged or max(logged) == end)

    @property
    def last_step(self) -> int:
        """The last step in metrics.jsonl or in the summary, whichever is later."""
        return int(max([*self.curve("step"), self.number("step") or 0.0]))

    @property
    def work(self) -> str:
        return f"{self.text('model')} on {self.text('data')}, {self.text('strategy')}"

    @property
    def unit(self) -> str:
        """The unit in which throughput is counted: images or tokens."""
        known = {key for record in (self.summary, *self.lines) for key in record}
        return "tokens" if "tokens_per_second" in known else "images"

    @property
    def rate(self) -> float | None:
        """Images or tokens a second, of all ranks together."""
        return self.number(f"{self.unit}_per_second")

    @property
    def world_size(self) -> int | None:
        world = self.number("world_size")
        return int(world) if world and world >= 1 else None

    def number(self, *path: str) -> float | None:
        """The number at `path` in the summary; None where there is none."""
        return number(self.value(*path))

    def text(self, *path: str) -> str | None:
        """The text at `path` in the summary, on one line; None where there is none."""
        value = self.value(*path)
        return one_line(value) if isinstance(value, str) and value else None

    def curve(self, name: str) -> dict[float, float]:
        """The values of `name` in metrics.jsonl by their steps, ascending; of two at one step the later."""
        pairs = [(number(line.get("step")), number(line.get(name))) for line in self.lines]
        return dict(sorted({step: value for step, value in pairs if step is not None and value is not None}.items()))

    def value(self, *path: str) -> Any:
        """The value at `path` in the summary; None where there is none."""
        value: Any = self.summary
        for name in path:
            value = record(value).get(name)
        return value


def number(value: Any) -> float | None:
    """`value` as a float where it is a number that can be drawn, else None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if abs(value) <= LARGEST else None


def record(value: Any) -> Record:
    """`value` where it is a JSON object, else an empty one."""
    return cast("Record", value) if isinstance(value, dict) else {}


def read_all(given: Sequence[str]) -> tuple[list[Run], list[str]]:
    """The runs at the paths `given`, each once, with distinct labels; and notes on the runs that are left out.

    Raises:
        MusterError: a path does not exist, or there is no run that can be read.
    """
    runs: dict[Path, Run] = {}
    refused: list[MusterError] = []
    for text in given:
        try:
            for run in _read(Path(text), refused):
                runs.setdefault(run.folder.resolve(), run)
        except MusterError as error:
            if not os.path.exists(text):
                raise
            refused.append(error)
    if not runs:
        raise refused[0]
    names = [run.label for run in runs.values()]
    doubled = [folder for folder, run in runs.items() if names.count(run.label) > 1]
    # Equal names get as much of the path before them as distinguishes them.
    common = os.path.commonpath([folder.parent for folder in doubled]) if doubled else ""
    labels = [os.path.relpath(folder, common) if folder in doubled else run.label for folder, run in runs.items()]
    notes = [f"left out: {one_line(error.seen)}: {one_line(error.wrong)}" for error in refused]
    return [replace(run, label=one_line(label)) for run, label in zip(runs.values(), labels, strict=True)], notes


def _read(path: Path, refused: list[MusterError]) -> list[Run]:
    """The run at `path`, or the runs in the folder `path`; errors of unreadable ones there are added to `refused`."""
    folder = path.parent if path.name in (SUMMARY, METRICS) and not os.path.isdir(path) else path
    if holds_run(folder):
        return [_open(folder)]
    if not os.path.isdir(folder):
        raise MusterError("there is no run at this path", seen=str(path), fix=USAGE)
    found: list[Run] = []
    num_refused = len(refused)
    for one in sorted(folder.iterdir(), key=lambda path: by_numbers(path.name)):
        try:
            if holds_run(one):
                found.append(_open(one))
        except MusterError as error:
            refused.append(error)  # it must not hide the others
    if not found and len(refused) == num_refused:
        seen = f"{path}, without {SUMMARY} or {METRICS} in it or in its folders"
        raise MusterError("there is no run in this folder", seen=seen, fix=USAGE)
    return found


def holds_run(folder: Path) -> bool:
    """Whether `folder` holds a run's files.

    Raises:
        MusterError: the folder may not be searched.
    """
    if os.path.isdir(folder) and not os.access(folder, os.R_OK | os.X_OK, effective_ids=True):
        raise MusterError(
            "the folder can't be read: Permission denied",
            seen=str(folder),
            fix="its owner can give access: chmod -R u+rwX,go+rX FOLDER; or leave it out",
        )
    return any(os.path.isfile(folder / name) for name in (SUMMARY, METRICS))


def _open(folder: Path) -> Run:
    """The run in `folder`.

    Raises:
        MusterError: a file can't be read, its summary is damaged, or it has no results yet.
    """
    summary: Any = {}
    text, path = "", folder / SUMMARY
    fix = "leave this run out; or remove the file: metrics.jsonl is then read alone"
    try:
        if path.exists():
            summary = json.loads(content_of(path))
            if not isinstance(summary, dict) or not summary:
                raise MusterError("a file of the run is damaged", seen=f"{path}: it holds no JSON object", fix=fix)
        path, fix = folder / METRICS, "leave this run out"
        if path.exists():
            text = content_of(path).decode(errors="replace")
    except (OSError, ValueError, RecursionError) as error:
        raise MusterError("a file of the run can't be read", seen=f"{path}: {error}", fix=fix) from None
    kept: list[Record] = []
    num_damaged = 0
    lines = text.split("\n")
    for index, line in enumerate(lines):
        try:
            found: Any = json.loads(line) if line.strip() else {}
        except (ValueError, RecursionError):
            found = None
        if isinstance(found, dict):
            kept += [cast("Record", found)] if found else []
        elif index + 1 < len(lines):  # not the last one, which a kill may have cut off
            num_damaged += 1
    if not summary and not kept:
        raise MusterError(
            "the run has no results yet",
            seen=f"{path}: no line that can be read",
            fix="try again when it has trained some steps; or leave this run out",
        )
    notes = (f"{plural(num_damaged, 'line')} of {METRICS} could not be read",) if num_damaged else ()
    label = folder.resolve().name or str(folder.resolve())
    return Run(folder, label, cast("Record", summary), tuple(kept), notes)
