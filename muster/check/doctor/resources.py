"""What a node has for its ranks: cores, /dev/shm, room for checkpoints, open files and locked memory."""

import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil

from muster.check.doctor.facts import UNLIMITED, Facts, Finding, Node, Part, Space, attempt, differences, distinct, size
from muster.check.ranks import listed

BATCH = 32 * 3 * 224 * 224 * 4
"""Bytes of a batch as data workers hand it over: by default 32 images, and of ImageNet's size."""

WORKER = 4 * BATCH
"""What one data worker of a rank fills at most: 2 batches ahead, and 2 in use (train/data/shm.py)."""

OPEN_FILES, OPEN_A_RANK = 512, 4
"""Files that a rank may need: those of its data, and what its workers hand over; and its connections to each other
rank, in a group of all, one beside it, and a mesh of two dimensions."""


ROOM = 2**30
"""Free space below which checkpoints are in danger: two of ResNet-50 with its momentum, and one being written,
take 0.6 GB."""

FILES = 100
"""A checkpoint has a file for each rank and a few more, and three of them are there at a time."""

LIMIT_S = 30.0
"""Seconds that a file system may take to write one small file: a busy one takes some, one that is gone all of them."""


def gather() -> dict[str, Any]:
    """The fields of a Node that tell of its memory and limits."""
    memory = attempt(psutil.virtual_memory)
    return {
        "memory_free": None if memory is None else memory.available,
        "memlock": _limit(resource.RLIMIT_MEMLOCK),
        "open_files": _limit(resource.RLIMIT_NOFILE),
    }


def _limit(which: int) -> int:
    soft = resource.getrlimit(which)[0]
    return UNLIMITED if soft == resource.RLIM_INFINITY else soft


def gather_space(folder: str, limit_s: float = LIMIT_S) -> Space:
    """The room in `folder`, of which a child process tells that may hang."""
    command = [sys.executable, "-I", "-S", str(Path(__file__).with_name("space.py")), folder]
    path = os.path.abspath(folder)
    # Not by `with`, nor by run(): both wait for the child, which a dead file system holds even when it is killed.
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    try:
        return Space(**json.loads(child.communicate(timeout=limit_s)[0]))
    except subprocess.TimeoutExpired:
        child.kill()
        return Space(path=path, trouble=f"the file system did not answer within {limit_s:g} s")
    except (ValueError, TypeError):
        return Space(path=path, trouble="the check ended without an answer")


