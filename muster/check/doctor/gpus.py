"""The GPUs: their state, read from the NVIDIA driver without using them, and the faults of those in the job.

Source: https://docs.nvidia.com/deploy/nvml-api/
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

import torch

from muster.check.bench.collectives import shown
from muster.check.doctor.finding import Finding, Level, alike, attempt, differences
from muster.check.options import DoctorOptions
from muster.check.ranks import leads_host
from muster.devices import visible_gpus
from muster.train.distributed.world import World

NAME = "GPUs"

SLOWED = {0x8: "hardware slowdown", 0x20: "heat (software)", 0x40: "heat (hardware)", 0x80: "power brake"}
"""NVML's reasons for a lowered clock, by bit, without those that a healthy GPU may have: idleness, a power limit."""

MAX_LINKS = 36
"""More NVLinks than any GPU has."""

CONTEXT = 256 * 2**20
"""Bytes of GPU memory that every process on a GPU exceeds: CUDA's context alone takes more."""

TELL_SITE = "tell the site, and keep the job off that node meanwhile (Slurm: --exclude=NODE)"


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """A GPU as the driver reports it.

    Attributes:
        used: bytes of memory that processes use.
        uncorrected: ECC errors since the driver was loaded that could not be corrected.
        remapping: the state of replacing broken rows of memory: `pending` until a reset, or `failed`; else None.
        slowed_by: the reasons of SLOWED for which its clock is lowered.
        links: the number of NVLinks that are up; None on a GPU without NVLink.
    """

    index: int
    uuid: str | None = None
    name: str | None = None
    used: int | None = None
    uncorrected: int | None = None
    remapping: str | None = None
    slowed_by: tuple[str, ...] = ()
    mig: bool | None = None
    links: int | None = None


@dataclass(frozen=True, kw_only=True)
class Facts:
    """The GPUs of one rank; empty with --device=cpu.

    Attributes:
        visible: CUDA_VISIBLE_DEVICES.
        is_required: whether trainings are to run on GPUs, by --device=cuda.
        num_gpus: how many torch sees.
        gpus: on a host's first rank, all that the driver shows; on a later rank its own, if it sees fewer GPUs than
            the host has ranks. Otherwise, and without a driver, None.
        driver: the driver's version.
    """

    rank: int
    visible: str | None = None
    is_required: bool = False
    num_gpus: int = 0
    gpus: tuple[Gpu, ...] | None = None
    driver: str | None = None


def gather(world: World, options: DoctorOptions) -> Facts:
    """The GPUs that this rank was given; on the first rank of a host, all that the driver shows."""
    if options.device == "cpu":
        return Facts(rank=world.rank)
    number, visible = num_gpus(options), os.environ.get("CUDA_VISIBLE_DEVICES")
    # With fewer GPUs than ranks, each rank may see only its own, as number 0: so with Slurm's --gpus-per-task=1.
    has_own = 0 < number < world.hosts.count(world.host)
    gpus, driver = (attempt(ask_driver) if leads_host(world) or has_own else None) or (None, None)
    is_required = options.device == "cuda"
    own = Facts(rank=world.rank, visible=visible, is_required=is_required, num_gpus=number, gpus=gpus, driver=driver)
    return own if leads_host(world) or gpus is None else replace(own, gpus=tuple(_given([own])))


def num_gpus(options: DoctorOptions) -> int:
    """The number of GPUs that torch sees, and a training would use."""
    return 0 if options.device == "cpu" else attempt(torch.cuda.device_count) or 0


def ask_driver() -> tuple[tuple[Gpu, ...] | None, str | None]:
    """The GPUs, None without a driver; and the driver's version."""
    nvml: Any = import_module("pynvml")  # only here: it takes time to load
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return None, None
    try:
        number = _ask(nvml, "nvmlDeviceGetCount") or 0
        handles = [(index, _ask(nvml, "nvmlDeviceGetHandleByIndex", index)) for index in range(number)]
        gpus = tuple(_gpu(nvml, index, handle) for index, handle in handles if handle is not None)
        return gpus, _ask(nvml, "nvmlSystemGetDriverVersion")
    finally:
        _ask(nvml, "nvmlShutdown")


