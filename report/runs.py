"""A run, as its files tell it: whole, under way, killed while it wrote, or of an older version."""

import json
import os
import re
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

from train.errors import MusterError, one_line

SUMMARY, METRICS, SCALE = "summary.json", "metrics.jsonl", "scale.json"

LARGEST = 1e300
"""No number beyond it can be drawn: plots need room above it."""

Record = Mapping[str, Any]


@dataclass(frozen=True)
class Run:
    """What one run left.

    Attributes:
        label: its folder's name, with as much of the path before it as tells it from the others.
        summary: summary.json; empty where the run has not come to its end.
        lines: the records of metrics.jsonl, in order.
        scale: scale.json of the folder around it, which `train scale` leaves; else empty.
        notes: what could not be read.
    """

    folder: Path
    label: str
    summary: Record
    lines: tuple[Record, ...]
    scale: Record = field(default_factory=dict[str, Any])
    notes: tuple[str, ...] = ()

    @property
    def is_finished(self) -> bool:
        """True where there is a summary, and no step was logged after it."""
        end = self.number("step")
        return bool(self.summary) and (end is None or self.last_step <= end)

    @property
    def last_step(self) -> int:
        """The last step that anything is known of."""
        steps = [number(line.get("step")) or 0.0 for line in self.lines]
        return int(max([*steps, self.number("step") or 0.0]))

    @property
    def unit(self) -> str:
        """What is counted a second: images or tokens."""
        known = {key for record in (self.summary, *self.lines) for key in record}
        return "tokens" if "tokens_per_second" in known else "images"

    @property
    def rate(self) -> float | None:
        """Images or tokens a second, of all ranks together."""
        return self.number(f"{self.unit}_per_second")

    @property
    def rate_per_rank(self) -> float | None:
        """Images or tokens a second, of one rank."""
        if self.rate is not None and self.world_size:
            return self.rate / self.world_size
        return self.number(f"{self.unit}_per_second_per_rank")

    @property
    def world_size(self) -> int | None:
        """The number of ranks."""
        world = self.number("world_size")
        return int(world) if world and world >= 1 else None

    def number(self, *path: str) -> float | None:
        """The number at `path` in the summary; None where there is none."""
        value: Any = self.summary
        for name in path:
            value = record(value).get(name)
        return number(value)

    def text(self, *path: str) -> str | None:
        """The text at `path` in the summary, on one line; None where there is none."""
        value: Any = self.summary
        for name in path:
            value = record(value).get(name)
        return one_line(value) if isinstance(value, str) and value else None

    def of_kind(self, kind: str) -> list[Record]:
        """The records of metrics.jsonl of one kind."""
        return [line for line in self.lines if line.get("kind") == kind]


def number(value: Any) -> float | None:
    """`value` where it is a number that can be drawn, else None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if abs(value) <= LARGEST else None


def record(value: Any) -> Record:
    """`value` where it is an object, else an empty one."""
    return cast("Record", value) if isinstance(value, dict) else {}


def records(value: Any) -> list[Record]:
    """The objects in the list `value`."""
    return (
        [record(item) for item in cast("list[Any]", value) if isinstance(item, dict)] if isinstance(value, list) else []
    )


def read_all(given: Sequence[str]) -> tuple[list[Run], list[str]]:
    """The runs that the paths `given` stand for, each once, with labels that differ; and notes on what is left out.

    Raises:
        MusterError: a path holds no run, or what it holds can't be read.
    """
    runs: dict[Path, Run] = {}
    notes: list[str] = []
    for text in given:
        for run in _read(Path(text), notes):
            runs.setdefault(run.folder.resolve(), run)
    labels = _labels(list(runs))
    return [replace(run, label=label) for run, label in zip(runs.values(), labels, strict=True)], notes


def _read(path: Path, notes: list[str]) -> Iterator[Run]:
    folder = path.parent if path.name in (SUMMARY, METRICS) and os.path.isfile(path) else path
    if _holds_run(folder):
        yield _open(folder)
        return
    if not os.path.isdir(folder):
        # Another error where the folder around it is closed.
        _is_file(folder)
        raise MusterError(
            "there is no run", seen=str(path), fix="muster report RUN...: a run's folder, or a folder with runs in it"
        )
    found, damaged = 0, None
    for inside in _runs_in(folder):
        try:
            if isinstance(inside, MusterError):
                raise inside
            yield _open(inside)
            found += 1
        except MusterError as error:
            # One that can't be read must not hide the others.
            damaged = damaged or error
            notes.append(f"left out: {one_line(error.seen)}: {one_line(error.wrong)}")
    if not found:
        raise damaged or MusterError(
            "there is no run in this folder",
            seen=f"{path}, without {SUMMARY} or {METRICS} in it or in its folders",
            fix="muster report RUN...: a run's folder, or a folder with runs in it",
        )


def _holds_run(folder: Path) -> bool:
    # Not by Path.is_file, which raises where a folder is closed to this user or a name is too long.
    return any(os.path.isfile(folder / name) for name in (SUMMARY, METRICS))


def _runs_in(folder: Path, *, is_scale: bool = False) -> Iterator[Path | MusterError]:
    """The runs in `folder`, and those that a `train scale` in it made; an error for each folder that is closed.

    Raises:
        MusterError: `folder` can't be read itself.
    """
    for inside in _entries(folder):
        if _holds_run(inside):
            yield inside
        elif os.path.isdir(inside):
            try:
                if _is_file(inside / SCALE) and not is_scale:
                    yield from _runs_in(inside, is_scale=True)
            except MusterError as error:
                yield error


def _is_file(path: Path) -> bool:
    """Whether there is a file; MusterError where the folder around it may not be searched."""
    try:
        return stat.S_ISREG(os.stat(path).st_mode)
    except PermissionError as error:
        raise _closed(path.parent, error) from None
    except OSError:
        return False


def _entries(folder: Path) -> list[Path]:
    """What is in `folder`, sorted; MusterError where it can't be read."""
    # First: one that may be listed but not searched would look empty.
    _is_file(folder / SCALE)
    try:
        return _sorted(folder.iterdir())
    except OSError as error:
        raise _closed(folder, error) from None


