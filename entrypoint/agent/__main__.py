"""The agent of one node: torchrun in this process, with error messages and exit codes of our own.

The launcher execs this module, which takes torchrun's options with their usual meaning. It adds that a node waits for
the master with a deadline and a message, that a failure is reported in three lines, and that the workers' exit codes 2
and 75 are passed on (torchrun's own is 1 in every case). A scheduler's warning goes on to the workers, which write a
checkpoint and end by themselves; torchrun would stop them at once.
"""

# ruff: noqa: E402

import argparse
import gc
import json
import logging
import os
import re
import signal
import socket
import sys
import tempfile
import time
from contextlib import suppress
from itertools import takewhile
from types import FrameType

import psutil

from muster import interruption, processes
from muster.errors import ExitCode, MusterError, code_for_job, notify, notify_if_slow, one_line
from muster.variables import LaunchVariable

if __name__ == "__main__":
    # Before torch is loaded, which takes seconds.
    interruption.start(" ".join(os.environ.get(LaunchVariable.COMMAND, "muster run").split()[:2]))

# torch reads the level when it is loaded. Its warnings about addresses without a host name are of no use to a user.
QUIET = "TORCH_CPP_LOG_LEVEL" not in os.environ
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

# Only the first agent of a launch prints messages that all of them would print.
OPTIONS = tuple(takewhile(lambda word: word.startswith("--"), sys.argv[1:]))  # without those of the user's script
IS_FIRST = not any(re.fullmatch(r"--node-rank=[1-9][0-9]*|--rdzv-conf=.*is_host=0.*", word) for word in OPTIONS)

gc.disable()  # imports make objects that all stay: searching them for garbage is an eighth of the import time

with notify_if_slow("loading PyTorch", is_shown=IS_FIRST):
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.run import parse_args  # pyright: ignore[reportUnknownVariableType]

from muster.entrypoint.agent import rendezvous
from muster.entrypoint.agent.agent import Status, run
from muster.entrypoint.agent.failures import is_ours, is_training, lost_nodes, not_met, report

gc.enable()
if QUIET:
    del os.environ["TORCH_CPP_LOG_LEVEL"]  # the ranks do not inherit it


WARNINGS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
"""Signals that schedulers send some time before SIGKILL; the trainers handle the same (train/health/preemption.py)."""

CONNECT_TIMEOUT_S = 5.0

# The loggers and the beginnings of torchrun's messages about the end of workers, which `main` reports better.
_LOGGERS = (
    "torch.distributed.elastic.agent.server.api", "torch.distributed.elastic.multiprocessing.api",
    "torch.multiprocessing.spawn", "torch.numa.binding",
)  # fmt: skip
_REPORTED_BELOW = (
    "Sending process %s closing", "Closing process %s via", "Terminating process %s via", "failed (exitcode: %s)",
    "Received %s death", "Failed to apply NUMA", "Unable to shutdown process", "Error waiting on exit barrier",
)  # fmt: skip


