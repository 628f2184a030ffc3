"""Checkpoints of a run: writes them completely or not at all, finds them, and checks their data on reading.

Each is a folder `step-00000010/`, written by all ranks at once (storage.py), and readable by any strategy and number of
ranks. It gets this name when it is complete, and the file `latest` then names it.

Only one training at a time writes into a run's folder: it claims the folder (`claim`), and stops if it loses it.
"""

import os
import re
import shutil
import socket
import time
import warnings
import zlib
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Thread
from typing import Any, TypeVar

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from muster import interruption
from muster.config import Options
from muster.errors import RESUME, ExitCode, MusterError
from muster.paths import content_of, text_of
from muster.train.checkpoint import storage
from muster.train.distributed.world import World, open_side_group
from muster.train.health.faults import SharedFault
from muster.train.reporting import console
from muster.variables import RankReport

NAME = re.compile(r"step-(\d+)")
LATEST = "latest"
REPLACED = ".old.partial"
"""The suffix of a checkpoint's name while another one of the same step replaces it."""

WRITER = ".writer"
"""The file in a run's folder that names the only process that may write there."""

claimed: dict[Path, bytes] = {}
"""For each run folder that this process has claimed: the content that it wrote into that file."""

TOUCH_S, SILENT_S = 5.0, 20.0
"""Seconds between two touches of that file, and for how long another process watches it for a touch."""

Read = TypeVar("Read")

WAIT_S = 60
"""Seconds that a failing run waits for the checkpoint that it has begun."""

State = dict[str, Any]
"""A tree of dictionaries; its leaves are tensors, and values that JSON can hold."""


def folder_of(run: Path) -> Path:
    """The folder of the checkpoints of the run in folder `run`."""
    return run / "checkpoints"


def split(state: Mapping[str, Any], prefix: str = "") -> tuple[State, dict[str, torch.Tensor]]:
    """Splits `state` into its values that are no tensors, and its tensors by path (`model/conv1.weight`)."""
    plain: State = {}
    tensors: dict[str, torch.Tensor] = {}
    for key, value in state.items():
        if isinstance(value, torch.Tensor):
            tensors[prefix + key] = value
        elif isinstance(value, Mapping):
            plain[key], below = split(value, f"{prefix}{key}/")
            tensors |= below
        else:
            plain[key] = value
    return plain, tensors


class Writer(msgspec.Struct, frozen=True):
    """The process that alone writes into a run's folder: rank 0 of a training.

    Attributes:
        pid: its process id in `namespace`.
        namespace: the kernel's id of the PID namespace, and the id of the kernel's boot: hosts may share a name.
        started: when it started, in clock ticks since boot, as a later process may have the same id; not in seconds
            since 1970, which change when the clock is set.
        launch: the id of its launch; empty without one.
    """

    host: str
    pid: int
    namespace: str
    started: int
    launch: str

    @classmethod
    def here(cls, launch: str) -> "Writer":
        """The `Writer` that describes this process."""
        boot = text_of(Path("/proc/sys/kernel/random/boot_id")).strip()
        pid, namespace = os.getpid(), f"{os.readlink('/proc/self/ns/pid')} {boot}"
        return cls(socket.gethostname(), pid, namespace, started(pid) or 0, launch)


def started(pid: int) -> int | None:
    """When process `pid` started, in clock ticks since boot; None where there is no such process.

    Source: https://man7.org/linux/man-pages/man5/proc_pid_stat.5.html (starttime)
    """
    status = text_of(Path(f"/proc/{pid}/stat"))
    return int(status.rpartition(")")[2].split()[19]) if status else None


def claim(run: Path, launch: str) -> None:
    """Makes this process the only one that writes into `run`, until `release` or its end.

    A file names it, and is touched every few seconds, which shows processes on other hosts that it is alive.

    Raises:
        MusterError: another process trains in it.
    """
    own, path = Writer.here(launch), run / WRITER
    content = msgspec.json.encode(own)
    while True:
        try:
            with path.open("xb") as file:
                file.write(content)
            break
        except FileExistsError:
            found, aside = text_of(path), path.with_name(f"{WRITER}.{own.host}.{own.pid}")
            refuse_second(path, own)
            with suppress(FileNotFoundError):
                # Only one of several processes can rename a dead one's file; `unlink` could remove another's new file.
                path.rename(aside)
                if text_of(aside) != found:
                    aside.rename(path)
                aside.unlink(missing_ok=True)
    claimed[run] = content

    def touch() -> None:
        while run in claimed:
            if not is_lost(run):
                with suppress(OSError):
                    os.utime(path)
            time.sleep(TOUCH_S)

    Thread(target=touch, name="claim", daemon=True).start()


