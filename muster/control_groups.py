"""The limits of this process's control groups: docker's --cpus and --memory, Kubernetes' limits, Slurm's memory."""

import re
from pathlib import Path

from muster.paths import text_of

GROUPS = Path("/proc/self/cgroup")
"""The file that names the control groups of this process."""
ROOT = Path("/sys/fs/cgroup")
"""The folder where control groups are mounted."""


def available() -> tuple[int | None, float | None]:
    """The memory left within the limits, in bytes, and the limit of processor time, in cores; None without a limit.

    Source: https://docs.kernel.org/admin-guide/cgroup-v2.html (memory.max, memory.current, memory.stat, cpu.max)
    """
    memory: list[int] = []
    cores: list[float] = []
    for line in text_of(GROUPS).splitlines():
        # 0::/system.slice/slurmstepd.scope/job_9 in version 2; 4:cpu,cpuacct:/docker/1a2b in version 1
        controllers, _, path = line.partition(":")[2].partition(":")
        top = ROOT / controllers
        group = top / path.lstrip("/")
        # Any parent group may set the limit. Where a container sees the host's path, its own group is mounted at `top`.
        for folder in (each for each in (group, *group.parents) if each == top or top in each.parents):
            if limit := _numbers(folder / "memory.max") + _numbers(folder / "memory.limit_in_bytes"):
                used = _numbers(folder / "memory.current") + _numbers(folder / "memory.usage_in_bytes")
                # The kernel reclaims inactive pages of files when memory is needed. In version 1 only the total
                # includes those of child groups.
                pages = dict(re.findall(r"^(\w+) (\d+)$", text_of(folder / "memory.stat"), re.MULTILINE))
                unused = int(pages.get("total_inactive_file") or pages.get("inactive_file", 0))
                memory.append(max(0, limit[0] - max(0, sum(used) - unused)))
            # "200000 100000": 200 ms of processor time in each 100 ms, thus 2 cores; "max 100000" without a limit
            share = _numbers(folder / "cpu.max")
            share = share or _numbers(folder / "cpu.cfs_quota_us") + _numbers(folder / "cpu.cfs_period_us")
            cores += [share[0] / share[1]] if len(share) == 2 else []
    return min(memory, default=None), min(cores, default=None)


def usable(num_cores: int) -> int:
    """`num_cores`, or fewer where the limit of processor time allows fewer, but at least one."""
    _, limit = available()
    return num_cores if limit is None else max(1, min(num_cores, int(limit)))


def _numbers(path: Path) -> list[int]:
    """The numbers in a file, without words and -1, which stand for no limit."""
    return [int(word) for word in text_of(path).split() if word.isdecimal()]