def _closed(folder: Path, error: OSError) -> MusterError:
    return MusterError(
        f"the folder can't be read: {error.strerror}",
        seen=str(folder),
        fix="its owner may open it: chmod -R u+rwX,go+rX FOLDER; or leave it out",
    )


def _sorted(paths: Iterable[Path]) -> list[Path]:
    """`paths` as people sort them: w2 before w16."""
    return sorted(paths, key=lambda path: [(word.isdecimal(), int(word) if word.isdecimal() else 0, word)
                                           for word in re.findall(r"[0-9]+|[^0-9]+", path.name)])  # fmt: skip


def _open(folder: Path) -> Run:
    """The run in `folder`.

    Raises:
        MusterError: its summary is damaged, or it holds no result yet.
    """
    summary = _summary(folder / SUMMARY)
    lines, num_damaged = _lines(folder / METRICS)
    if not summary and not lines:
        raise MusterError(
            "the run has left no results yet",
            seen=f"{folder / METRICS}: no line that can be read",
            fix="try again when it has trained some steps; or leave this run out",
        )
    notes = [f"{num_damaged} lines of {METRICS} could not be read"] if num_damaged else []
    scale: Record = {}
    try:
        scale = record(json.loads((folder.parent / SCALE).read_bytes()))
    except FileNotFoundError:
        pass
    except (OSError, ValueError, RecursionError) as error:
        notes.append(f"{folder.parent / SCALE} could not be read: {error}")
    return Run(folder, folder.name, summary, tuple(lines), scale, tuple(notes))


def _summary(path: Path) -> Record:
    fix = "leave this run out; or remove the file: metrics.jsonl is then read alone"
    try:
        found = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise MusterError(f"a file of the run can't be read: {error.strerror}", seen=str(path), fix=fix) from None
    except (ValueError, RecursionError) as error:
        raise MusterError("a file of the run is damaged", seen=f"{path}: {error}", fix=fix) from None
    if not isinstance(found, dict) or not found:
        raise MusterError("a file of the run is damaged", seen=f"{path}: it holds no object", fix=fix)
    return cast("Record", found)


def _lines(path: Path) -> tuple[list[Record], int]:
    """The records at `path`, and how many lines are none. The last may have been cut off by a kill: it counts not."""
    try:
        text = path.read_bytes().decode("utf-8", errors="replace")
    except FileNotFoundError:
        return [], 0
    except OSError as error:
        raise MusterError(
            f"a file of the run can't be read: {error.strerror}", seen=str(path), fix="leave this run out"
        ) from None
    lines: list[Record] = []
    num_damaged = 0
    words = text.split("\n")
    for index, word in enumerate(words):
        try:
            found: Any = json.loads(word) if word.strip() else {}
        except (ValueError, RecursionError):
            found = None
        if isinstance(found, dict):
            lines += [cast("Record", found)] if found else []
        elif index + 1 < len(words):
            num_damaged += 1
    return lines, num_damaged


def _labels(folders: Sequence[Path]) -> list[str]:
    """For each of `folders` (resolved) as much of its end as tells it from the others."""
    labels = [folder.name or str(folder) for folder in folders]
    depth = 1
    while len(set(labels)) < len(labels) and depth < max(len(folder.parts) for folder in folders):
        depth += 1
        doubled = {label for label in labels if labels.count(label) > 1}
        labels = [
            os.path.join(*folder.parts[-depth:]) if label in doubled else label
            for folder, label in zip(folders, labels, strict=True)
        ]
    return [one_line(label) for label in labels]