def refuse_second(path: Path, own: Writer) -> None:
    """Raises MusterError where the process that the file at `path` names still trains."""
    if is_alive(path, own):
        raise MusterError(
            "another training writes into this run's folder",
            seen=f"{path}: {text_of(path)[:400]}",
            fix=f"wait for its end, or choose another --name; in a copy of its folder, remove {path.name}",
        )


def is_alive(path: Path, own: Writer) -> bool:
    """Whether the process that the file at `path` names still runs; on another host: whether it touches the file."""
    try:
        other = msgspec.json.decode(content_of(path), type=Writer)
    except FileNotFoundError:
        return False
    except (msgspec.MsgspecError, UnicodeDecodeError):
        other = None  # still being written, cut off, or damaged
    if other is not None and own.launch and other.launch == own.launch:
        return False  # the ranks of this launch were started again
    if other is not None and (other.host, other.namespace) == (own.host, own.namespace):
        return other.pid != own.pid and started(other.pid) == other.started
    console.notify(f"muster: checks for {SILENT_S:.0f} s whether another training writes into {path.parent}")
    first = touched(path)
    # Counted and not timed: a file server that hangs delays the other process's touches as it does these checks.
    for _ in range(round(SILENT_S)):
        time.sleep(1)
        if touched(path) != first:
            return touched(path) is not None
    return False


def touched(path: Path) -> int | None:
    """The file's last touch, in ns; None where it is gone. Opens it, so that network file systems ask their server."""
    with suppress(FileNotFoundError), path.open("rb") as file:
        return os.fstat(file.fileno()).st_mtime_ns
    return None


def release() -> None:
    """Releases the folders that this process has claimed and not lost."""
    for run in claimed:
        if not is_lost(run):
            with suppress(OSError):
                (run / WRITER).unlink()
    claimed.clear()


def is_lost(run: Path) -> bool:
    """Whether another process, which took this one for dead, has taken over the folder `run` that this one claimed."""
    own = claimed.get(run)
    try:
        return own is not None and content_of(run / WRITER) != own
    except FileNotFoundError:
        return os.path.isdir(run)  # the other process has ended since; without the folder, nobody has taken it over
    except OSError:
        return False  # the next write reports the error


class TakenOver(OSError):
    """Another training has taken over the run's folder. Ranks can send this to each other, unlike a MusterError."""


def check_own(run: Path) -> None:
    """Raises TakenOver where this process may not write into `run` any more."""
    if is_lost(run):
        raise TakenOver("another training has taken over")


def taken_over(run: Path) -> MusterError:
    """The error for a user whose training has lost `run`."""
    return MusterError(
        "another training has taken over this run's folder: this one was suspended, or cut off from its files",
        seen=f"{run / WRITER}: {text_of(run / WRITER)[:400] or 'it is gone'}",
        fix=f"let the other one train; when it has ended, {RESUME}",
        code=ExitCode.FAILED,
    )


def partial_of(run: Path, step: int) -> Path:
    """The folder of a checkpoint until it is complete."""
    return folder_of(run) / f".step-{step:08d}.partial"


def publish(run: Path, partial: Path, step: int, keep: int) -> None:
    """Gives a checkpoint that is complete on the disk its final name, and removes those that are not to be kept."""
    check_own(run)
    folder = folder_of(run)
    path = folder / f"step-{step:08d}"
    if path.exists():
        old = folder / f".{path.name}{REPLACED}"
        shutil.rmtree(old, ignore_errors=True)  # of a process that was killed here
        path.rename(old)
    partial.rename(path)
    storage.sync_folder(folder)
    storage.write_text(folder / LATEST, f"{path.name}\n")
    prune(run, step, keep)