def _ask(nvml: Any, name: str, *arguments: Any) -> Any:
    """The driver's answer; None if the GPU or an older driver does not support the call, or this user may not ask."""
    try:
        return getattr(nvml, name)(*arguments)
    except (nvml.NVMLError, AttributeError, TypeError):
        return None


def _gpu(nvml: Any, index: int, handle: Any) -> Gpu:
    def ask(name: str, *arguments: Any) -> Any:
        return _ask(nvml, name, handle, *arguments)

    # By version 2 of the call: version 1 counts memory that the driver reserves for itself as used.
    memory = ask("nvmlDeviceGetMemoryInfo", getattr(nvml, "nvmlMemory_v2", None)) or ask("nvmlDeviceGetMemoryInfo")
    mig, rows = ask("nvmlDeviceGetMigMode"), ask("nvmlDeviceGetRemappedRows")
    reasons = ask("nvmlDeviceGetCurrentClocksEventReasons") or ask("nvmlDeviceGetCurrentClocksThrottleReasons") or 0
    links = [ask("nvmlDeviceGetNvLinkState", link) for link in range(MAX_LINKS)]
    return Gpu(
        index=index,
        uuid=ask("nvmlDeviceGetUUID"),
        name=ask("nvmlDeviceGetName"),
        used=None if memory is None else memory.used,
        uncorrected=ask("nvmlDeviceGetTotalEccErrors", nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC),
        remapping=None if rows is None else "failed" if rows[3] else "pending" if rows[2] else None,
        slowed_by=tuple(word for bit, word in SLOWED.items() if reasons & bit),
        mig=None if mig is None else bool(mig[0]),
        links=None if all(link is None for link in links) else sum(link == 1 for link in links),
    )


def findings(by_host: Mapping[str, Sequence[Facts]]) -> list[Finding]:
    given = {host: number_given(ranks) for host, ranks in by_host.items()}
    fix = "ask for the same GPUs on all nodes, and check with nvidia-smi whether one has fallen off the bus"
    # Nodes with different numbers of GPUs can train if each rank has one; but a node may have lost a GPU.
    has_each = all(number == len(by_host[host]) for host, number in given.items())
    found = differences(given, "warning" if has_each else "failed", "gpus", "number of GPUs", fix)
    fix = "in a container: apptainer exec --nv, docker run --gpus all; `muster version` shows the driver"
    wrong = "torch does not see all GPUs that the job has or --device asks for: a training would use fewer, or the CPU"
    unseen: dict[str, str] = {}
    for host, ranks in by_host.items():
        lacking = [rank for rank in ranks if rank.num_gpus < max(rank.is_required, len(visible_gpus(rank.visible)))]
        for rank in lacking[:1]:
            by = "--device=cuda" if rank.visible is None else f"CUDA_VISIBLE_DEVICES={rank.visible}"
            unseen[host] = f"{by}, and torch sees {rank.num_gpus}"
    all_ranks = [rank for ranks in by_host.values() for rank in ranks]
    is_needed = any(rank.num_gpus or rank.is_required for rank in all_ranks)
    level: Level = "failed" if is_needed and not all(rank.num_gpus for rank in all_ranks) else "warning"
    found += alike(unseen, level, "gpus", wrong, fix)
    names = {host: _names(ranks) or None for host, ranks in by_host.items()}
    found += differences(names, "failed", "gpus", "kind of GPU", "ask the scheduler for nodes of one kind")
    drivers = {host: ranks[0].driver for host, ranks in by_host.items()}
    found += differences(drivers, "warning", "driver", "driver", "tell the site: nodes of one job have different ones")
    most = max((gpu.links for ranks in by_host.values() for gpu in _given(ranks) if gpu.links is not None), default=0)
    for host, ranks in by_host.items():
        of_host = _given(ranks)
        numbers = [gpu.index for gpu in of_host]
        for gpu in of_host:
            # Ranks that see only their own GPU all call it 0.
            name = f"GPU {gpu.index}" if numbers.count(gpu.index) == 1 else str(gpu.uuid)
            found += _of(host, gpu, name, most)
    return found


