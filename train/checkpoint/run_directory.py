"""A run's folder, and how a run is resumed: which run, from which checkpoint, with which differences.

Rank 0 chooses the folder, and never one that holds another run.
"""

import difflib
import json
import os
import re
import shlex
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from torch import nn

from muster.config import Options
from muster.errors import MusterError
from muster.paths import content_of, text_of
from muster.train.checkpoint import manager
from muster.train.checkpoint.storage import read_index, write_text
from muster.train.distributed.world import World
from muster.train.health.faults import agree
from muster.train.optim import highest_lr
from muster.units import plural
from muster.variables import LaunchVariable

RESULT_OPTIONS = (
    *("data", "image_size", "num_classes", "num_samples", "on_bad_sample", "batch_size", "seed", "bf16"),
    *("optimizer", "lr", "lr_scale", "warmup_steps", "momentum", "weight_decay", "clip_norm", "seq_len", "vocab_size"),
    *("comm_hook", "powersgd_rank", "powersgd_start", "sync_bn"),
    *("lr_schedule", "lr_end", "decay_norms", "label_smoothing", "decoder"),
)
"""Options that change the trained weights: a resumed run warns where they differ."""

assert set(RESULT_OPTIONS) <= {field.name for field in fields(Options)}

LAUNCH = ".launch"
"""The file in a run's folder that names the launch by which the run was begun."""


@dataclass
class Run:
    """The folder of a run, and the checkpoints that it may continue from.

    Attributes:
        candidates: the checkpoint to continue from, then those to fall back to where it is damaged.
        notes: lines for the user about this choice.
        is_shared: whether all hosts have the folder.
    """

    folder: Path
    candidates: list[Path] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    is_shared: bool = True

    @property
    def resumed_from(self) -> Path | None:
        """The checkpoint to continue from; None for a run that begins."""
        return self.candidates[0] if self.candidates else None


def default_name(options: Options, strategy: str) -> str:
    """The default name of a run: model, data and strategy, in characters that are safe in file systems and shells."""
    source, _, folder = options.data.partition(":")
    words = [options.model, source, Path(folder).name, strategy]
    return "-".join(safe for word in words if (safe := re.sub(r"[^A-Za-z0-9._]+", "-", word).strip("-.")[:60]))


def numbered(base: Path) -> list[Path]:
    """The folders `base`, `base`-2, `base`-3 ... that exist."""
    pattern = re.compile(re.escape(base.name) + r"(-\d+)?")
    return [path for path in base.parent.glob("*") if pattern.fullmatch(path.name)]


def launch_of(environ: Mapping[str, str], parent: int) -> str:
    """The id of this launch, the same after restarts; empty where process `parent` is not the agent that passed it.

    The agent adds its process id (entrypoint/agent/agent.py): processes that its workers start inherit the variable,
    but are not restarted.
    """
    word, _, agent = environ.get(LaunchVariable.LAUNCH, "").rpartition(".")
    return word if agent == str(parent) else ""


def choose_run(options: Options, strategy: str, launch: str = "") -> Run:
    """Chooses and makes the run's folder, and chooses the checkpoint to continue from; for rank 0 alone.

    A run that the same `launch` began is continued: this process is a restarted one.

    Raises:
        MusterError: the folder holds a run that is not to be continued, or what to continue can't be read.
    """
    base = Path(options.runs_dir) / (options.name or default_name(options, strategy))
    try:
        begun = begun_by(launch, options, base) if launch else None
        run = begun or choose_folder(options, base)
        before = latest(run.folder)
        manager.claim(run.folder, launch)
        if latest(run.folder) != before:
            # Another process has saved a checkpoint, and ended, while this one checked whether it still trains.
            manager.release()
            return choose_run(options, strategy, launch)
        if launch and begun is None:  # for `begun_by`, after a restart of the ranks
            start = {"launch": launch, "resumed_from": str(run.resumed_from or ""), "latest": before}
            write_text(run.folder / LAUNCH, json.dumps(start))
        return run
    except OSError as error:
        fix = "--runs-dir=FOLDER that this user may read and write, on a file system that all nodes share"
        if options.resume not in (None, "auto", "latest") and not options.name:
            fix = f"{shlex.quote(f'--resume={options.resume}')} --name=NEW goes on in another folder; {fix}"
        raise MusterError(
            f"the run's folder can't be made, read or written: {error.strerror}",
            seen=f"--runs-dir={options.runs_dir} ({error.filename or base})",
            fix=fix,
        ) from error


