"""Open MPI's and MPICH's launchers on fake hosts, by ssh or an agent in its place, or inside a scheduler's job.

Debian has both side by side, and the administrator chooses which of them `mpirun` and `mpiexec` are: only
`mpirun.openmpi` and `mpiexec.hydra` are called.
"""

import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.clusters.accounts import write_accounts
from tests.clusters.hosts import Hosts
from tests.clusters.processes import Process
from tests.clusters.ssh import start_ssh

# Called with ssh's arguments, AGENT [-x] HOST COMMAND...; writes the host of each call into a log.
AGENT = """#!/bin/sh
while [ "${{1#-}}" != "$1" ]; do shift; done
echo "$1" >> {log}
exec ssh "$@"
"""


class MpiHosts:
    """Hosts without a scheduler, with ssh between them, that exist inside `with`.

    Commands run on the first host, in the folder `shared` that all hosts see, with the environment of a fresh
    login and no variable of the test runner's.

    Args:
        workdir: An existing, empty folder. It stays, with the servers' logs in `ssh/`.
        names: Names of the hosts.
        own_name_is_loopback: As for `Hosts`.
    """

    def __init__(
        self, workdir: Path, names: Sequence[str] = ("node01", "node02"), *, own_name_is_loopback: bool = False
    ) -> None:
        self.workdir = workdir
        self.names = list(names)
        self.shared = workdir / "shared"
        self.shared.mkdir()
        self.agent = workdir / "agent.sh"
        self.agent.write_text(AGENT.format(log=workdir / "agent.log"))
        self.agent.chmod(0o755)
        binds = write_accounts(workdir, workdir / "home")
        self.hosts = Hosts(names, workdir, binds=binds, own_name_is_loopback=own_name_is_loopback)

    def __enter__(self) -> Self:
        self.hosts.__enter__()
        try:
            start_ssh(self.hosts)
        except BaseException:
            self.hosts.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.hosts.close()

    def run(
        self,
        *argv: str | Path,
        timeout: float = 120,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        check: bool = False,
    ) -> subprocess.CompletedProcess[str]:
        """Runs a command on the first host; returns the completed process.

        Raises:
            TimeoutError: It did not end within `timeout` seconds. Everything on the hosts but the ssh servers is
                then killed: the ranks of a killed mpirun outlive it.
            RuntimeError: `check` is set and it failed.
        """
        try:
            return self.hosts.run(self.names[0], argv, timeout=timeout, env=env, cwd=cwd or self.shared, check=check)
        except TimeoutError:
            for process in [process for name in self.names for process in self.processes(name)]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGKILL)
            raise

    def processes(self, host: str) -> list[Process]:
        """The processes on a host, without those of the ssh server."""
        return [process for process in self.hosts.processes(host) if process.name != "sshd"]

    @property
    def agent_calls(self) -> list[str]:
        """The hosts that the agent was asked to reach so far."""
        log = self.workdir / "agent.log"
        return log.read_text().split() if log.exists() else []


def openmpi(
    cluster: MpiHosts,
    argv: Sequence[str | Path],
    *options: str,
    ranks: Mapping[str, int] | None = None,
    agent: str | Path | None = None,
    timeout: float = 120,
    env: Mapping[str, str] | None = None,
    check: bool = True,
) -> subprocess.CompletedProcess[str]:
    """Runs `mpirun.openmpi ARGV...` on the first host.

    Args:
        cluster: The hosts.
        argv: The command of each rank.
        options: For mpirun: `-x NAME`, `--map-by node`...
        ranks: Host to number of its ranks; 2 on each host by default.
        agent: A program in the place of ssh, such as `cluster.agent`.
        timeout: As for `MpiHosts.run`, like the arguments after it.
    """
    placed = ranks or dict.fromkeys(cluster.names, 2)
    where = ["--host", _listed(placed), "-np", str(sum(placed.values()))]
    by = ["--mca", "plm_rsh_agent", str(agent)] if agent else []
    return cluster.run(*openmpi_command(argv, *where, *by, *options), timeout=timeout, env=env, check=check)


def hydra(
    cluster: MpiHosts,
    argv: Sequence[str | Path],
    *options: str,
    ranks: Mapping[str, int] | None = None,
    agent: str | Path | None = None,
    timeout: float = 120,
    env: Mapping[str, str] | None = None,
    check: bool = True,
) -> subprocess.CompletedProcess[str]:
    """Runs `mpiexec.hydra ARGV...` on the first host; the arguments are those of `openmpi`."""
    placed = ranks or dict.fromkeys(cluster.names, 2)
    where = ["-hosts", _listed(placed), "-n", str(sum(placed.values()))]
    by = ["-launcher", "ssh", "-launcher-exec", str(agent)] if agent else []
    return cluster.run(*hydra_command(argv, *where, *by, *options), timeout=timeout, env=env, check=check)


def openmpi_command(argv: Sequence[str | Path], *options: str) -> list[str]:
    """The command line of Open MPI's mpirun, for use inside a scheduler's job, too."""
    # Fake hosts share the machine's cores, so ranks are not bound to them: mpirun refuses more bound ranks than cores.
    # mpirun's own files go to /dev/shm, which each host has of its own, unlike /tmp.
    ours = ["--allow-run-as-root", "--bind-to", "none", "--mca", "orte_tmpdir_base", "/dev/shm"]
    return ["mpirun.openmpi", *ours, *options, *map(str, argv)]


def hydra_command(argv: Sequence[str | Path], *options: str) -> list[str]:
    """The command line of MPICH's mpiexec, for use inside a scheduler's job, too."""
    return ["mpiexec.hydra", *options, *map(str, argv)]


def _listed(ranks: Mapping[str, int]) -> str:
    return ",".join(f"{host}:{number}" for host, number in ranks.items())
