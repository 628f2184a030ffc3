"""Checkpoints of a run: saved whole or not at all, found again, and checked before they are used."""

import re
import zipfile
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch

from train.errors import FAILED, MusterError
from train.files import write_atomically, write_text

FORMAT = 1
NAME = re.compile(r"step-(\d+)\.pt")
LATEST = "latest"


def folder_of(run: Path) -> Path:
    """Where the checkpoints of the run in folder `run` are."""
    return run / "checkpoints"


def save(run: Path, state: dict[str, Any], *, step: int, keep: int) -> Path:
    """Writes `state` as the run's latest checkpoint, and removes older ones until `keep` are left.

    The file `latest` names a checkpoint only after that is complete on the disk.

    Raises:
        MusterError: the disk is full, or can't be written; the checkpoint before stays the latest.
    """
    path = folder_of(run) / f"step-{step:08d}.pt"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, lambda file: torch.save({"format": FORMAT, **state}, file))
        write_text(path.parent / LATEST, f"{path.name}\n")
    except (OSError, RuntimeError) as error:
        # torch's zip writer turns the error of a full disk into a RuntimeError of its own when it closes the file.
        cause = error if isinstance(error, OSError) else error.__context__
        reason = cause.strerror if isinstance(cause, OSError) and cause.strerror else str(error).splitlines()[0]
        kept = saved(run)
        raise MusterError(
            f"the checkpoint could not be written: {reason}",
            seen=f"{path}; the last good one is {kept[0].name if kept else 'none'}",
            fix="make room or raise the quota, then continue the run: --resume",
            code=FAILED,
        ) from error
    prune(run, step, keep)
    return path


def prune(run: Path, step: int, keep: int) -> None:
    """Removes the checkpoints up to `step` but for the newest `keep`, and what killed processes left half written."""
    old = [path for path in by_step(run) if step_of(path) <= step][keep:]
    for path in [*old, *folder_of(run).glob(".*.partial")]:
        path.unlink(missing_ok=True)


def step_of(path: Path) -> int:
    """The step after which the checkpoint at `path` was saved."""
    match = NAME.fullmatch(path.name)
    return int(match[1]) if match else -1


def by_step(run: Path) -> list[Path]:
    """All complete checkpoints of the run, the newest first."""
    folder = folder_of(run)
    return sorted((path for path in folder.glob("step-*.pt") if NAME.fullmatch(path.name)), key=step_of, reverse=True)


def saved(run: Path) -> list[Path]:
    """The run's checkpoints to continue from: the one that `latest` names, then the ones before it."""
    paths = by_step(run)
    try:
        latest = folder_of(run) / (folder_of(run) / LATEST).read_text().strip()
    except OSError:
        return paths
    if latest not in paths:
        return paths
    return [latest, *(path for path in paths if step_of(path) < step_of(latest))]


def load(path: Path, *, check: bool = True) -> dict[str, Any]:
    """The state saved at `path`, on the CPU. Nothing is unpickled but tensors and plain values.

    Args:
        check: compares the checksums in the file first: torch.load reads flipped bits as if they were weights.

    Raises:
        MusterError: the file is missing, damaged, or no checkpoint of this program.
    """
    try:
        if check:
            with zipfile.ZipFile(path) as archive:
                if (damaged := archive.testzip()) is not None:
                    raise zipfile.BadZipFile(f"wrong checksum of {damaged}")
        state = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError as error:
        fix = "give --resume a run's folder or one of its checkpoints; it must be on a file system that all nodes share"
        raise MusterError("there is no such checkpoint", seen=str(path), fix=fix) from error
    except (OSError, RuntimeError, UnpicklingError, EOFError, ValueError, KeyError, zipfile.BadZipFile) as error:
        raise MusterError(
            f"the checkpoint can't be read: {reason_of(error)}",
            seen=f"{path} ({path.stat().st_size if path.is_file() else 0} bytes)",
            fix="--resume auto takes the run's last checkpoint that is whole",
        ) from error
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise MusterError(
            "the file is no checkpoint of this program",
            seen=str(path),
            fix="give --resume a run's folder, or a file from its folder checkpoints/",
        )
    return state


def reason_of(error: Exception) -> str:
    """What a user can take from torch's `error`."""
    text = str(error)
    if isinstance(error, UnpicklingError):
        return "it is damaged, or holds more than tensors and plain values"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return f"it is damaged or incomplete ({(text.splitlines() or [type(error).__name__])[0][:80]})"


def load_newest(run: Path) -> tuple[Path, dict[str, Any], list[str]]:
    """The path and state of the run's newest checkpoint that is whole, and a note on each that is not.

    Raises:
        MusterError: there are checkpoints, but all are damaged.
    """
    notes: list[str] = []
    error: MusterError | None = None
    for path in saved(run):
        try:
            return path, load(path), notes
        except MusterError as damage:
            error = error or damage
            notes.append(f"checkpoint {path.name} is passed over: {damage.wrong}")
    raise error or MusterError("the run has no checkpoint", seen=str(run), fix="leave out --resume")