def put_back(run: Path) -> None:
    """Restores the names of checkpoints whose process was killed while another of the same step replaced them.

    To be called only where no process writes checkpoints of `run`.
    """
    for old in folder_of(run).glob(f".step-*{REPLACED}"):
        path = old.with_name(old.name.removeprefix(".").removesuffix(REPLACED))
        if is_checkpoint(old) and not path.exists():
            with suppress(OSError):  # without permission to write here, the others can still be read
                old.rename(path)


def not_written(run: Path, step: int, error: CheckpointException) -> SharedFault:
    """The error, on all ranks, for a user whose checkpoint was not written; removes its incomplete folder."""
    rank, (cause, _) = min(error.failures.items())
    if isinstance(cause, TakenOver) or is_lost(run):  # the other training may have removed the folder
        return SharedFault(**taken_over(run).parts)
    shutil.rmtree(partial_of(run, step), ignore_errors=True)
    if not isinstance(cause, OSError):
        # torch's own error is no Exception: `close` would let it through, and it would hide why the run ends.
        raise RuntimeError(f"rank {rank} could not write the checkpoint: {type(cause).__name__}") from error
    kept = latest_of(run).name if step_of(latest_of(run)) >= 0 else None
    return SharedFault(
        f"the checkpoint could not be written: {cause.strerror or cause}",
        seen=f"rank {rank}, {folder_of(run)}/step-{step:08d}; the last good one is {kept or 'none'}",
        fix=f"make room, raise the quota, or see that the file system is up; {RESUME if kept else 'then start it'}",
        code=ExitCode.FAILED,
    )


def prune(run: Path, step: int, keep: int) -> None:
    """Removes the checkpoints up to `step` except the newest `keep`, and the incomplete ones of killed processes."""
    old = [path for path in by_step(run) if step_of(path) <= step][keep:]
    for path in [*old, *folder_of(run).glob(".*.partial")]:
        with suppress(OSError):  # a checkpoint that can't be removed is no reason to end
            if path.is_dir() and not path.is_symlink():
                # The index first: without it this is no checkpoint any more, even if the process is killed here.
                (path / storage.INDEX).unlink(missing_ok=True)
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink()


class CheckpointManager:
    """Writes the checkpoints of a run, on all ranks together.

    Args:
        keep: how many checkpoints are kept.
        in_background: whether the ranks train on while they write; failures are raised at the next save, or at the end.
        is_shared: whether all hosts have the folder `run`; else rank 0 writes all tensors that all ranks hold alike.

    Attributes:
        completed: step and seconds of each checkpoint that is complete on the disk; the trainer reports and removes it.
    """

    def __init__(self, run: Path, world: World, *, keep: int, in_background: bool, is_shared: bool = True) -> None:
        self.run, self.is_shared = run, is_shared
        self.keep = keep
        # A group of its own: collectives in the background must not mix with those of the training.
        self.group = open_side_group(world)
        self.thread = ThreadPoolExecutor(1, "checkpoint")
        self.under_way: Future[None] | None = None
        self.stager = open_stager(world) if in_background else None
        self.completed: deque[tuple[int, float]] = deque()

    def save(self, state: State, step: int) -> None:
        """Begins a checkpoint of `state`, which may change as soon as this returns.

        Raises:
            MusterError: on all ranks, where this one, or the one that was begun before, could not be written.
        """
        self.wait()
        started = time.perf_counter()
        plain, tensors = split(state)
        own: Any = share_out(tensors, self.group, self.is_shared)
        if self.stager is not None:
            own = self.stager.stage(own)
        self.under_way = self.thread.submit(self._write, own, plain, step, started)
        if self.stager is None:
            self.wait()

    def _write(self, tensors: State, plain: State, step: int, started: float) -> None:
        """Writes a checkpoint that was begun at `started`, and adds it to `completed` before `wait` returns."""
        partial = partial_of(self.run, step)
        writer = storage.CheckpointWriter(
            partial, plain, lambda: check_own(self.run), lambda: publish(self.run, partial, step, self.keep)
        )
        try:
            dcp_save(tensors, storage_writer=writer, process_group=self.group, no_dist=self.group is None)
        except CheckpointException as error:
            raise not_written(self.run, step, error) from error
        self.completed.append((step, time.perf_counter() - started))
        can_resume()  # at once: the trainer may hang before it reads `completed`

    def wait(self, limit_s: float | None = None) -> None:
        """Waits, at most `limit_s`, until the checkpoint that was begun is complete.

        Raises:
            MusterError: on all ranks, where it could not be written.
            TimeoutError: it is not complete after `limit_s`.
        """
        under_way, self.under_way = self.under_way, None
        if under_way is not None:
            under_way.result(limit_s)

    def close(self) -> None:
        """Waits a while for the checkpoint that was begun, where the run ends for another reason."""
        with suppress(MusterError, RuntimeError, TimeoutError):  # the other reason is reported
            self.wait(WAIT_S)