def begun_by(launch: str, options: Options, base: Path) -> Run | None:
    """The run that this `launch` began before it restarted its ranks, with the checkpoint to continue from; or None."""
    given = Path(options.resume or "")
    folders = {given, given.parent.parent, given.parent, base.parent / given} if options.resume else set[Path]()
    for folder in [*([base] if options.name else numbered(base)), *folders]:
        try:
            begun = json.loads(content_of(folder / LAUNCH))
            if begun["launch"] != launch:
                continue
            source, newest = Path(begun["resumed_from"]), begun["latest"]
        except (OSError, ValueError, TypeError, KeyError, RecursionError):  # there is none, or it is damaged
            continue
        candidates = [source, *manager.saved(folder)] if source.name else []
        run = Run(folder, candidates) if latest(folder) == newest else with_newest(folder)
        begins = "from the beginning" if run.resumed_from is None else f"from {run.resumed_from.name}"
        run.notes.append(f"the ranks were started again: {begins}")
        return run
    return None


def latest(folder: Path) -> str:
    """An id of the newest checkpoint in `folder`, empty without one; a later one of the same step has another id."""
    paths = manager.saved(folder)
    return f"{paths[0].name} {paths[0].stat().st_mtime_ns}" if paths else ""


def choose_folder(options: Options, base: Path) -> Run:
    """Does the part of `choose_run` for a launch without a run yet; raises OSError for folders that can't be made."""
    if options.resume is None:
        return Run(new_folder(base, explicit=options.name is not None))
    if options.resume not in ("auto", "latest"):
        return continue_from(options, base)
    if options.name:
        candidates = [base]
        manager.put_back(base)  # not for several candidates: some may be in training in another job
    else:
        # Some may belong to another user, and be closed to this one.
        candidates = [folder for folder in numbered(base) if os.access(folder, os.X_OK, effective_ids=True)]
    if with_checkpoint := [folder for folder in candidates if manager.saved(folder)]:
        return with_newest(max(with_checkpoint, key=lambda folder: manager.saved(folder)[0].stat().st_mtime))
    if options.resume == "latest":
        check_name(base)
    note = f"nothing to resume yet in {base}: starts from the beginning"
    return Run(new_folder(base, explicit=options.name is not None), notes=[note])


def check_name(base: Path) -> None:
    """Raises MusterError where `base` may be the misspelt name of another run that has a checkpoint.

    Names that differ in numbers alone belong to a series, and are not taken for misspelt.
    """

    def letters(name: str) -> str:
        return re.sub(r"[-_.]?\d+", "", name)

    others = {folder.name for folder in base.parent.glob("*") if manager.step_of(manager.latest_of(folder)) >= 0}
    others = {name for name in others if letters(name) != letters(base.name)}
    if near := difflib.get_close_matches(base.name, others, 1, 0.8):
        raise MusterError(
            "no run of this name has a checkpoint",
            seen=f"{base}; a run with a checkpoint: {base.with_name(near[0])}",
            fix=f"--name {near[0]} --resume; or leave --resume out",
        )


