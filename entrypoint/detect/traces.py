"""What in a container tells of a job whose variables did not get there.

Without its variables each of a job's processes would look alone, and train a model of its own: so the traces that a
scheduler or launcher leaves beside them are looked for. Each family has its own patterns: CGROUP of the control group
that its processes are in; PARENT of the names of processes above those of a job; MOUNT of a file or folder of one job
that is bound into the container (a spool folder as a whole is none: login nodes may bind it too).
"""

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import psutil

from muster.entrypoint.detect.families import FAMILIES
from muster.paths import text_of

PROC = Path("/proc/self")


class Trace(NamedTuple):
    """What tells of a job: the family that left it, and where it was seen."""

    owner: str
    seen: str


def find(cgroup: str, mounts: str, ancestors: Iterable[str]) -> Trace | None:
    """The trace of a job in these, or None.

    Args:
        cgroup: as in /proc/self/cgroup.
        mounts: as in /proc/self/mountinfo.
        ancestors: the names of the processes above, the nearest first.
    """
    # The strongest first.
    places = [("CGROUP", line.split(":", 2)[-1], "the control group {}") for line in cgroup.splitlines()]
    places += [("PARENT", name, "the process {} above this one") for name in ancestors]
    # 36 35 98:0 /spool/pbs/aux/7.head /var/spool/pbs/aux/7.head ro,relatime - ext4 /dev/sda1 ro
    places += [("MOUNT", path, "the mount {}") for line in mounts.splitlines() for path in line.split()[3:5]]
    for kind, text, seen in places:
        for family in FAMILIES:
            pattern = getattr(family.module, kind, None)
            if pattern and pattern.search(text):
                return Trace(family.name, seen.format(text))
    return None


def read(*, is_container: bool = True) -> Trace | None:
    """The strongest trace of a job that this process sees. Outside of a container the mounts may be of any job."""
    return find(text_of(PROC / "cgroup"), text_of(PROC / "mountinfo") if is_container else "", ancestors())


def ancestors() -> list[str]:
    """The names of the processes above this one, the nearest first; a PID namespace ends the list."""
    names: list[str] = []
    # One that has ended meanwhile, or is another user's secret, ends the list too.
    with suppress(psutil.Error):
        for process in psutil.Process().parents():
            names.append(process.name())
    return names
