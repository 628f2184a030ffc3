"""The programs and rights that cluster tests need on the machine; without them a test is skipped, or in CI fails."""

import functools
import os
import shutil
import subprocess
from pathlib import Path
from typing import NoReturn

import pytest

PACKAGES_FILE = Path(__file__).with_name("packages.txt")

PACKAGE_OF = {
    "ip": "iproute2",
    "iptables": "iptables",
    "mount": "mount",
    "mpiexec.hydra": "mpich",
    "mpirun.openmpi": "openmpi-bin",
    "munged": "munge",
    "nsenter": "util-linux",
    "ps": "procps",
    "qrsh": "gridengine-client",
    "qstat": "gridengine-client",
    "qsub": "gridengine-client",
    "salloc": "slurm-client",
    "sbatch": "slurm-client",
    "scontrol": "slurm-client",
    "setpriv": "util-linux",
    "setsid": "util-linux",
    "sge_execd": "gridengine-exec",
    "sge_qmaster": "gridengine-master",
    "slurmctld": "slurmctld",
    "slurmd": "slurmd",
    "srun": "slurm-client",
    "ssh": "openssh-client",
    "ssh-keygen": "openssh-client",
    "sshd": "openssh-server",
    "tc": "iproute2",
    "unshare": "util-linux",
}
"""Program to Debian package; the packages are those of packages.txt."""

HOSTS_PROGRAMS = ("ip", "mount", "nsenter", "ps", "setpriv", "setsid", "unshare")
SLURM_PROGRAMS = (*HOSTS_PROGRAMS, "munged", "salloc", "sbatch", "scontrol", "slurmctld", "slurmd", "srun")
GRID_ENGINE_PROGRAMS = (*HOSTS_PROGRAMS, "qrsh", "qstat", "qsub", "sge_execd", "sge_qmaster")
MPI_PROGRAMS = (*HOSTS_PROGRAMS, "mpiexec.hydra", "mpirun.openmpi", "ssh", "ssh-keygen", "sshd")

# Daemons live in sbin, which is not on every user's PATH.
SEARCH_PATH = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/local/sbin", "/usr/sbin", "/sbin"])


def program(name: str) -> str:
    """The absolute path of a program, or its bare name if this machine does not have it."""
    return shutil.which(name, path=SEARCH_PATH) or name


def require_programs(*names: str) -> None:
    """Skips the test unless all these programs are installed; with CI=true fails it."""
    missing = sorted(name for name in names if shutil.which(name, path=SEARCH_PATH) is None)
    if missing:
        packages = sorted({PACKAGE_OF.get(name, name) for name in missing})
        refuse(
            f"missing programs: {', '.join(missing)}; fix: apt-get install --no-install-recommends {' '.join(packages)}"
        )


def require_unshare(*options: str) -> None:
    """Skips the test where this user may not make such a namespace, as in many containers; with CI=true fails it."""
    require_programs("unshare")
    tried = subprocess.run(["unshare", *options, "true"], capture_output=True, text=True, timeout=240)
    if tried.returncode:
        refuse(f"needs leave for a namespace: {tried.stderr.strip()}")


def require_namespaces() -> None:
    """Skips the test unless this user may create the namespaces of fake hosts; with CI=true fails it."""
    require_programs(*HOSTS_PROGRAMS)
    problem = _namespace_problem()
    if problem:
        fix = "run the tests as root"
        if "propagation" in problem:
            # In a chroot / is no mount point, and only below a mount point can our mounts be hidden from others.
            fix = "in a chroot, first make its folder a mount point: mount --bind FOLDER FOLDER"
        refuse(f"fake hosts need root with the right to create namespaces: {problem}; fix: {fix}")


def refuse(reason: str) -> NoReturn:
    """Skips the test with this reason; fails it in CI, where a skip would hide a gap."""
    if os.environ.get("CI") == "true":
        pytest.fail(f"CI=true, so this is no skip: {reason}", pytrace=False)
    pytest.skip(reason)


@functools.cache
def _namespace_problem() -> str:
    if os.geteuid() != 0:
        return f"user id is {os.geteuid()}"
    # A container's root often lacks the capability, as only a try shows.
    probe = [program("unshare"), "--net", "--uts", "--ipc", "--mount", "--pid", "--fork", "--mount-proc"]
    made = subprocess.run(
        [*probe, program("ip"), "link", "add", "probe", "type", "bridge"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=30,
    )
    return made.stderr.strip() if made.returncode else ""
