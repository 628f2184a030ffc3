"""Traces of a job in a container that the job's variables did not reach.

Without the variables each process of a job would seem to be alone, and train a model of its own. So other traces of
schedulers and launchers are looked for. Each family has patterns for them: CGROUP for the control group of its
processes; PARENT for the names of their ancestors; MOUNT for a file or folder of one job that is bound into the
container (not for a whole spool folder: login nodes may bind it too).
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
    """A trace of a job: the family that left it, and where it was seen."""

    owner: str
    seen: str


def find(cgroup: str, mounts: str, ancestors: Iterable[str]) -> Trace | None:
    """The strongest trace of a job in these, or None.

    Args:
        cgroup: as in /proc/self/cgroup.
        mounts: as in /proc/self/mountinfo.
        ancestors: the names of this process's ancestors, the nearest first.
    """
    # The strongest kind first.
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
    """The strongest trace of a job that this process sees. Outside of a container the mounts may belong to any job."""
    return find(text_of(PROC / "cgroup"), text_of(PROC / "mountinfo") if is_container else "", ancestors())


def ancestors() -> list[str]:
    """The names of the processes above this one, the nearest first; a PID namespace ends the list."""
    names: list[str] = []
    # A process that has ended meanwhile, or that this user may not see, ends the list too.
    with suppress(psutil.Error):
        for process in psutil.Process().parents():
            names.append(process.name())
    return names