def continue_from(options: Options, base: Path) -> Run:
    """The run that `--resume PATH` continues: a checkpoint's, a run's folder, or a run's name."""
    assert options.resume is not None
    given = Path(options.resume)
    # Path.exists raises where this user lacks permission.
    source = given if os.path.exists(given) else Path(options.runs_dir) / options.resume
    if not os.path.exists(source):
        raise MusterError(
            "there is no run or checkpoint of this name",
            seen=f"--resume={options.resume}",
            fix="--resume auto, or a run's folder, or a step-... from its folder checkpoints/",
        )
    if manager.names_checkpoint(source) or not source.is_dir():
        read_index(source)
        run = Run(source, [source])
        home = source.resolve().parent.parent if source.resolve().parent.name == "checkpoints" else None
    else:
        # A run itself may have this name.
        home = source.parent if source.name == "checkpoints" and not manager.saved(source) else source
        run = with_newest(home)
    if options.name and (home is None or base.resolve() != home.resolve()):
        home = new_folder(base, explicit=True)
    return replace(run, folder=home or new_folder(base, explicit=False))


def with_newest(folder: Path) -> Run:
    """The run in `folder`, to continue from its newest checkpoint, or from an earlier one where that is damaged.

    Raises:
        MusterError: it has none.
    """
    manager.put_back(folder)
    return Run(folder, *manager.newest_first(folder))


def new_folder(base: Path, *, explicit: bool) -> Path:
    """Makes the folder `base`; where that exists and the name is not `explicit`, one with a number after the name.

    Raises:
        MusterError: a run of the explicit name exists.
    """
    base.parent.mkdir(parents=True, exist_ok=True)
    if explicit:
        # The name of a run that ended without a checkpoint is free; that of one whose checkpoints were removed is not.
        can_resume = bool(manager.saved(base))
        if can_resume or (base / "summary.json").exists() or manager.step_of(manager.latest_of(base)) >= 0:
            manager.refuse_second(base / manager.WRITER, manager.Writer.here(""))
            raise MusterError(
                "there is a run of this name already, and runs are never overwritten",
                seen=str(base) if can_resume else f"{base}, whose checkpoints are gone, or have no index",
                fix=("--resume continues it; or " if can_resume else "") + "choose another --name",
            )
        base.mkdir(exist_ok=True)
        return base
    number = 1
    while True:
        folder = base if number == 1 else base.with_name(f"{base.name}-{number}")
        with suppress(FileExistsError):
            folder.mkdir()  # without exists(): two jobs that start at once get different folders
            return folder
        number += 1


def share_run(world: World, options: Options, strategy: str) -> Run:
    """The run's folder and checkpoints, as rank 0 chooses them for all; MusterError on all ranks where it can't."""
    own = agree(
        world, lambda: choose_run(options, strategy, launch_of(os.environ, os.getppid())) if world.main else None
    )
    paths = None if own is None else [text_of(own.folder / manager.WRITER), str(own.folder), *map(str, own.candidates)]
    writer, *paths = world.gather(paths)[0]
    folder, *candidates = map(Path, paths)
    run = own or Run(folder, candidates)
    # A host may have a local folder of this name from an earlier attempt. Where this user lacks permission,
    # os.path.isdir returns False; Path.is_dir would raise OSError.
    hosts = world.hosts_by(os.path.isdir(folder) and text_of(folder / manager.WRITER) == writer)
    run.is_shared = False not in hosts
    if not run.is_shared:
        run.notes.append(
            f"{hosts[False]} does not have rank 0's {folder}: to resume, copy it to all hosts; or use --runs-dir on a "
            "shared file system, as checkpoints of fsdp, tp, pipeline and --zero1 are spread over the hosts"
        )
    return run


def restore(
    trained: manager.TrainState, chosen: Run, identity: dict[str, Any], saver: manager.CheckpointManager, world: World
) -> dict[str, Any]:
    """Loads the tensors of the newest undamaged checkpoint into `trained`; returns its values that are no tensors.

    Raises:
        MusterError: on all ranks, where all are damaged, or one is of another model.
    """

    def fill(path: Path) -> dict[str, Any]:
        index = agree(world, lambda: read_fitting(path, trained.model, identity))
        # With the same number of ranks as then, each gets its own statistics back; otherwise all get the mean.
        trained.fill(path, index, world.rank if index["plain"]["world_size"] == world.world_size else -1, saver.group)
        return index["plain"]

    path, plain, notes = manager.first_whole(chosen.candidates, fill)
    chosen.candidates = chosen.candidates[chosen.candidates.index(path) :]
    chosen.notes += notes
    manager.can_resume()
    return plain


