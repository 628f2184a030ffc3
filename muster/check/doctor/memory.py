"""The resources of a node for its ranks: cores, memory, /dev/shm and open files."""

import os
import resource
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import psutil

from muster import control_groups
from muster.check.bench.collectives import shown
from muster.check.doctor.finding import Finding, alike, differences
from muster.check.doctor.gpus import num_gpus
from muster.check.doctor.storage import Space, measure
from muster.check.options import DoctorOptions
from muster.check.ranks import leads_host
from muster.train.distributed.world import World
from muster.units import listed, plural

NAME = "memory"

BATCH = 32 * 3 * 224 * 224 * 4
"""Bytes of a batch from a data worker: 32 images (the default), each of 3 x 224 x 224 float32 (as for ImageNet)."""

WORKER = 4 * BATCH
"""Bytes that one data worker of a rank fills at most: 2 batches ahead, and 2 in use (train/data/loader.py)."""

OPEN_FILES, OPEN_A_RANK = 512, 4
"""Files that a rank may have open: 512 for its data and its workers' batches; for each rank of the job 4 connections,
by the process group, the side group, and a mesh of two dimensions."""


@dataclass(frozen=True, kw_only=True)
class Facts:
    """The resources that a rank may use.

    Attributes:
        uses_gpu: whether a training would run on a GPU.
        cores: the cores that it may run on, in order.
        open_files: how many may be open at a time; None without a limit.
        quota: the processor time that its control group may use, in cores; None without a limit.
        memory_free, shm: free bytes of memory, and the file system of /dev/shm: on a host's first rank only.
    """

    rank: int
    uses_gpu: bool = False
    cores: tuple[int, ...] = ()
    open_files: int | None = None
    quota: float | None = None
    memory_free: int | None = None
    shm: Space | None = None


def gather(world: World, options: DoctorOptions) -> Facts:
    is_first = leads_host(world)
    open_files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    memory, quota = control_groups.available()
    available = psutil.virtual_memory().available
    return Facts(
        rank=world.rank,
        uses_gpu=options.device == "cuda" or num_gpus(options) > 0,
        cores=tuple(sorted(os.sched_getaffinity(0))),
        open_files=None if open_files == resource.RLIM_INFINITY else open_files,
        quota=quota,
        memory_free=(available if memory is None else min(available, memory)) if is_first else None,
        shm=measure("/dev/shm") if is_first else None,
    )


def findings(by_host: Mapping[str, Sequence[Facts]]) -> list[Finding]:
    return [*_cores(by_host), *_shared_memory(by_host), *_open_files(by_host)]


def summary(by_host: Mapping[str, Sequence[Facts]]) -> str:
    """The cores of a rank; the least free memory and /dev/shm, and the lowest limit of open files, on any node."""
    a_rank = {count // len(by_host[host]) for host, count in _num_cores(by_host).items()}
    free = {host: ranks[0].memory_free or 0 for host, ranks in by_host.items()}
    host = min(free, key=lambda host: free[host])
    words = [f"cores a rank: {listed(sorted(a_rank))}"]
    words.append(f"{shown(free[host])} free" + (f" on {host}, the least" if len(free) > 1 else ""))
    shm = [ranks[0].shm.free for ranks in by_host.values() if ranks[0].shm and ranks[0].shm.free is not None]
    words.append(f"/dev/shm {shown(min(shm))} free" if shm else "")
    files = [rank.open_files for ranks in by_host.values() for rank in ranks if rank.open_files is not None]
    words.append(f"{min(files):,} open files" if files else "")
    return ", ".join(filter(None, words))


def _num_cores(by_host: Mapping[str, Sequence[Facts]]) -> dict[str, int]:
    found: dict[str, int] = {}
    for host, ranks in by_host.items():
        known, quota = len({core for rank in ranks for core in rank.cores}), ranks[0].quota
        found[host] = known if quota is None else min(known, max(1, int(quota)))
    return found


def _uses_gpus(by_host: Mapping[str, Sequence[Facts]]) -> bool:
    return any(rank.uses_gpu for ranks in by_host.values() for rank in ranks)


def _cores(by_host: Mapping[str, Sequence[Facts]]) -> list[Finding]:
    found: list[Finding] = []
    least, numbers = 2 if _uses_gpus(by_host) else 1, _num_cores(by_host)
    for host, ranks in by_host.items():
        sets = [frozenset(rank.cores) for rank in ranks]
        known = frozenset[int]().union(*sets)
        if numbers[host] < least * len(ranks):
            # A rank that uses a GPU keeps one core busy with launching kernels, and needs another one to load data.
            wrong = f"{plural(numbers[host], 'core')} for {plural(len(ranks), 'rank')}"
            seen = f"cores {listed(sorted(known), 8)}"
            seen += f", limited to {ranks[0].quota:g} by the control group" if ranks[0].quota is not None else ""
            fix = "ask for more cores a rank: --cpus-per-task in Slurm, ncpus in PBS, docker's --cpus; or fewer ranks"
            found.append(Finding("warning", "cores", host, wrong, seen, fix))
        elif len(set(sets)) > 1 and sum(map(len, sets)) > len(known):
            seen = listed((f"rank {rank.rank}: cores {listed(rank.cores, 8)}" for rank in ranks), between="; ")
            wrong = "ranks are bound to the same cores, and others are idle"
            fix = "leave binding to the launcher: srun --cpu-bind=cores with --cpus-per-task, or no binding at all"
            found.append(Finding("warning", "binding", host, wrong, seen, fix))
    fix = "ask for the same number of cores on all nodes: the slowest node delays all"
    return found + differences(numbers, "warning", "cores", "number of cores", fix)


def _shared_memory(by_host: Mapping[str, Sequence[Facts]]) -> list[Finding]:
    """The findings on /dev/shm, through which data workers pass their batches on."""
    closed, small = dict[str, str](), dict[str, str]()
    fix = "docker run --shm-size=8g or --ipc=host; as root on your own machine: mount -o remount,size=50% /dev/shm"
    for host, ranks in by_host.items():
        shm, needed = ranks[0].shm, WORKER * len(ranks)
        if shm is not None and shm.trouble is not None:
            closed[host] = f"{shm.path}: {shm.trouble}"
        elif shm is not None and shm.free is not None and shm.free < needed:
            small[host] = f"{shown(shm.free)} free of {shown(shm.size or 0)}; {shown(needed)} for 1 worker a rank"
    # On CPUs no workers load data unless they are asked for.
    level = "failed" if _uses_gpus(by_host) else "warning"
    found = alike(closed, level, "shm", "/dev/shm can't be written", fix)
    return found + alike(small, level, "shm", "/dev/shm is too small for data workers", fix)


def _open_files(by_host: Mapping[str, Sequence[Facts]]) -> list[Finding]:
    num_ranks = sum(map(len, by_host.values()))
    needed = OPEN_FILES + OPEN_A_RANK * num_ranks
    few: dict[str, str] = {}
    for host, (first, *_) in by_host.items():
        if first.open_files is not None and first.open_files < needed:
            few[host] = f"ulimit -n: {first.open_files}; {num_ranks} ranks may need {needed} each"
    fix = "ulimit -n $(ulimit -Hn) before the launch; where that is low too: docker run --ulimit nofile=65536"
    return alike(few, "warning", "open files", "the limit of open files is low", fix)
