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
"""srun's messages if the step before it has not left the nodes yet."""


class SlurmCluster:
    """A Slurm cluster that exists inside `with`.

    Commands run on the login host, in the folder `shared` that all hosts see, with the environment of a fresh
    login and no variable of the test runner's. Jobs run as root. The partition `main` is the default; a job in `hi`
    preempts jobs in `main`, which are requeued.

    Args:
        workdir: An existing, empty folder. It stays, with the logs in `log/`.
        nodes: Names of the compute nodes.
        gpus: Stand-in GPUs per node, requested as real ones are. Slurm sets CUDA_VISIBLE_DEVICES, but CUDA finds none.
        cpus: CPUs per node, as Slurm counts them; they need not exist.
        credential_lifetime_s: A requeued job waits this long, and a launch that takes longer fails; at least 5.
        own_name_is_loopback: As for `Hosts`.
        fabric_suffix: As for `Hosts`: the suffix of names in a second network.
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
        """Runs a command on the login host; returns the completed process.

        Raises:
            TimeoutError: It did not end within `timeout` seconds. Every job of the cluster is then cancelled,
                because a job of this command would keep its nodes during all later tests.
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
        """Runs `srun ARGV...`, whose tasks have no input; see `run`.

        Otherwise srun would tell the tasks that its own input has ended. If that reaches a node whose task is over, the
        connection may be reset, and Slurm then ends the whole step.
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
        """Runs `salloc ARGV...`: options and a command, which runs on the login host; see `run`."""
        return self.run("salloc", *argv, timeout=timeout, env=env, cwd=cwd, check=check)

    def submit(self, script: str, *options: str, env: Mapping[str, str] | None = None) -> Job:
        """Submits a batch script; returns the job, whose output goes to a file of its own in `shared`."""
        self._submitted += 1
        path = self.shared / f"job{self._submitted}.sh"
        path.write_text(script if script.startswith("#!") else f"#!/bin/bash\n{script}")
        # Before the options, so that one of them can override these.
        ours = ["--parsable", f"--output={self.shared}/%x.%j.out", f"--job-name={path.stem}"]
        return self.job(self.run("sbatch", *ours, *options, path, env=env, check=True).stdout)

    def job(self, printed: str) -> Job:
        """The job whose id `sbatch --parsable` has printed."""
        return Job(printed.strip().partition(";")[0], lambda *argv: self.run(*argv, check=True).stdout)

    def sbatch(self, script: str, *options: str, timeout: float = 120, env: Mapping[str, str] | None = None) -> Job:
        """Submits a batch script and waits for its end, in whatever state; see `Job.wait` for the deadline."""
        return self.submit(script, *options, env=env).wait(timeout)

    def expand(self, nodelist: str) -> list[str]:
        """The host names in a compressed list, as `scontrol show hostnames` has them."""
        return self.run("scontrol", "show", "hostnames", nodelist, check=True).stdout.split()

    def processes(self, node: str) -> list[Process]:
        """The processes on a node besides Slurm's own daemons: those of jobs, slurmstepd among them."""
        daemons = {process.pid for process in self.hosts.processes(node) if process.name in DAEMONS}
        return [process for process in self.hosts.processes(node) if process.pid not in daemons]

    def idle(self, timeout: float = 30) -> None:
        """Waits until all nodes that were not killed are idle: Slurm cleans them up for a while after a job's end."""
        wait_for("all Slurm nodes to be idle again", self._all_idle, timeout, interval_s=0.1)

    def kill(self, node: str) -> None:
        """Ends a node as a power cut would. Slurm marks it as down when it has not answered for 30 s."""
        del self._daemons[node]
        self.hosts.kill(node)

    def start(self, node: str) -> None:
        """Starts a killed node again; `idle` waits until Slurm uses it again."""
        self.hosts.start(node)
        self._start_daemons(node)

    def log_tails(self, lines: int = 15) -> str:
        """The last lines of each Slurm daemon's log, or of its start script's output if there is no log."""
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