def read_fitting(path: Path, model: nn.Module, identity: dict[str, Any]) -> dict[str, Any]:
    """Reads the index of the checkpoint at `path`, and checks that the checkpoint fits this run.

    Raises:
        MusterError: it can't be read, or is of another model, another number of classes, or another optimizer.
    """
    index = read_index(path)
    made_by = index["plain"].get("identity", {})
    for name, wanted in identity.items():
        if (made := made_by.get(name)) != wanted:
            word, fix = name, f"--{name}={made}"
            if name == "num_classes":
                word, fix = "number of classes or tokens", f"use the checkpoint's data, for tokens --vocab-size={made}"
            raise MusterError(
                f"the checkpoint is of another {word}: {made}, this run has {wanted}",
                seen=str(path),
                fix=f"{fix}, or leave out --resume",
            )
    if (reason := manager.first_mismatch(index, model)) is not None:
        raise MusterError(
            f"the checkpoint does not fit the model: {reason}",
            seen=f"{path}, --model={identity['model']}",
            fix="give --image-size and the other options of the checkpoint's run, or leave out --resume",
        )
    return index


def differences(state: dict[str, Any], settings: dict[str, Any], world: World) -> list[str]:
    """Notes on all that makes this run's result differ from that of the run it continues; empty if nothing does.

    Ranks and `--accumulate` may replace each other: only the global batch counts, and, for models of images, which may
    have batch normalisation, the size of a micro-batch.
    """
    before = state["options"] | {"global_batch": global_batch(state["options"], state["dp_size"])}
    now = settings | {"global_batch": global_batch(settings, world.dp_size)}
    notes = rescaled(state, settings, world)
    if now["comm_hook"] == "powersgd":
        notes.insert(0, "PowerSGD begins anew: the part of the gradients that it has not sent yet is lost")
    ignored = ("batch_size",) if now["seq_len"] else ()  # a transformer computes each sample by itself
    # A cosine that ends with the run depends on the length of the run.
    ends = ("epochs", "max_steps") if now["lr_schedule"] == "cosine" and now["lr_steps"] is None else ()
    names = [
        name
        for name in (*RESULT_OPTIONS, "lr_steps", *ends, "global_batch", "train_samples", "valid_samples")
        # A checkpoint of an older version lacks some of them.
        if name not in ignored and name in before and before[name] != now[name]
    ]
    if not names:
        return notes
    changes = ", ".join(f"{name} {before.get(name)} -> {now[name]}" for name in names)
    return [*notes, f"the result will differ from that of an uninterrupted run: {changes}"]


def rescaled(state: dict[str, Any], settings: dict[str, Any], world: World) -> list[str]:
    """A note where another number of ranks changes the global batch or the learning rate (rule: docs/elastic.md)."""
    if state["dp_size"] == world.dp_size:
        return []
    before = state["options"]
    batch, new_batch = global_batch(before, state["dp_size"]), global_batch(settings, world.dp_size)
    rate = highest_lr(before["lr"], before["lr_scale"], before["accumulate"] * state["dp_size"])
    new_rate = highest_lr(settings["lr"], settings["lr_scale"], settings["accumulate"] * world.dp_size)
    if (batch, rate) == (new_batch, new_rate):
        return []
    count, before_count, what = world.world_size, state["world_size"], "rank"
    if count == before_count:  # but in other groups, each of which has data of its own
        count, before_count, what = world.dp_size, state["dp_size"], "group"
    return [
        f"goes on with {plural(count, what)} instead of {before_count}: global batch {batch} -> {new_batch}, "
        f"learning rate {rate:.4g} -> {new_rate:.4g} (--lr-scale={settings['lr_scale']})"
    ]


def global_batch(options: dict[str, Any], dp_size: int) -> int:
    """Samples of a step over all ranks."""
    return options["batch_size"] * options["accumulate"] * dp_size