def open_stager(world: World) -> DefaultStager:
    """The stager that copies tensors before training changes them, always into the same memory (pinned for GPUs)."""
    is_gpu = world.device.type == "cuda"
    return DefaultStager(
        StagingOptions(
            use_pinned_memory=is_gpu, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=is_gpu
        )
    )


def share_out(tensors: Mapping[str, Tensor], group: dist.ProcessGroup | None, is_shared: bool) -> dict[str, Tensor]:
    """The `tensors` that this rank copies and writes: of weights and moments that all ranks hold alike, a share.

    Where names or sizes differ between ranks, each copies all that it has, and torch's planner removes duplicates.

    Args:
        group: of all ranks; None where there is one rank.
        is_shared: if False, rank 0 writes all that the ranks hold alike, and the others leave out their own statistics:
            a checkpoint is complete without them.
    """
    if group is None:
        return dict(tensors)
    rank = dist.get_rank(group)
    whole = {name: tensor.nbytes for name, tensor in tensors.items() if not isinstance(tensor, DTensor)}
    largest_first = sorted(whole, key=lambda name: (-whole[name], name))
    kinds = [[name for name in largest_first if name.startswith(kind)] for kind in ("model/", "optimizer/")]
    digests = [zlib.crc32(repr([(name, whole[name]) for name in names]).encode()) for names in kinds]
    most, least = torch.tensor(digests), torch.tensor(digests)
    dist.all_reduce(most, dist.ReduceOp.MAX, group)
    dist.all_reduce(least, dist.ReduceOp.MIN, group)
    left_out = {name for name in whole if name.startswith("statistics/") and rank and not is_shared}
    for names, is_alike in zip(kinds, (most == least).tolist(), strict=True):
        if is_alike and is_shared:
            left_out |= set(names) - set(names[rank :: dist.get_world_size(group)])
        elif is_alike and rank:
            left_out |= set(names)
    return {name: tensor for name, tensor in tensors.items() if name not in left_out}


def step_of(path: Path) -> int:
    """The step after which the checkpoint at `path` was saved; -1 where its name is not a checkpoint's."""
    match = NAME.fullmatch(path.name)
    return int(match[1]) if match else -1


def names_checkpoint(path: Path) -> bool:
    """True for a path with a checkpoint's name, or with an index, unless it is the folder of a run of that name."""
    return (step_of(path) >= 0 or is_checkpoint(path)) and not folder_of(path).is_dir()


def is_checkpoint(path: Path) -> bool:
    """True for the folder of one complete checkpoint."""
    return (path / storage.INDEX).is_file()


def by_step(run: Path) -> list[Path]:
    """All complete checkpoints of the run, the newest first.

    Raises:
        OSError: their folder exists and can't be read; glob would find none in it.
    """
    folder = folder_of(run)
    try:
        folder.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return []
    names = os.listdir(folder)
    paths = [folder / name for name in names if NAME.fullmatch(name) and is_checkpoint(folder / name)]
    return sorted(paths, key=step_of, reverse=True)


def saved(run: Path) -> list[Path]:
    """The run's checkpoints to continue from: the one that `latest` names, then the ones before it."""
    paths, latest = by_step(run), latest_of(run)
    return paths[paths.index(latest) :] if latest in paths else paths


