"""A batch job of the tests' Slurm."""

import re
from collections.abc import Callable
from pathlib import Path

from tests.clusters.deadline import wait_for

FINAL_STATES = {
    "BOOT_FAIL",
    "CANCELLED",
    "COMPLETED",
    "DEADLINE",
    "FAILED",
    "NODE_FAIL",
    "OUT_OF_MEMORY",
    "PREEMPTED",
    "TIMEOUT",
}


class Job:
    """A submitted job, which may still be pending or running.

    An array or a heterogeneous job has several records; see `records`. The other members describe the first
    one, but `state` is `COMPLETED` only if all are.

    Args:
        job_id: As sbatch printed it.
        control: Runs a command of Slurm, given as arguments; returns its output.
    """

    def __init__(self, job_id: str, control: Callable[..., str]) -> None:
        self.id = job_id
        self._control = control

    def records(self) -> list[dict[str, str]]:
        """The answer of `scontrol show job`: a mapping like `{"JobState": "RUNNING", ...}` for each component."""
        lines = self._control("scontrol", "--oneliner", "show", "job", self.id).splitlines()
        return [dict(re.findall(r"(?:^|\s)([\w/:]+)=(\S*)", line)) for line in lines if line.strip()]

    @property
    def state(self) -> str:
        """Slurm's name of the state: PENDING, RUNNING, COMPLETED, FAILED, TIMEOUT..."""
        states = [record["JobState"] for record in self.records()]
        unfinished = [state for state in states if state not in FINAL_STATES]
        failed = [state for state in states if state != "COMPLETED"]
        return (unfinished or failed or states)[0]

    @property
    def exit_code(self) -> int:
        """The exit code of the batch script; 0 also when a signal ended it: see `signal`."""
        return int(self.records()[0]["ExitCode"].partition(":")[0])

    @property
    def signal(self) -> int:
        """The signal that ended the batch script, or 0."""
        return int(self.records()[0]["ExitCode"].partition(":")[2])

    @property
    def restarts(self) -> int:
        """How often the job was requeued."""
        return int(self.records()[0]["Restarts"])

    @property
    def output(self) -> str:
        """The job's output so far; several components one after the other."""
        paths = dict.fromkeys(Path(record["StdOut"]) for record in self.records() if "StdOut" in record)
        return "".join(path.read_text(errors="replace") for path in paths if path.exists())

    def wait(self, timeout: float = 120) -> "Job":
        """Waits until the job has ended in whatever state; returns the job.

        Raises:
            TimeoutError: It has not ended; the job is cancelled, and the message has its state and output.
        """
        return self.wait_for_state(*FINAL_STATES, timeout=timeout)

    def wait_for_state(self, *states: str, timeout: float = 60) -> "Job":
        """Waits until the job is in one of these states; otherwise as `wait`.

        Raises:
            RuntimeError: It ended in another state.
        """

        def look() -> str | None:
            seen = self.state
            if seen in FINAL_STATES and seen not in states:
                raise RuntimeError(f"job {self.id} was to be {' or '.join(states)}, and is {seen}:\n{self.output}")
            return seen if seen in states else None

        wanted = "to end" if set(states) >= FINAL_STATES else f"to be {' or '.join(states)}"
        try:
            wait_for(f"job {self.id} {wanted}", look, timeout, interval_s=0.1)
        except TimeoutError as late:
            record, output = self.records()[0], self.output
            self.cancel()
            detail = f"state {record['JobState']}, reason {record['Reason']}; it wrote:\n{output}"
            raise TimeoutError(f"{late}; {detail}") from None
        return self

    def cancel(self, *options: str) -> None:
        """Runs scancel with these options on the job."""
        self._control("scancel", *options, self.id)
