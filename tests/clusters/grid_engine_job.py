"""A batch job of the tests' Grid Engine."""

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

from tests.clusters.deadline import wait_for

DONE = "done"


class Account(NamedTuple):
    """Grid Engine's record of an ended job, or of an ended task of an array job; see accounting(5).

    Attributes:
        host: Where the job script ran.
        task: Its number in an array job, otherwise 0.
        failed: 0 if the script ran to its end; 100 if a signal ended it.
        exit_code: The script's, 128 and its number for a signal.
    """

    host: str
    task: int
    failed: int
    exit_code: int


class Job:
    """A submitted job, which may still be pending or running.

    An array job has an account and an output file for each task. `exit_code` is the first that is not 0.

    Args:
        job_id: As qsub printed it, without the range of an array.
        name: As qsub was given it.
        folder: Where its output files are.
        accounting: Grid Engine's file of that name.
        control: Runs a command, given as arguments, on the login host.
    """

    def __init__(
        self,
        job_id: str,
        name: str,
        folder: Path,
        accounting: Path,
        control: Callable[..., subprocess.CompletedProcess[str]],
    ) -> None:
        self.id = job_id
        self._output = folder / f"{name}.o{job_id}"
        self._accounting = accounting
        self._control = control

    @property
    def state(self) -> str:
        """`done`, or as qstat writes it: qw (waiting), t (being sent to its host), r (runs), Eqw (can't start)..."""
        told = ElementTree.fromstring(self._control("qstat", "-u", "*", "-xml").stdout)
        mine = [job for job in told.iter("job_list") if job.findtext("JB_job_number") == self.id]
        return mine[0].findtext("state", "") if mine else DONE

    @property
    def accounts(self) -> list[Account]:
        """The accounts of the ended tasks, in their order; none if the job was deleted before it ran."""
        written = self._accounting.read_text().splitlines() if self._accounting.exists() else []
        records = [line.split(":") for line in written if not line.startswith("#")]
        # Slave tasks, started by qrsh -inherit, have accounts of their own: the 4th field from the end is their id.
        mine = [record for record in records if record[5] == self.id and record[-4] == "NONE"]
        return sorted(
            (Account(record[1], int(record[35]), int(record[11]), int(record[12])) for record in mine),
            key=lambda account: account.task,
        )

    @property
    def exit_code(self) -> int:
        """The exit code of the batch script."""
        codes = [account.exit_code for account in self.accounts]
        if not codes:
            raise RuntimeError(f"job {self.id} is {self.state} and has no exit code; it wrote:\n{self.output}")
        return next((code for code in codes if code), 0)

    @property
    def output(self) -> str:
        """The job's output so far, with its errors; the tasks of an array one after the other."""
        paths = [*self._output.parent.glob(self._output.name), *self._output.parent.glob(f"{self._output.name}.*")]
        tasks = sorted(paths, key=lambda path: (len(path.name), path.name))
        return "".join(path.read_text(errors="replace") for path in tasks)

    def wait(self, timeout: float = 120) -> "Job":
        """Waits until the job has ended in whatever way; returns the job.

        Raises:
            TimeoutError: It has not ended; the job is deleted, and the message has its state and output.
            RuntimeError: It can't start; the message has the reason, and the job is deleted.
        """
        return self.wait_for_state(DONE, timeout=timeout)

    def wait_for_state(self, *states: str, timeout: float = 60) -> "Job":
        """Waits until the job is in one of these states; otherwise as `wait`.

        Raises:
            RuntimeError: It ended without being seen in one of these states.
        """
        last = ""

        def look() -> str | None:
            nonlocal last
            last = self.state
            if last in states:
                return last
            if last == DONE:
                raise RuntimeError(f"job {self.id} was to be {' or '.join(states)}, and has ended:\n{self.output}")
            if last.startswith("E"):
                told = self._control("qstat", "-j", self.id).stdout
                self.cancel()
                reasons = [line for line in told.splitlines() if line.startswith("error reason")]
                raise RuntimeError(f"job {self.id} can't start: {' '.join(reasons)}")
            return None

        try:
            wait_for(f"job {self.id} to be {' or '.join(states)}", look, timeout, interval_s=0.1)
        except TimeoutError as late:
            output = self.output
            self.cancel()
            raise TimeoutError(f"{late}; state {last}; it wrote:\n{output}") from None
        return self

    def cancel(self, *options: str) -> None:
        """Runs qdel with these options on the job. With qsub's `-notify` it gets USR2 some seconds before KILL."""
        self._control("qdel", *options, self.id)
