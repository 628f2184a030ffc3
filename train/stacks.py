"""What a process does just now: the stacks of its threads, and the collectives that torch remembers."""

import faulthandler
import os
import pickle
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch._C._distributed_c10d as c10d

FLIGHT = "flight"
"""The folder of the flight recorder's files of all hosts: `torchfrtrace FOLDER` reads one folder."""

OURS = f"{os.sep}train{os.sep}"


def remember_collectives() -> None:
    """Has torch remember the last collectives of each rank; to be called before the process group starts.

    Source: https://docs.pytorch.org/tutorials/unstable/flight_recorder_tutorial.html
    """
    if not os.environ.get("TORCH_NCCL_TRACE_BUFFER_SIZE"):
        os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")


def where() -> str:
    """The line at which the main thread is, and the line of this program from which it came there."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    lines: list[str] = []
    while frame is not None:
        path = frame.f_code.co_filename
        if not lines or OURS in path:
            short = os.sep.join(path.rsplit(os.sep, 2)[-2:])
            lines.append(f"{frame.f_code.co_name} ({short}:{frame.f_lineno})")
            if OURS in path:
                break
        frame = frame.f_back
    return ", called by ".join(lines) or "nowhere"


def write_stacks(folder: Path, rank: int) -> Path:
    """The file in `folder` with the Python stacks of all threads, now."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"rank-{rank}.stacks.txt"
    with path.open("w") as file:
        faulthandler.dump_traceback(file, all_threads=True)
    return path


def flight(backend: str) -> bytes:
    """What torch's flight recorder holds of `backend`, as torchfrtrace reads it; nothing where it has none."""
    private: Any = c10d
    if "nccl" in backend:
        dump: Callable[..., bytes] | None = getattr(private, "_dump_nccl_trace", None)
        return b"" if dump is None else dump()
    dump = getattr(private, "_dump_fr_trace", None)
    if dump is None:
        return b""
    try:
        return dump(backend="gloo")
    except TypeError:
        return dump()  # older ones know one backend


def num_collectives(recorded: bytes) -> int | None:
    """How many collectives of all groups are begun, by the flight recorder; None where it does not say."""
    if not recorded:
        return None
    # torch made it in this process a moment ago.
    status = pickle.loads(recorded).get("pg_status") or {}
    counts = [int(group.get("last_enqueued_collective", -1)) for group in status.values()]
    return sum(count for count in counts if count > 0) if counts else None


def write_flight(folder: Path, rank: int, recorded: bytes) -> None:
    """Puts what was recorded beside the hosts' folders of the same start of the run, of which `folder` is one."""
    if recorded:
        (folder.parent / FLIGHT).mkdir(parents=True, exist_ok=True)
        (folder.parent / FLIGHT / f"rank-{rank}").write_bytes(recorded)


def dump(folder: Path | None, rank: int, backend: str) -> dict[str, Any]:
    """Writes all there is into `folder`, or the stacks to stderr where there is none; returns what it says in short."""
    told: dict[str, Any] = {}
    if folder is None:
        faulthandler.dump_traceback(sys.stderr, all_threads=True)
    else:
        with suppress(OSError):
            told["file"] = str(write_stacks(folder, rank))
    recorded = b""
    with suppress(RuntimeError):  # a device in disorder
        recorded = flight(backend) if torch.distributed.is_initialized() else b""
    with suppress(Exception):  # of a version of torch that pickles something else
        told["collectives"] = num_collectives(recorded)
    if folder is not None:
        with suppress(OSError):
            write_flight(folder, rank, recorded)
    return told
