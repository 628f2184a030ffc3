"""The folder of a run: chosen by rank 0, never one that holds another run."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from train import checkpoint
from train.errors import MusterError
from train.files import write_text
from train.options import Options

LAUNCH = ".launch"
"""The file in a run's folder that says by which launch it was begun."""


@dataclass
class Run:
    """Where a run leaves its files, and what it continues.

    Attributes:
        older: the checkpoints to fall back to, the newest first, should what is in `resumed_from` be damaged.
        notes: what the user should know of the choice.
    """

    folder: Path
    resumed_from: Path | None = None
    older: list[Path] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def default_name(options: Options, strategy: str) -> str:
    """Model, data and strategy, in characters that every file system and shell takes as they are."""
    source, _, folder = options.data.partition(":")
    words = [options.model, source, Path(folder).name, strategy]
    return "-".join(safe for word in words if (safe := re.sub(r"[^A-Za-z0-9._]+", "-", word).strip("-.")[:60]))


def numbered(base: Path) -> list[Path]:
    """`base`, `base`-2, `base`-3 ...: those that exist."""
    pattern = re.compile(re.escape(base.name) + r"(-\d+)?")
    return [path for path in base.parent.glob("*") if pattern.fullmatch(path.name)] if base.parent.is_dir() else []


def holds_run(folder: Path) -> bool:
    """True where `folder` has the files of a run."""
    return any((folder / name).exists() for name in ("summary.json", "metrics.jsonl", "checkpoints"))


def launch_of(environ: Mapping[str, str], parent: int) -> str:
    """The word that names this launch through all its restarts; empty where this is none of an agent's own workers.

    The agent gives it, with its process id (entrypoint/supervision.py): of what its workers start, nothing is started
    again.
    """
    word, _, agent = environ.get("MUSTER_LAUNCH", "").rpartition(".")
    return word if agent == str(parent) else ""


def choose_run(options: Options, strategy: str, launch: str = "") -> Run:
    """The run's folder, made, and the checkpoint to continue from, its index checked. For rank 0 alone.

    A run that was begun by the same `launch` is the one: this process has been started again.

    Raises:
        MusterError: the folder holds a run that is not to be continued, or what to continue can't be read.
    """
    if options.name is not None and (options.name in ("", ".", "..") or "/" in options.name):
        raise MusterError(
            "a run's name is one folder name", seen=f"--name={options.name}", fix="--name=NAME --runs-dir=FOLDER"
        )
    try:
        return begun_by(launch, options, strategy) or begin(launch, options, strategy)
    except OSError as error:
        raise MusterError(
            f"the run's folder can't be made: {error.strerror}",
            seen=f"--runs-dir={options.runs_dir} ({error.filename})",
            fix="--runs-dir=FOLDER that this user may write, on a file system that all nodes share",
        ) from error


def begin(launch: str, options: Options, strategy: str) -> Run:
    """As `choose_folder`; a note in the folder says by which launch, should it start its ranks again."""
    run = choose_folder(options, strategy)
    if launch:
        told = {"launch": launch, "resumed_from": str(run.resumed_from or ""), "latest": latest(run.folder)}
        write_text(run.folder / LAUNCH, json.dumps(told))
    return run


def begun_by(launch: str, options: Options, strategy: str) -> Run | None:
    """The run that this `launch` has begun before it started its ranks again, to continue from its last checkpoint."""
    base = base_of(options, strategy)
    given = Path(options.resume or "")
    homes = {given, given.parent.parent, given.parent, base.parent / given} if options.resume else set[Path]()
    for folder in [*([base] if options.name else numbered(base)), *homes]:
        try:
            told = json.loads((folder / LAUNCH).read_text())
        except (OSError, ValueError):
            continue
        if not launch or told["launch"] != launch:
            continue
        if latest(folder) != told["latest"]:
            run = with_newest(folder)
        elif told["resumed_from"]:
            run = Run(folder, Path(told["resumed_from"]), checkpoint.saved(folder))
        else:
            run = Run(folder)
        begins = "from the beginning" if run.resumed_from is None else f"from {run.resumed_from.name}"
        run.notes.append(f"the ranks were started again: {begins}")
        return run
    return None


