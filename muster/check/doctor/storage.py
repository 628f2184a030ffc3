"""The storage for checkpoints: whether they can be written there, and how much space is free."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from muster import processes
from muster.check.bench.collectives import shown
from muster.check.doctor.finding import Finding, alike
from muster.check.options import DoctorOptions
from muster.check.ranks import leads_host
from muster.train.distributed.world import World

NAME = "storage"

ROOM = 2**30
"""Bytes of free space below which checkpoints may not fit: two of ResNet-50 with its momentum, and one being written,
take 0.6 GB."""

LIMIT_S = 30.0
"""Seconds that a file system may take to write one small file: a busy one needs some, a lost one never answers."""


@dataclass(frozen=True, kw_only=True)
class Space:
    """The space of a file system.

    Attributes:
        path: the folder that was checked.
        size, free: bytes; None where it has no limit, or reports none.
        trouble: why nothing can be written; None where it can.
    """

    path: str
    size: int | None = None
    free: int | None = None
    trouble: str | None = None


@dataclass(frozen=True, kw_only=True)
class Facts:
    checkpoints: Space


def gather(world: World, options: DoctorOptions) -> Facts | None:
    """The space for checkpoints, by the first rank of each host, in at most half of the time that other ranks wait."""
    limit_s = min(LIMIT_S, options.timeout_s / 2)
    return Facts(checkpoints=measure(options.checkpoint_dir, limit_s)) if leads_host(world) else None


def measure(folder: str, limit_s: float = LIMIT_S) -> Space:
    """The space in `folder`, measured by a child process, as access to a lost file system hangs."""
    command = [sys.executable, "-I", "-S", str(Path(__file__).with_name("storage_probe.py")), folder]
    try:
        return Space(**json.loads(processes.run(command, timeout_s=limit_s).stdout))
    except subprocess.TimeoutExpired:
        trouble = f"the file system did not answer within {limit_s:g} s"
    except (OSError, ValueError, TypeError):
        trouble = "the check ended without an answer"
    return Space(path=os.path.abspath(folder), trouble=trouble)


def findings(by_host: Mapping[str, Sequence[Facts]]) -> list[Finding]:
    closed, small = dict[str, str](), dict[str, str]()
    for host, (facts, *_) in by_host.items():
        space = facts.checkpoints
        if space.trouble is not None:
            left = "" if space.free is None else f", {shown(space.free)} free"
            closed[host] = f"{space.path}: {space.trouble}{left}"
        elif space.free is not None and space.free < ROOM:
            small[host] = f"{space.path}: {shown(space.free)} free"
    fix = "make room there, or choose another folder: --runs-dir of train, --checkpoint-dir of doctor"
    return [
        *alike(closed, "failed", "checkpoints", "no checkpoint can be written", fix),
        *alike(small, "warning", "checkpoints", "there is hardly any room for checkpoints", fix),
    ]


def summary(by_host: Mapping[str, Sequence[Facts]]) -> str:
    """The free space on the node that has the least."""
    spaces = [facts[0].checkpoints for facts in by_host.values()]
    free = [space.free for space in spaces if space.free is not None]
    return f"{shown(min(free))} free in {spaces[0].path}" if free else f"{spaces[0].path} can be written"