def latest_of(run: Path) -> Path:
    """The checkpoint that `latest` names, which may be gone; the folder of checkpoints where `latest` can't be read."""
    return folder_of(run) / text_of(folder_of(run) / LATEST).strip()


def load(path: Path) -> State:
    """The whole state saved at `path`, on the CPU, read and checked by this process alone.

    Raises:
        MusterError: it is missing, damaged, or no checkpoint of this program.
    """
    index = storage.read_index(path)
    tensors = {
        name: torch.empty(entry["shape"], dtype=storage.dtype_of(entry)) for name, entry in index["tensors"].items()
    }
    load_into(path, index, tensors, None)
    state: State = index["plain"]
    for name, tensor in tensors.items():
        *parts, key = name.split("/")
        branch = state
        for part in parts:
            branch = branch.setdefault(part, {})
        branch[key] = tensor
    return state


def load_into(path: Path, index: State, tensors: dict[str, torch.Tensor], group: dist.ProcessGroup | None) -> None:
    """Fills `tensors`, full ones or this rank's shards, from the checkpoint at `path`; to be called on all ranks.

    Raises:
        MusterError: on all ranks, where the data of any rank are damaged; some of `tensors` are filled then.
    """
    try:
        with warnings.catch_warnings():
            # Here it is intended that one process reads alone.
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            reader = storage.CheckpointReader(path, index["tensors"])
            dcp_load(tensors, storage_reader=reader, process_group=group, no_dist=group is None)
    except CheckpointException as error:
        _, (cause, _) = min(error.failures.items())
        if not isinstance(cause, storage.Damaged):
            raise
        raise storage.unreadable(path, str(cause)) from error


def can_resume() -> None:
    """Notes that the run can be resumed, for the messages of this process and of its agent when it ends."""
    interruption.current.advice = interruption.GOES_ON
    console.report_to_agent(RankReport.HAS_CHECKPOINT)


def load_newest(run: Path) -> tuple[Path, State, list[str]]:
    """The path and the state of the run's newest undamaged checkpoint, and a note on each newer one.

    Raises:
        MusterError: there are checkpoints, but all are damaged; or there is none.
    """
    paths, notes = newest_first(run)
    path, state, more = first_whole(paths, load)
    return path, state, [*notes, *more]


def newest_first(run: Path) -> tuple[list[Path], list[str]]:
    """The checkpoints that `saved` finds, and a note where a newer one is gone; MusterError where it finds none."""
    if not (paths := saved(run)):
        fix = "the folder of a run that has saved checkpoints/step-... in it; or begin a new run"
        raise MusterError("the run has no checkpoint", seen=str(run), fix=fix)
    latest, notes = latest_of(run), list[str]()
    if step_of(latest) > step_of(paths[0]):
        notes.append(f"checkpoint {latest.name} is skipped: it is gone, or has no index")
    return paths, notes


def first_whole(paths: list[Path], read: Callable[[Path], Read]) -> tuple[Path, Read, list[str]]:
    """The first undamaged checkpoint of `paths`, the result of `read` for it, and a note on each one before it.

    Raises:
        MusterError: all are damaged, or `read` refuses one for another reason.
    """
    notes: list[str] = []
    for path in paths[:-1]:
        try:
            return path, read(path), notes
        except MusterError as error:
            # By its text, as the error may come from another rank.
            if storage.UNREADABLE not in error.wrong:
                raise
            notes.append(f"checkpoint {path.name} is skipped: {error.wrong}")
    return paths[-1], read(paths[-1]), notes


Statistics = dict[str, Tensor]
"""Running statistics of batch normalisation, by name."""


@dataclass
class Progress:
    """The progress of a run, which a checkpoint holds besides the tensors.

    Attributes:
        epoch: the number of complete epochs.
        sample: samples of the current epoch that have been used; all of them where only its validation is missing.
        step: steps of the optimizer in all.
        warmed: samples used in the steps of the warm-up.
        sums: summed loss, hits and targets of the current epoch, over all ranks.
        history: one record for each epoch.
    """

    epoch: int = 0
    sample: int = 0
    step: int = 0
    warmed: int = 0
    sums: list[float] = field(default_factory=lambda: [0.0, 0.0, 0.0])
    best_accuracy: float = 0.0
    history: list[dict[str, Any]] = field(default_factory=list)


