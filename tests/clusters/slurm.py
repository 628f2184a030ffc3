"""A real Slurm on fake hosts: one login host with the controller, and compute nodes with stand-in GPUs."""

import contextlib
import re
import secrets
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.clusters.deadline import wait_for
from tests.clusters.hosts import Hosts
from tests.clusters.processes import HostProcess, Process
from tests.clusters.requirements import program
from tests.clusters.slurm_config import LOGIN, daemon_script, write_config
from tests.clusters.slurm_job import Job

START_TIMEOUT_S = 60
DAEMONS = ("munged", "slurmctld", "slurmd")

WAITED = re.compile(r"srun: job \d+ (queued and waiting for|has been allocated) resources\n")
"""What srun says where the step before it has not quite left the nodes."""


class SlurmCluster:
    """A Slurm cluster that exists inside `with`.

    Commands run on the login host, in the folder `shared` that all hosts see, with the environment of a fresh
    login and nothing of the test runner's. Jobs run as root. The partition `main` is the default; a job in `hi`
    preempts jobs in `main`, which are requeued.

    Args:
        workdir: An existing, empty folder. It stays, with the logs in `log/`.
        nodes: Names of the compute nodes.
        gpus: Stand-in GPUs a node, asked for as real ones are. Slurm sets CUDA_VISIBLE_DEVICES; no CUDA.
        cpus: CPUs a node, as Slurm counts them; they need not exist.
        credential_lifetime_s: A requeued job waits this long, and a launch that takes longer fails; at least 5.
        own_name_is_loopback: As `Hosts` has it, and so the next.
        fabric_suffix: Of the names on a second network.
    """

    def __init__(
        self,
        workdir: Path,
        nodes: Sequence[str] = ("node01", "node02"),
        *,
        gpus: int = 0,
        cpus: int = 4,
        credential_lifetime_s: int = 10,
        own_name_is_loopback: bool = False,
        fabric_suffix: str = "",
    ) -> None:
        if credential_lifetime_s < 5:
            raise ValueError(f"Slurm replaces a credential lifetime below 5 s by 120 s; seen: {credential_lifetime_s}")
        self.workdir = workdir
        self.nodes = list(nodes)
        self.login = LOGIN
        self.shared = workdir / "shared"
        self._gpus = gpus
        self._daemons: dict[str, HostProcess] = {}
        self._submitted = 0
        for name in ("etc", "log", "state", "shared"):
            (workdir / name).mkdir()
        key = workdir / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(secrets.token_bytes(128))
        write_config(
            workdir,
            self.nodes,
            gpus=gpus,
            cpus=cpus,
            credential_lifetime_s=credential_lifetime_s,
            version=slurm_version(),
        )
        binds = {workdir / "etc": Path("/etc/slurm")}
        self.hosts = Hosts(
            [LOGIN, *nodes],
            workdir,
            binds=binds,
            own_name_is_loopback=own_name_is_loopback,
            fabric_suffix=fabric_suffix,
        )

    def __enter__(self) -> Self:
        self.hosts.__enter__()
        try:
            for host in self.hosts.addresses:
                self._start_daemons(host)
            wait_for(f"{len(self.nodes)} idle Slurm nodes", self._all_idle, START_TIMEOUT_S, interval_s=0.1)
        except BaseException as error:
            error.add_note(self.log_tails())
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
        """The ended command, run on the login host.

        Raises:
            TimeoutError: It did not end within `timeout` seconds. Every job of the cluster is then cancelled,
                because one that this command began would hold its nodes for all later tests.
            RuntimeError: `check` is set and it failed.
        """
        try:
            return self.hosts.run(LOGIN, argv, timeout=timeout, env=env, cwd=cwd or self.shared, check=check)
        except TimeoutError as late:
            late.add_note(self.log_tails())
            with contextlib.suppress(TimeoutError):
                self.hosts.run(LOGIN, ["scancel", "--user=root"], timeout=400)
            raise

    def srun(
        self,
        *argv: str | Path,
        timeout: float = 120,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        check: bool = False,
    ) -> subprocess.CompletedProcess[str]:
        """The ended `srun ARGV...`, whose tasks have no input; see `run`.

        srun would tell them that its own has ended: where that comes to a node whose task is over, the connection to it
        may be reset, and Slurm ends the whole step for that.
        """
        return self.run("srun", "--input=none", *argv, timeout=timeout, env=env, cwd=cwd, check=check)

    def salloc(
        self,
        *argv: str | Path,
        timeout: float = 120,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        check: bool = False,
    ) -> subprocess.CompletedProcess[str]:
        """The ended `salloc ARGV...`: options and a command, which runs on the login host; see `run`."""
        return self.run("salloc", *argv, timeout=timeout, env=env, cwd=cwd, check=check)

    def submit(self, script: str, *options: str, env: Mapping[str, str] | None = None) -> Job:
        """The job of a batch script, just submitted. Output goes to a file of its own in `shared`."""
        self._submitted += 1
        path = self.shared / f"job{self._submitted}.sh"
        path.write_text(script if script.startswith("#!") else f"#!/bin/bash\n{script}")
        # Before the options, so that one of them can say otherwise.
        ours = ["--parsable", f"--output={self.shared}/%x.%j.out", f"--job-name={path.stem}"]
        return self.job(self.run("sbatch", *ours, *options, path, env=env, check=True).stdout)

    def job(self, printed: str) -> Job:
        """The job that `sbatch --parsable` has printed the id of."""
        return Job(printed.strip().partition(";")[0], lambda *argv: self.run(*argv, check=True).stdout)

    def sbatch(self, script: str, *options: str, timeout: float = 120, env: Mapping[str, str] | None = None) -> Job:
        """The ended job of a batch script, whatever its state; see `Job.wait` for the deadline."""
        return self.submit(script, *options, env=env).wait(timeout)

    def expand(self, nodelist: str) -> list[str]:
        """The host names in a compressed list, as `scontrol show hostnames` has them."""
        return self.run("scontrol", "show", "hostnames", nodelist, check=True).stdout.split()

    def processes(self, node: str) -> list[Process]:
        """What runs on a node besides Slurm's own daemons: the processes of jobs, slurmstepd among them."""
        daemons = {process.pid for process in self.hosts.processes(node) if process.name in DAEMONS}
        return [process for process in self.hosts.processes(node) if process.pid not in daemons]

    def idle(self, timeout: float = 30) -> None:
        """Waits until no job holds a node that lives, as after a job has ended and Slurm cleans up behind it."""
        wait_for("all Slurm nodes to be idle again", self._all_idle, timeout, interval_s=0.1)

    def kill(self, node: str) -> None:
        """Ends a node as a power cut would. Slurm calls it down when it has not answered for 30 s."""
        del self._daemons[node]
        self.hosts.kill(node)

    def start(self, node: str) -> None:
        """Starts a killed node anew; `idle` waits until Slurm uses it again."""
        self.hosts.start(node)
        self._start_daemons(node)

    def log_tails(self, lines: int = 15) -> str:
        """The last lines of each host's Slurm daemon, or of its start where it got no further."""
        tails = []
        for host in self.hosts.addresses:
            logs = [self.workdir / "log" / f"{host}.{kind}" for kind in ("log", "start")]
            text = next((log.read_text(errors="replace") for log in logs if log.exists()), "")
            tails.append(f"--- {host}\n" + "\n".join(text.splitlines()[-lines:]))
        return "\n".join(tails)

    def _start_daemons(self, host: str) -> None:
        script = daemon_script(self.workdir, host, gpus=self._gpus)
        with (self.workdir / "log" / f"{host}.start").open("a") as log:
            self._daemons[host] = self.hosts.popen(host, ["sh", "-ec", script], stdout=log, stderr=subprocess.STDOUT)

    def _all_idle(self) -> bool:
        for host, daemon in self._daemons.items():
            if daemon.poll() is not None:
                raise RuntimeError(f"the Slurm daemon of {host} ended with {daemon.returncode}")
        seen = self.hosts.run(LOGIN, ["sinfo", "--noheader", "--Node", "--partition=main", "--format=%N %t"])
        return {f"{node} idle" for node in self._daemons if node != LOGIN} <= set(seen.stdout.splitlines())


def slurm_version() -> tuple[int, int]:
    """Major and minor version of the installed Slurm, like `(22, 5)`."""
    said = subprocess.run([program("slurmctld"), "-V"], capture_output=True, text=True, check=True, timeout=30).stdout
    found = re.search(r"(\d+)\.(\d+)", said)
    if found is None:
        raise RuntimeError(f"slurmctld -V tells no version: {said!r}")
    return int(found[1]), int(found[2])
