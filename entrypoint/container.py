"""The container that this process is in, and what in it tells of a job whose variables did not get there.

Apptainer passes the environment, unless it is told not to (--cleanenv, --containall). Docker and podman pass nothing.
Without its variables each of a job's processes would look alone, and train a model of its own: so the traces that a
scheduler leaves beside them are looked for.
"""

import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import psutil

from muster import ROOT

PROC = Path("/proc/self")
FILESYSTEM = Path("/")

# Of an engine that leaves no mark, such as containerd by itself, only our own image tells.
UNKNOWN = "an unknown engine"

# The first variable or file that is there decides: Apptainer is often started inside another container, Docker never
# inside Apptainer. A pod has neither of the files.
_MARKS: tuple[tuple[str, tuple[str, ...], tuple[str, ...]], ...] = (
    ("apptainer", ("APPTAINER_CONTAINER", "SINGULARITY_CONTAINER"), (".singularity.d",)),
    ("podman", (), ("run/.containerenv",)),
    ("docker", (), (".dockerenv",)),
    ("kubernetes", ("KUBERNETES_SERVICE_HOST",), ()),
)

# The first process of a PID namespace that Apptainer made: --pid, --containall.
_APPTAINERS_INIT = "appinit"

# Where a scheduler puts the processes of a job:
#   /system.slice/slurmstepd.scope/job_9/step_0/user/task_0      cgroup v2; node1_slurmstepd.scope with several slurmd
#   /slurm/uid_1000/job_5/step_0                                 cgroup v1; slurm_node1 with several slurmd
#   /pbs_jobs.service/jobid/7.pbshead                            /pbs_jobs.service/jobs/... with cgroup v2
#   /system.slice/flux.service                                   and imp-shell-0-f123.service
# Source: https://slurm.schedmd.com/cgroup_v2.html
# Source: https://github.com/openpbs/openpbs/blob/master/test/tests/functional/pbs_cgroups_hook.py
# Source: https://flux-framework.readthedocs.io/projects/flux-core/en/latest/guide/admin.html
_CGROUPS = (
    ("slurm", re.compile(r"/[\w.-]*slurm[\w.-]*/(?:uid_\d+/)?job_\d+")),
    ("pbs", re.compile(r"/pbs_jobs\.service/[^/\s]+/[^/\s]+")),
    ("flux", re.compile(r"/flux\.service\b|/imp-shell-[^/\s]+")),
)

# The files of one job, bound into this container. A spool folder as a whole is none: login nodes may bind it too.
_MOUNTS = (
    ("slurm", re.compile(r"/slurmd/(?:[^/\s]+/)?job\d+(?:/|$)")),
    ("pbs", re.compile(r"/(?:pbs|PBS|torque)/aux/+\d[^/\s]*$")),
    ("grid_engine", re.compile(r"/active_jobs/\d+\.\d+(?:/|$)")),
    ("pals", re.compile(r"/palsd(?:/|$)")),
)

# What starts a job's processes, as /proc/PID/status names it: 15 characters at most. salloc's shell is on a login node.
_PARENTS = {
    "slurmstepd": "slurm",
    "salloc": "slurm",
    "pbs_mom": "pbs",
    "sge_shepherd": "grid_engine",
    "sge_execd": "grid_engine",
    "flux-shell": "flux",
    "flux-broker": "flux",
    "sbatchd": "lsf",
    "res": "lsf",
    "palsd": "pals",
    "hydra_pmi_proxy": "mpiexec",
    "orted": "mpirun",
    "orterun": "mpirun",
    "prted": "mpirun",
    "prterun": "mpirun",
    "mpirun": "mpirun",
    "mpiexec": "mpiexec",
}

SCHEDULERS = ("slurm", "pbs", "lsf", "grid_engine", "flux")


class Trace(NamedTuple):
    """What tells of a job: the scheduler or launcher that left it, and where it was seen."""

    owner: str
    seen: str


def engine(variables: Mapping[str, str], root: Path | None = FILESYSTEM, project: Path = ROOT) -> str | None:
    """The engine of the container that a process is in: apptainer, podman, docker, kubernetes, UNKNOWN; or None.

    Args:
        variables: its variables.
        root: its root; None where only the variables are known, as in a recording.
        project: the folder of this project: in its image it holds image.json.

    Source: https://apptainer.org/docs/user/latest/environment_and_metadata.html (APPTAINER_CONTAINER)
    Source: https://docs.podman.io/en/latest/markdown/podman-run.1.html (/run/.containerenv)
    """
    for name, marks, files in _MARKS:
        if any(mark in variables for mark in marks) or (root and any((root / file).exists() for file in files)):
            return name
    return UNKNOWN if root and (project / "image.json").is_file() else None


def find(cgroup: str, mounts: str, ancestors: Iterable[str]) -> Trace | None:
    """The trace of a job in these, or None.

    Args:
        cgroup: as in /proc/self/cgroup.
        mounts: as in /proc/self/mountinfo.
        ancestors: the names of the processes above, the nearest first.
    """
    for line in cgroup.splitlines():
        path = line.split(":", 2)[-1]
        for owner, pattern in _CGROUPS:
            if pattern.search(path):
                return Trace(owner, f"the control group {path}")
    for name in ancestors:
        # mpirun.openmpi, mpiexec.hydra: several are often installed side by side.
        owner = _PARENTS.get(name.partition(".")[0])
        if owner:
            return Trace(owner, f"the process {name} above this one")
    for line in mounts.splitlines():
        # 36 35 98:0 /spool/pbs/aux/7.head /var/spool/pbs/aux/7.head ro,relatime - ext4 /dev/sda1 ro
        for path in line.split()[3:5]:
            for owner, pattern in _MOUNTS:
                if pattern.search(path):
                    return Trace(owner, f"the mount {path}")
    return None


def read() -> tuple[Trace | None, bool]:
    """The strongest trace of a job that this process sees, and whether Apptainer hid the processes outside."""
    names = ancestors()
    first = find(_text(PROC / "cgroup"), _text(PROC / "mountinfo"), names)
    return first, names[-1:] == [_APPTAINERS_INIT]


def ancestors() -> list[str]:
    """The names of the processes above this one, the nearest first; a PID namespace ends the list."""
    names: list[str] = []
    # One that has ended meanwhile, or is another user's secret, ends the list too.
    with suppress(psutil.Error):
        for process in psutil.Process().parents():
            names.append(process.name())
    return names


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def way_in(name: str | None, is_own_pid_namespace: bool = False) -> str:
    """What lets a job's variables into a container of this engine."""
    if name == "apptainer":
        option = "--containall" if is_own_pid_namespace else "--cleanenv"
        return (
            f"leave {option} out of apptainer's options, or in each task: "
            f'eval "apptainer exec {option} $(muster env --apptainer-args) IMAGE COMMAND"'
        )
    if name in ("docker", "podman"):
        return f"{name} passes none by itself: {name} run $(muster env --docker-args) IMAGE COMMAND"
    return "into a container pass all of the scheduler's variables"


def bind(name: str | None, path: str) -> str:
    """The option that shows the file `path`, quoted for a shell, to a container of this engine."""
    options = {
        "apptainer": f"apptainer exec --bind {path}",
        "docker": f"docker run --volume {path}:{path}:ro",
        "podman": f"podman run --volume {path}:{path}:ro",
    }
    return options.get(name or "") or f"in a container: {options['apptainer']}, docker run -v {path}:{path}:ro"