def cores(facts: Facts) -> Part:
    """Cores that ranks may run on."""
    found: list[Finding] = []
    for host in facts.hosts:
        ranks = facts.on(host)
        sets = [frozenset(rank.cores) for rank in ranks]
        known = frozenset[int]().union(*sets)
        if not all(sets):
            continue
        least = 2 if facts.on_gpus else 1
        if len(known) < least * len(ranks):
            # Of a GPU's rank one core is full with what it launches: nothing is left for loading data.
            wrong = f"{len(known)} core{'s' if len(known) > 1 else ''} for {len(ranks)} ranks"
            fix = "ask for more cores a rank: --cpus-per-task in Slurm, ncpus in PBS; or fewer ranks"
            found.append(Finding("warning", "cores", host, wrong, f"cores {ranges(known)}", fix))
        elif len(set(sets)) > 1 and sum(map(len, sets)) > len(known):
            pair = next((a, b) for a, one in enumerate(sets) for b, other in enumerate(sets) if a < b and one & other)
            one, other = (ranks[index] for index in pair)
            found.append(
                Finding(
                    "warning",
                    "binding",
                    host,
                    "ranks are bound to the same cores, and others lie idle",
                    f"rank {one.rank}: cores {ranges(one.cores)}; rank {other.rank}: cores {ranges(other.cores)}",
                    "leave binding to the launcher: srun --cpu-bind=cores with --cpus-per-task, or no binding at all",
                )
            )
    counts = {host: len({core for rank in facts.on(host) for core in rank.cores}) or None for host in facts.hosts}
    fix = "ask for the same cores on all nodes: the slowest node holds up all"
    found += differences(counts, "warning", "cores", "number of cores", fix)
    a_rank = [count // len(facts.on(host)) for host, count in counts.items() if count]
    says = f"{distinct(sorted(a_rank))} a rank" if a_rank else "not known"
    return Part("cores", says, found)


def ranges(cores: Any) -> str:
    """Numbers in few words: "0-3,8"."""
    parts: list[list[int]] = []
    for core in sorted(cores):
        if parts and core == parts[-1][-1] + 1:
            parts[-1][1:] = [core]
        else:
            parts.append([core])
    return ",".join("-".join(map(str, part)) for part in parts)


def shared_memory(facts: Facts) -> Part:
    """/dev/shm, through which data workers hand over their batches."""
    found: list[Finding] = []
    free: list[int] = []
    for node in facts.nodes:
        if node.shm is None:
            continue
        needed = WORKER * len(facts.on(node.host))
        fix = "docker run --shm-size=8g or --ipc=host; on a node of one's own: mount -o remount,size=50% /dev/shm"
        if node.shm.trouble is not None:
            seen = f"{node.shm.path}: {node.shm.trouble}"
            found.append(_shm(facts, node, "/dev/shm can't be written", seen, fix))
        elif node.shm.free is not None and node.shm.free < needed:
            seen = f"{size(node.shm.free)} free of {size(node.shm.size or 0)}; {size(needed)} for 1 worker a rank"
            found.append(_shm(facts, node, "/dev/shm is too small for data workers", seen, fix))
        elif node.shm.free is not None:
            free.append(node.shm.free)
    says = f"{size(min(free))} free{' at least' if len(set(free)) > 1 else ''}" if free else "no limit"
    return Part("/dev/shm", says, found)


def _shm(facts: Facts, node: Node, wrong: str, seen: str, fix: str) -> Finding:
    # On CPUs no workers load data unless they are asked for; and where all nodes are alike, someone may mean it so.
    others = [other.shm for other in facts.nodes if other is not node and other.shm is not None]
    is_alone = any(other.trouble is None and (other.free is None or other.free >= 2 * WORKER) for other in others)
    return Finding("fault" if facts.on_gpus or is_alone else "warning", "shm", node.host, wrong, seen, fix)


def checkpoints(facts: Facts) -> Part:
    """Room for checkpoints on each node."""
    found: list[Finding] = []
    free: list[int] = []
    path, other = "", "or another folder: --runs-dir, here --checkpoint-dir"
    for node in facts.nodes:
        space = node.checkpoints
        if space is None:
            continue
        path = space.path
        if space.trouble is not None:
            left = "" if space.free is None else f", {size(space.free)} free"
            wrong, seen = "no checkpoint can be written", f"{path}: {space.trouble}{left}"
            found.append(Finding("fault", "checkpoints", node.host, wrong, seen, f"make room there, {other}"))
        elif space.free is not None and space.free < ROOM:
            wrong, seen = "there is hardly any room for checkpoints", f"{path}: {size(space.free)} free"
            found.append(Finding("warning", "checkpoints", node.host, wrong, seen, f"make room there, {other}"))
        elif space.files_free is not None and space.files_free < FILES + 3 * len(facts.ranks):
            wrong, seen = "hardly any file can be made where checkpoints go", f"{path}: {space.files_free} inodes free"
            found.append(Finding("warning", "checkpoints", node.host, wrong, seen, f"remove files, {other}"))
        elif space.free is not None:
            free.append(space.free)
    return Part("checkpoints", f"{size(min(free))} free in {path}" if free else f"{path} can be written", found)


def limits(facts: Facts) -> Part:
    """What this user may lock and open."""
    found: list[Finding] = []
    needed = OPEN_FILES + OPEN_A_RANK * len(facts.ranks)
    few = [node for node in facts.nodes if node.open_files is not None and UNLIMITED != node.open_files < needed]
    if few:
        seen = (
            f"ulimit -n: {distinct([node.open_files for node in few])}; {len(facts.ranks)} ranks may need {needed} each"
        )
        fix = "ulimit -n $(ulimit -Hn) in the job script, before the launch"
        hosts = listed([node.host for node in few])
        found.append(Finding("warning", "open files", hosts, "few files may be open at a time", seen, fix))
    locked = [node for node in facts.nodes if node.devices and node.memlock not in (None, UNLIMITED)]
    if locked:
        amounts = distinct([f"{(node.memlock or 0) // 2**10} KiB" for node in locked])
        seen = f"ulimit -l: {amounts}, {locked[0].devices[0]}"
        fix = "docker run --ulimit memlock=-1; in Slurm PropagateResourceLimitsExcept=MEMLOCK and slurmd's LimitMEMLOCK"
        hosts = listed([node.host for node in locked])
        found.append(Finding("warning", "memlock", hosts, "RDMA may lock little memory", seen, fix))
    files = [node.open_files for node in facts.nodes if node.open_files is not None]
    least = min((number for number in files if number != UNLIMITED), default=None)
    return Part("limits", "open files: " + ("any number" if least is None else f"{least:,}"), found)
