"""Whether the largest messages fit into memory, before any is made."""

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import psutil
import torch

from check.bench.sizes import exact, shown
from train.errors import MusterError
from train.world import World

COPIES = {"cuda": 2, "cpu": 3}
"""Messages' sizes that a rank needs: what it sends and receives; gloo adds up in a third."""

BESIDES = {"cuda": 512 << 20, "cpu": 192 << 20}
"""Bytes besides: the blocks in which values are checked (check/bench/values.py), and the backend's own buffers."""


def look(world: World, sizes: Sequence[int]) -> None:
    """Returns if all ranks have memory for the largest of `sizes`; called on all of them.

    Raises:
        MusterError: on all ranks alike: one has too little.
    """
    free = [int(each) for each in world.gather(_free(world))]
    refusal = judge(free, world.hosts, sizes, world.device.type)
    if refusal is not None:
        raise refusal


def judge(free: Sequence[int], hosts: Sequence[str], sizes: Sequence[int], device: str) -> MusterError | None:
    """What to say where the rank with the least `free` bytes has too little for the largest of `sizes`."""
    rank = min(range(len(free)), key=lambda each: free[each])
    fitting = [size for size in sizes if needed(size, device) <= free[rank]]
    if len(fitting) == len(sizes):
        return None
    what = f"{free[rank] / 2**30:.1f} GiB of {'GPU' if device == 'cuda' else 'main'} memory are free for it"
    return MusterError(
        f"messages of {shown(max(sizes))} don't fit into the memory of rank {rank} on {hosts[rank]}",
        seen=f"--max-size={exact(max(sizes))} needs {needed(max(sizes), device) / 2**30:.1f} GiB a rank; {what}",
        fix=f"--max-size={exact(max(fitting))}" if fitting else "ask for more memory, or start fewer ranks a node",
    )


def needed(size: int, device: str) -> int:
    """The bytes that a rank needs for messages of `size` bytes."""
    return COPIES[device] * size + BESIDES[device]


def _free(world: World) -> int:
    """The bytes that this rank may take: on CPUs, its share of what its node has."""
    if world.device.type == "cuda":
        return torch.cuda.mem_get_info(world.device)[0]
    own = sum(host == world.host for host in world.hosts) or 1
    return min([psutil.virtual_memory().available, *_of_control_groups()]) // own


def _of_control_groups() -> list[int]:
    """What this process's control group leaves, where it has a limit.

    Source: https://docs.kernel.org/admin-guide/cgroup-v2.html (memory.max, memory.current)
    """
    found: list[int] = []
    with suppress(OSError, ValueError, IndexError):
        own = Path("/proc/self/cgroup").read_text().rpartition("0::")[2].splitlines()[0]
        for folder in (Path("/sys/fs/cgroup", own.lstrip("/")), Path("/sys/fs/cgroup")):
            with suppress(OSError, ValueError):
                most = int((folder / "memory.max").read_text())
                found.append(max(0, most - int((folder / "memory.current").read_text()) + _cache(folder)))
    return found


def _cache(folder: Path) -> int:
    """Bytes of files that the kernel gives back when memory is wanted."""
    for line in (folder / "memory.stat").read_text().splitlines():
        if line.startswith("inactive_file "):
            return int(line.split()[1])
    return 0