def latest(folder: Path) -> str:
    """What tells the newest checkpoint of the run in `folder` from one that is saved later, of the same step too."""
    paths = checkpoint.saved(folder)
    return f"{paths[0].name} {paths[0].stat().st_mtime_ns}" if paths else ""


def base_of(options: Options, strategy: str) -> Path:
    """The run's folder, but for a number after it."""
    return Path(options.runs_dir) / (options.name or default_name(options, strategy))


def choose_folder(options: Options, strategy: str) -> Run:
    """As `choose_run`, with OSError for folders that can't be made."""
    base = base_of(options, strategy)
    if options.resume is None:
        return Run(new_folder(base, explicit=options.name is not None))
    if options.resume != "auto":
        return continue_from(options, base)
    candidates = [base] if options.name else numbered(base)
    if options.name:
        checkpoint.put_back(base)  # others of the candidates may be runs that go on in another job
    with_checkpoint = [folder for folder in candidates if checkpoint.saved(folder)]
    if with_checkpoint:
        folder = max(with_checkpoint, key=lambda folder: checkpoint.saved(folder)[0].stat().st_mtime)
        return with_newest(folder)
    if options.name:
        base.mkdir(parents=True, exist_ok=True)
    run = Run(base if options.name else new_folder(base, explicit=False))
    run.notes.append(f"nothing to resume yet in {base}: starts from the beginning")
    return run


def continue_from(options: Options, base: Path) -> Run:
    """The run that `--resume PATH` continues: a checkpoint's, a run's folder, or a run's name."""
    assert options.resume is not None
    given = Path(options.resume)
    source = given if given.exists() else Path(options.runs_dir) / options.resume
    if not source.exists():
        raise MusterError(
            "there is nothing of this name to resume",
            seen=f"--resume={options.resume}",
            fix="--resume auto, or a run's folder, or a step-... from its folder checkpoints/",
        )
    if checkpoint.step_of(source) >= 0 or not source.is_dir():
        checkpoint.head(source)
        run = Run(source, source)
        home = source.resolve().parent.parent if source.resolve().parent.name == "checkpoints" else None
    else:
        home = source.parent if source.name == "checkpoints" else source
        run = with_newest(home)
    if options.name and (home is None or base.resolve() != home.resolve()):
        home = new_folder(base, explicit=True)
    return replace(run, folder=home or new_folder(base, explicit=False))


def with_newest(folder: Path) -> Run:
    """The run in `folder`, to continue from its newest checkpoint whose index is whole.

    Raises:
        MusterError: there are checkpoints, but all are damaged; or there is none.
    """
    checkpoint.put_back(folder)
    run, error = Run(folder), None
    for path in checkpoint.saved(folder):
        if run.resumed_from is not None:
            run.older.append(path)
            continue
        try:
            checkpoint.head(path)
            run.resumed_from = path
        except MusterError as damage:
            error = error or damage
            run.notes.append(checkpoint.passed_over(path, damage))
    if run.resumed_from is None:
        raise error or MusterError("the run has no checkpoint", seen=str(folder), fix="leave out --resume")
    return run


def new_folder(base: Path, *, explicit: bool) -> Path:
    """A folder made just now: `base`, or with a number after it when it is taken and the name was not `explicit`.

    Raises:
        MusterError: the explicit name holds a run.
    """
    base.parent.mkdir(parents=True, exist_ok=True)
    if explicit:
        if holds_run(base):
            raise MusterError(
                "there is a run of this name already, and runs are never overwritten",
                seen=str(base),
                fix="--resume continues it; or choose another --name",
            )
        base.mkdir(exist_ok=True)
        return base
    number = 1
    while True:
        folder = base if number == 1 else base.with_name(f"{base.name}-{number}")
        try:
            folder.mkdir()  # and not exists(): of two jobs that start at once, each gets its own
        except FileExistsError:
            number += 1
        else:
            return folder
