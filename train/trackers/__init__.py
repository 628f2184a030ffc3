"""Where a run's numbers go besides its own files: `--track`. One module a kind, each an optional package.

One rank of a job writes, so that a job is one run there; a run that is resumed goes on in the same. A module has a
function `open_target(folder, step, settings) -> Target`. What goes wrong there while the run trains is said once, and
training goes on: the run's own files have all of it.
"""

import importlib.util
import math
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from train.errors import MusterError
from train.options import Options

PACKAGES = {"tensorboard": "tensorboard", "wandb": "wandb", "mlflow": "mlflow-skinny"}
"""What each kind needs, by the name of its package; it is imported by its own name."""


class Target(Protocol):
    """A run in a tracker's own form."""

    def write(self, step: int, values: dict[str, float]) -> None:
        """Adds `values` at `step` of the optimizer."""
        ...

    def close(self, *, failed: bool) -> None:
        """Ends the run there."""
        ...


def check(options: Options) -> None:
    """Raises MusterError where the tracker's package is not installed."""
    if options.track == "none" or importlib.util.find_spec(options.track) is not None:
        return
    raise MusterError(
        f"{options.track} is not installed",
        seen=f"--track={options.track}",
        fix=f"pip install {PACKAGES[options.track]}, or leave out --track: metrics.jsonl has the same numbers",
    )


def open_tracker(
    options: Options, folder: Path, step: int, settings: Mapping[str, Any], note: Callable[[str], None]
) -> "Tracker":
    """The tracker `--track` of the run in `folder`, which goes on at `step`; to be called on one rank.

    Args:
        settings: what the run is made with, as its summary says it.
        note: tells the user a line.

    Raises:
        MusterError: it can't be opened.
    """
    if options.track == "none":
        return Tracker(None, note)
    try:
        target = import_module(f"train.trackers.{options.track}").open_target(folder, step, settings)
    except Exception as error:  # each of the packages raises what it likes
        raise MusterError(
            f"{options.track} can't begin a run: {one_line(error)}",
            seen=f"--track={options.track}, {folder}",
            fix="see its own settings in the environment, or leave out --track",
        ) from error
    return Tracker(target, note)


class Tracker:
    """Writes records of a run to a target, if there is one; a context that ends the run there too."""

    def __init__(self, target: Target | None, note: Callable[[str], None]) -> None:
        self.target = target
        self.note = note

    def write(self, record: Mapping[str, Any]) -> None:
        """Adds a line of metrics.jsonl."""
        values = numbers_of(record, f"{record['kind']}/")
        self.attempt(lambda target: target.write(record["step"], values))

    def attempt(self, action: Callable[[Target], None]) -> None:
        """Does `action`, unless there is no target any more."""
        if self.target is None:
            return
        try:
            action(self.target)
        except Exception as error:  # a full disk, a server that is gone: no reason to stop training
            self.target = None
            self.note(f"nothing more is tracked: {one_line(error)}")

    def __enter__(self) -> "Tracker":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.attempt(lambda target: target.close(failed=kind is not None))


def numbers_of(record: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """The finite numbers in `record` and in what it holds, by their names; without its step."""
    numbers: dict[str, float] = {}
    for name, value in record.items():
        if isinstance(value, Mapping):
            numbers |= numbers_of(value, f"{prefix}{name}/")
        elif isinstance(value, int | float) and not isinstance(value, bool) and name != "step" and math.isfinite(value):
            numbers[prefix + name] = float(value)
    return numbers


def one_line(error: Exception) -> str:
    """What `error` says, in one line."""
    return " ".join(str(error).split())[:200] or type(error).__name__
