"""A real Grid Engine on fake hosts: one login host with the master daemon, and execution hosts."""

import contextlib
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.clusters.accounts import write_accounts
from tests.clusters.deadline import wait_for
from tests.clusters.grid_engine_config import LOGIN, QUEUE, ROOT, daemon_script, scheduler_config, write_config
from tests.clusters.grid_engine_job import Job
from tests.clusters.hosts import Hosts
from tests.clusters.processes import HostProcess, Process

START_TIMEOUT_S = 60
DAEMONS = ("sge_qmaster", "sge_execd")


class GridEngineCluster:
    """A Grid Engine cluster that exists inside `with`.

    Commands run on the login host, in the folder `shared` that all hosts see, with the environment of a fresh
    login and no variable of the test runner's. Jobs run as root in the queue `main.q`.

    A job gets several hosts by a parallel environment, `-pe NAME SLOTS`: `one` and `two` give 1 and 2 slots per
    host, `fill` fills one host after the other, `round` takes slots of the hosts in turn, `smp` takes one host. In all
    of them `qrsh -inherit HOST COMMAND` starts a task on a host of the job. The order of hosts is Grid Engine's.

    Args:
        workdir: An existing, empty folder. It stays, with Grid Engine's `root`, `config`, each host's `spool`.
        nodes: Names of the execution hosts.
        slots: Slots per node.
        gpus: GPUs per node, for `-l gpu=...`. Grid Engine 8.1.9 only counts them, and names no device to the job.
    """

    def __init__(
        self, workdir: Path, nodes: Sequence[str] = ("node01", "node02"), *, slots: int = 4, gpus: int = 0
    ) -> None:
        self.workdir = workdir
        self.nodes = list(nodes)
        self.login = LOGIN
        self.shared = workdir / "shared"
        self.shared.mkdir()
        self._submitted = 0
        self._starting: dict[str, HostProcess] = {}
        write_config(workdir, self.nodes, slots=slots, gpus=gpus)
        binds = {workdir / "root": ROOT, **write_accounts(workdir, workdir / "home")}
        self.hosts = Hosts([LOGIN, *nodes], workdir, binds=binds)

    def __enter__(self) -> Self:
        self.hosts.__enter__()
        try:
            self._start()
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
            TimeoutError: It did not end within `timeout` seconds. Every job of the cluster is then deleted,
                because a job of this command would keep its slots during all later tests.
            RuntimeError: `check` is set and it failed.
        """
        try:
            return self.hosts.run(LOGIN, argv, timeout=timeout, env=env, cwd=cwd or self.shared, check=check)
        except TimeoutError as late:
            late.add_note(self.log_tails())
            with contextlib.suppress(TimeoutError):
                self.hosts.run(LOGIN, ["qdel", "-u", "*"], timeout=400)
            raise

    def submit(
        self, script: str, *options: str, env: Mapping[str, str] | None = None, arguments: Sequence[str] = ()
    ) -> Job:
        """Submits a batch script; returns the job, whose output goes to files of its own in `shared`.

        Args:
            script: Shell lines, or a whole script that begins with `#!`.
            options: For qsub; they override those that are set here.
            env: Variables of qsub itself: the job gets them only by `-V` or `-v NAME`.
            arguments: Of the script.
        """
        self._submitted += 1
        path = self.shared / f"job{self._submitted}.sh"
        path.write_text(script if script.startswith("#!") else f"#!/bin/bash\n{script}")
        ours = ["-terse", "-N", path.stem, "-wd", str(self.shared), "-o", str(self.shared), "-j", "y"]
        submitted = self.run("qsub", *ours, *options, path, *arguments, env=env, check=True)
        # `7`, or `7.1-3:1` for an array; warnings come before it.
        job_id = submitted.stdout.split()[-1].partition(".")[0]
        accounting = self.workdir / "root" / "default" / "common" / "accounting"
        return Job(job_id, path.stem, self.shared, accounting, self.run)

    def qsub(self, script: str, *options: str, timeout: float = 120, env: Mapping[str, str] | None = None) -> Job:
        """Submits a batch script and waits for its end; see `submit` for arguments and `Job.wait` for the deadline."""
        return self.submit(script, *options, env=env).wait(timeout)

    def processes(self, node: str) -> list[Process]:
        """The processes on a node besides Grid Engine's own daemons: those of jobs, sge_shepherd among them."""
        return [process for process in self.hosts.processes(node) if process.name not in DAEMONS]

    def idle(self, timeout: float = 30) -> None:
        """Waits until no job is left, and no process of a job."""
        wait_for("Grid Engine to have no job", lambda: not self.run("qstat", "-u", "*").stdout, timeout, 0.1)
        for node in self.nodes:
            wait_for(f"{node} to be without a job", lambda node=node: not self.processes(node), timeout)

    def log_tails(self, lines: int = 15) -> str:
        """The last lines of each daemon's log, and of its start script's output."""
        logs = sorted([*self.workdir.glob("spool/**/messages"), *self.workdir.glob("*.start")])
        tails = [(log, log.read_text(errors="replace").splitlines()[-lines:]) for log in logs]
        return "\n".join(f"--- {log.relative_to(self.workdir)}\n" + "\n".join(tail) for log, tail in tails)

    def _start(self) -> None:
        self._start_daemon(LOGIN)
        wait_for("Grid Engine's master to answer", self._master_answers, START_TIMEOUT_S, interval_s=0.1)
        config = self.workdir / "config"
        printed = self.run("qconf", "-ssconf", check=True).stdout
        (config / "scheduler").write_text(scheduler_config(printed))
        self.run("qconf", "-Msconf", config / "scheduler", check=True)
        self.run("qconf", "-Aq", config / "queue", check=True)
        for node in self.nodes:
            self._start_daemon(node)
        wait_for(f"{len(self.nodes)} Grid Engine hosts", self._all_up, START_TIMEOUT_S, interval_s=0.1)

    def _start_daemon(self, host: str) -> None:
        with (self.workdir / f"{host}.start").open("a") as log:
            argv = ["sh", "-ec", daemon_script(self.workdir, host)]
            self._starting[host] = self.hosts.popen(host, argv, stdout=log, stderr=subprocess.STDOUT)

    def _check_daemons(self) -> None:
        # The start script ends seconds after the daemon answers: this looks for failures, without waiting for its end.
        for host, started in self._starting.items():
            if started.poll():
                raise RuntimeError(f"Grid Engine's daemon of {host} failed to start")

    def _master_answers(self) -> bool:
        self._check_daemons()
        return self.run("qconf", "-sh").returncode == 0

    def _all_up(self) -> bool:
        self._check_daemons()
        # A host whose daemon has not reported yet has the state "au"; one that can be used has none, and 5 fields:
        # main.q@node01                  BIP   0/0/4          0.52     lx-amd64
        lines = [line.split() for line in self.run("qstat", "-f").stdout.splitlines()]
        up = {line[0] for line in lines if len(line) == 5}
        return {f"{QUEUE}@{node}" for node in self.nodes} <= up