def is_complete(progress: Progress, options: Options) -> bool:
    """True once `--epochs` or `--max-steps` are reached, and the result is validated."""
    if progress.epoch >= options.epochs:
        return True
    if options.max_steps is None or progress.step < options.max_steps:
        return False
    # A warning may have come between the last step and the end of the validation.
    is_validated = bool(progress.history) and progress.history[-1]["step"] == progress.step
    return is_validated or progress.step > options.max_steps


@dataclass(frozen=True, kw_only=True)
class TrainState:
    """The model and the optimizer, which training changes and a checkpoint holds.

    Attributes:
        model: spread over the ranks by its strategy, without the strategy's wrapper.
    """

    model: nn.Module
    optimizer: Optimizer

    def parameters(self) -> dict[str, Tensor]:
        """The parameters that the optimizer trains, by name, in the optimizer's order."""
        names = {parameter: name for name, parameter in self.model.named_parameters()}
        return {names[parameter]: parameter for group in self.optimizer.param_groups for parameter in group["params"]}

    def statistics(self) -> Statistics:
        """The running statistics of batch normalisation, which differ from rank to rank within an epoch."""
        return {name: buffer for name, buffer in self.model.named_buffers() if buffer.is_floating_point()}

    def state(self) -> State:
        """Weights, buffers and moments; of a sharded model, this rank's shards."""
        weights = self.model.state_dict()  # first: this makes a sharded model free what it has gathered
        moments = {
            name: {key: value for key, value in self.optimizer.state[parameter].items() if isinstance(value, Tensor)}
            for name, parameter in self.parameters().items()
        }
        return {"model": weights, "optimizer": {"state": moments}}

    def fill(self, path: Path, index: State, rank: int, group: dist.ProcessGroup | None) -> None:
        """Loads the checkpoint at `path`; the optimizer keeps the hyperparameters it has.

        A rank's own statistics are taken where the checkpoint has them; else they are the mean over the ranks.

        Raises:
            MusterError: on all ranks, where the checkpoint is damaged.
        """
        parameters = self.parameters()
        moments: dict[str, dict[str, Tensor]] = {name: {} for name in parameters}
        for place, entry in index["tensors"].items():
            kind, _, rest = place.partition("/state/")
            name, _, key = rest.rpartition("/")
            if kind == "optimizer" and name in parameters:
                like = parameters[name]
                # Of the weight's shape, and sharded like it; or a scalar, such as the number of Adam's steps.
                whole = list(like.shape) == entry["shape"]
                moments[name][key] = torch.zeros_like(like) if whole else torch.zeros(entry["shape"])
        wanted: State = {"model": self.model.state_dict(), "optimizer": {"state": moments}}
        own = {
            name: torch.empty_like(tensor)
            for name, tensor in self.statistics().items()
            if f"statistics/{rank}/{name}" in index["tensors"]
        }
        _, tensors = split({**wanted, "statistics": {str(rank): own}})
        load_into(path, index, {name: tensor.detach() for name, tensor in tensors.items()}, group)
        for name, tensor in self.statistics().items():
            tensor.copy_(own.get(name, tensor))
        numbers = {name: number for number, name in enumerate(parameters)}
        state = {numbers[name]: values for name, values in moments.items() if values}
        self.optimizer.load_state_dict({"state": state, "param_groups": self.optimizer.state_dict()["param_groups"]})


def first_mismatch(index: State, model: nn.Module) -> str | None:
    """The first difference in name or shape between the checkpoint's weights and those of `model`; None without one."""
    own = {f"model/{name}": list(tensor.shape) for name, tensor in model.state_dict().items()}
    saved = {name: entry["shape"] for name, entry in index["tensors"].items() if name.startswith("model/")}
    for name in sorted(own if getattr(model, "is_part", False) else own | saved):
        if own.get(name) != saved.get(name):
            return f"{name.partition('/')[2]} is {saved.get(name, 'missing')} in it, {own.get(name, 'missing')} here"
    return None