def main(argv: list[str], folder: str) -> int:
    """Runs this node's workers by torchrun's arguments `argv`; returns the exit code. `folder` is for torch's files."""
    for name in _LOGGERS:
        logging.getLogger(name).addFilter(lambda entry: not str(entry.msg).startswith(_REPORTED_BELOW))
    arguments = parse_args(argv)
    if arguments.tee == arguments.redirects == "0":
        arguments.log_dir = arguments.log_dir or folder  # torch would make a folder that stays
    address, port = rendezvous.endpoint_of(arguments)
    status, failures, error = SignalHandlingStatus(), None, None
    try:
        status.take_over(arguments)
        if rendezvous.joins_other_store(arguments):
            wait_for(address, port, rendezvous.timeout_s(arguments))
        failures = run(arguments, status)
    except Exception as caught:
        error = caught
    # Only the report is still to come: from here on no signal changes it, or the exit code.
    for number in (*WARNINGS, signal.SIGHUP, signal.SIGQUIT, signal.SIGXCPU, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    if refusal := os.environ.get(LaunchVariable.REFUSAL):
        return json.loads(refusal)["code"]  # the launch has printed it
    if isinstance(error, SignalException):
        status.warning = error.sigval.name
        return status.answer()
    if error and not isinstance(error, MusterError):
        if status.warning == "SIGINT":
            return status.answer()
        if os.environ.get("MUSTER_DEBUG"):
            raise error
        error = lost_nodes(address, port, error) if status.workers else not_met(address, port, arguments.nnodes, error)
    if error:
        notify(error)
        return error.code
    if failures and status.explains(failures):
        return status.answer()
    return report(failures, status) if failures else ExitCode.DONE


class SignalHandlingStatus(Status):
    """The status of a node that handles a scheduler's warnings, and Ctrl-C; `warning` is the signal's name."""

    def take_over(self, arguments: argparse.Namespace) -> None:
        """Installs the handlers of SIGINT and WARNINGS; torchrun keeps only SIGHUP, SIGQUIT and SIGXCPU."""
        # Signals that are ignored, as by nohup, stay ignored. SIGXCPU is always there: torch takes no empty list.
        handled = [each for each in (signal.SIGHUP, signal.SIGQUIT) if signal.getsignal(each) is not signal.SIG_IGN]
        arguments.signals_to_handle = ",".join(each.name for each in (*handled, signal.SIGXCPU))
        if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
            signal.signal(signal.SIGINT, self._interrupt)
        for number in WARNINGS:
            signal.signal(number, self._pass_on)
        # The launcher has blocked some (entrypoint/launch/start.py): those that came since are delivered now.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, WARNINGS)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        """Has torchrun pass Ctrl-C on to its workers, and wait for them; a second Ctrl-C kills them at once."""
        if self.warning == "SIGINT":
            processes.kill_descendants()
            interruption.end()
        self.warning = "SIGINT"
        self.end_workers(self.warning)

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        """Passes a signal on to the workers; without any, or for a second SIGTERM, has torchrun end everything."""
        if self.warning == "SIGINT":
            return  # Ctrl-C ends everything already, and has an exit code of its own
        warning = signal.Signals(number)
        # multiprocessing has one more child, its resource tracker, which must not get the signal.
        workers = [child for child in psutil.Process().children() if child.pid in self.workers]
        if not workers or (self.warning == warning.name == "SIGTERM"):
            self.end_workers(warning.name)
            return
        self.warning = warning.name
        for worker in workers:
            with suppress(psutil.NoSuchProcess):
                worker.send_signal(warning)
        if warning.name == "SIGTERM" and not is_ours():
            # Not by print: the signal may have interrupted another print.
            line = "passed SIGTERM on to its ranks and waits for their end; a second SIGTERM ends them"
            with suppress(OSError):
                os.write(2, f"muster: {socket.gethostname()} {line}\n".encode())

    def answer(self) -> int:
        """Reports the signal that ended this node; returns the exit code: 130, 75 (it can start again) or 1."""
        name = self.warning
        if name == "SIGINT":
            interruption.report_for_ranks()
            return ExitCode.INTERRUPTED
        # Our own programs can be started again as they were; of other programs nobody knows that.
        can_start_again = is_ours() and name in {number.name for number in WARNINGS}
        # A rank whose training has begun has reported its log.
        has_begun = any(os.scandir(os.environ[LaunchVariable.RANK_REPORTS]))
        when = " before the training began" if can_start_again and is_training() and not has_begun else ""
        notify(f"muster: ended by {name} on {socket.gethostname()}{when}")
        return ExitCode.PREEMPTED if can_start_again else ExitCode.FAILED


def wait_for(address: str, port: int, timeout_s: float) -> None:
    """Waits until a process listens at `address` and `port`.

    torch waits too, but silently, and its error names neither.

    Raises:
        TimeoutError: none did within `timeout_s`; the message has the address, the port and the last error.
    """
    end = time.monotonic() + timeout_s
    line = f"{socket.gethostname()} waits for {address}:{port}, {timeout_s:.0f} s at most"
    with notify_if_slow(one_line(line), after_s=rendezvous.NOTICE_AFTER_S):
        while True:
            try:
                socket.create_connection((address, port), timeout=CONNECT_TIMEOUT_S).close()
                return
            except OSError as why:
                if time.monotonic() >= end:
                    late = f"nothing listened on {address}:{port} within {timeout_s:.0f} s: {why}"
                    raise TimeoutError(late) from None
            time.sleep(rendezvous.POLL_S)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="muster-", ignore_cleanup_errors=True) as folder:
        os.environ[LaunchVariable.RANK_REPORTS] = tempfile.mkdtemp(dir=folder)
        code = code_for_job(main(sys.argv[1:], folder), prints=IS_FIRST)
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):  # of a full disk, or a reader that is gone
            stream.flush()
    # A thread that still waits inside torch for a lost store would abort the interpreter as it ends.
    os._exit(code)