def summary(by_host: Mapping[str, Sequence[Facts]]) -> str:
    number = number_given(next(iter(by_host.values())))
    kind = next((name for ranks in by_host.values() if (name := _names(ranks))), "GPUs")
    return f"{number} x {kind} a node" if number else "none: on CPUs"


def number_given(ranks: Sequence[Facts]) -> int:
    """The number of GPUs that the ranks of a node were given: those that they see, or that the scheduler names."""
    if sum(rank.gpus is not None for rank in ranks) > 1:
        return len(_given(ranks))
    names = {device for rank in ranks for device in visible_gpus(rank.visible)}
    return len(names) or max((rank.num_gpus for rank in ranks), default=0)


def _given(ranks: Sequence[Facts]) -> list[Gpu]:
    """The GPUs of a node that this job was given, as far as its ranks can tell; else all."""
    found: dict[str, Gpu] = {}
    for rank in ranks:
        names, gpus = visible_gpus(rank.visible), rank.gpus or ranks[0].gpus or ()
        # CUDA accepts the first digits of a UUID.
        chosen = [gpu for gpu in gpus if str(gpu.index) in names or (gpu.uuid or "").startswith(tuple(names))]
        # A name that is no GPU's is that of a part of one (MIG). A CUDA_VISIBLE_DEVICES without names hides all.
        for gpu in chosen or (gpus if names or rank.visible is None else ()):
            found.setdefault(gpu.uuid or str(gpu.index), gpu)
    return list(found.values())


def _names(ranks: Sequence[Facts]) -> str:
    return ", ".join(sorted({gpu.name for gpu in _given(ranks) if gpu.name}))


def _of(host: str, gpu: Gpu, name: str, links: int) -> Iterator[Finding]:
    """The findings on one GPU; `links` is the largest number of NVLinks that are up on any GPU of the job."""
    if gpu.uncorrected:
        wrong = f"{name} has had memory errors that ECC could not correct"
        yield Finding("failed", "ecc", host, wrong, f"{gpu.uncorrected} since the driver was loaded", TELL_SITE)
    if gpu.remapping:
        has_failed = gpu.remapping == "failed"
        wrong = f"{name} has broken memory: replacing its rows {'has failed' if has_failed else 'is pending'}"
        seen = f"nvidia-smi -q -d ROW_REMAPPER: {gpu.remapping}"
        fix = TELL_SITE if has_failed else "the site has to reset that GPU: nvidia-smi --gpu-reset"
        yield Finding("failed" if has_failed else "warning", "ecc", host, wrong, seen, fix)
    if gpu.used is not None and gpu.used > CONTEXT:
        wrong, seen = f"another process uses memory of {name}", f"{shown(gpu.used)} used before any rank uses it"
        yield Finding("warning", "gpu memory", host, wrong, seen, "see which process it is: nvidia-smi on that node")
    if gpu.slowed_by:
        wrong, seen = f"the clock of {name} is throttled", ", ".join(gpu.slowed_by)
        yield Finding("warning", "gpu clock", host, wrong, seen, TELL_SITE)
    if gpu.mig:
        wrong = f"{name} is partitioned (MIG): NCCL does not connect the parts"
        yield Finding("warning", "mig", host, wrong, "MIG mode: enabled", "ask for whole GPUs")
    # A PCIe card has NVLinks only if a bridge connects it to its neighbour.
    has_no_bridge = gpu.links == 0 and "pcie" in (gpu.name or "").lower()
    if gpu.links is not None and gpu.links < links and not has_no_bridge:
        seen = f"{gpu.links} up, {links} on other GPUs"
        yield Finding("warning", "nvlink", host, f"NVLinks of {name} are down", seen, TELL_SITE)
