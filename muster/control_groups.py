"""The limits of this process's control groups: docker's --cpus and --memory, Kubernetes' limits, Slurm's memory."""

import re
from pathlib import Path

from muster.paths import text_of

GROUPS = Path("/proc/self/cgroup")
"""The file that names the control groups of this process."""
ROOT = Path("/sys/fs/cgroup")
"""The folder where control groups are mounted."""


def available() -> tuple[int | None, float | None]:
    """Bytes of memory that are free, and processor time as of so many cores, within the limits; None without a limit.

    Source: https://docs.kernel.org/admin-guide/cgroup-v2.html (memory.max, memory.current, memory.stat, cpu.max)
    """
    memory: list[int] = []
    cores: list[float] = []
    for line in text_of(GROUPS).splitlines():
        # 0::/system.slice/slurmstepd.scope/job_9 in version 2; 4:cpu,cpuacct:/docker/1a2b in version 1
        controllers, _, path = line.partition(":")[2].partition(":")
        top = ROOT / controllers
        group = top / path.lstrip("/")
        # Any group above may have the limit. Where a container has the host's path, its own group is at the top.
        for folder in (each for each in (group, *group.parents) if each == top or top in each.parents):
            if limit := _numbers(folder / "memory.max") + _numbers(folder / "memory.limit_in_bytes"):
                used = _numbers(folder / "memory.current") + _numbers(folder / "memory.usage_in_bytes")
                # Pages of files that are not in use are given up when memory is asked for. In version 1 the total alone
                # has those of the groups below.
                pages = dict(re.findall(r"^(\w+) (\d+)$", text_of(folder / "memory.stat"), re.MULTILINE))
                unused = int(pages.get("total_inactive_file") or pages.get("inactive_file", 0))
                memory.append(max(0, limit[0] - max(0, sum(used) - unused)))
            # "200000 100000": of each 100 ms of the clock 200 ms of processors; "max 100000" without a limit
            share = _numbers(folder / "cpu.max")
            share = share or _numbers(folder / "cpu.cfs_quota_us") + _numbers(folder / "cpu.cfs_period_us")
            cores += [share[0] / share[1]] if len(share) == 2 else []
    return min(memory, default=None), min(cores, default=None)


def usable(num_cores: int) -> int:
    """How many of `num_cores` cores this process has the time of: all without a limit, and one at least."""
    _, limit = available()
    return num_cores if limit is None else max(1, min(num_cores, int(limit)))


def _numbers(path: Path) -> list[int]:
    """The numbers in a file; words, and -1, stand for no limit."""
    return [int(word) for word in text_of(path).split() if word.isdecimal()]
