"""The failures of a node's ranks: the rank that failed first, how it ended, and the error for the user."""

import os
import signal
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousClosedError, RendezvousTimeoutError

from muster import interruption
from muster.errors import MAX_REQUEUES, ExitCode, MusterError, notify, one_line
from muster.processes import how_ended
from muster.variables import LaunchVariable, RankReport

if TYPE_CHECKING:
    from muster.entrypoint.agent.agent import Status

WARNED = (-10, -12, -15)
"""Exit codes of workers that a scheduler's warning has ended: the scheduler stops all nodes."""

FIX_BY_SIGNAL = {
    "SIGKILL": "most often memory: ask the scheduler for more, or take a smaller batch or fewer data workers",
    "SIGABRT": "on GPUs most often NCCL, because a collective timed out: look in the logs for the rank that did not "
    "reach it; if it can take that long: a longer time-out (train, bench: --timeout-s). On CPUs, at the end of a "
    "script that has done its work, a thread of gloo that still ran: flush what was printed, then os._exit(0)",
    "SIGBUS": "/dev/shm is full (docker run --shm-size=8g; a training: no data workers), or a file shrank while in use",
    "SIGSEGV": "an error in compiled code: with PYTHONFAULTHANDLER=1 Python shows which line of your script called it",
}


def is_ours() -> bool:
    """Whether the workers are programs of this project; exit codes of other programs have meanings of their own."""
    return LaunchVariable.COMMAND in os.environ


def is_training() -> bool:
    """Whether the workers are trainers of this project, and no checks: only these leave checkpoints."""
    return os.environ.get(LaunchVariable.COMMAND, "").startswith("train ")


def first_of(failures: Mapping[int, Any]) -> int:
    """The rank that failed first, of failures by rank."""
    # Once one has failed, torchrun ends the others by SIGTERM.
    not_stopped = [rank for rank, failure in failures.items() if failure.exitcode != -signal.SIGTERM] or failures
    # A killed worker comes first: it has recorded no time, and the others record theirs to the second only.
    return min(not_stopped, key=lambda rank: (failures[rank].exitcode >= 0, failures[rank].timestamp))


def cause_of(failures: Mapping[int, Any]) -> int | None:
    """The rank that made the others fail; None where a warning has ended all, which is no failure of this node's."""
    if is_ours() and any(failure.exitcode == ExitCode.PREEMPTED for failure in failures.values()):
        return None
    failed = {rank: failure for rank, failure in failures.items() if failure.exitcode not in WARNED}
    return first_of(failed) if failed else None


def report(failures: Mapping[int, ProcessFailure], status: "Status") -> int:
    """Prints the first failure, unless its rank has printed it; returns the exit code."""
    codes = {failure.exitcode for failure in failures.values()}
    # A trainer with one of these codes has printed what to do; failures of other ranks follow from it. In another
    # program 2 may mean an unknown option, and 75 anything, unless its job script waits for 75.
    for code in (ExitCode.USER_MUST_CHANGE, ExitCode.PREEMPTED):
        if code in codes and (is_ours() or (codes == {ExitCode.PREEMPTED} and os.environ.get(MAX_REQUEUES))):
            return code
    reports = {rank: report_of(failure) for rank, failure in failures.items()}
    reported = {rank for rank in failures if RankReport.ERROR_SHOWN in reports[rank]}
    # torchrun ends the others by SIGTERM, once one has failed.
    stopped = {rank for rank, failure in failures.items() if failure.exitcode == -signal.SIGTERM}
    unreported = failures.keys() - reported
    if not unreported or (reported and unreported <= stopped):
        return ExitCode.FAILED
    rank = first_of({rank: failures[rank] for rank in unreported})
    first = failures[rank]
    how = how_ended(first.exitcode)
    more = "--debug shows its traceback" if is_ours() else "--tee 3 --log-dir FOLDER shows which rank printed each line"
    fix = f"read its output above; {more}"
    if first.pid in status.ended:
        how, fix = f"was ended: {status.ended[first.pid]}", "read the output of that rank's node"
    elif status.elsewhere and first.exitcode != ExitCode.USER_MUST_CHANGE:  # a wrong option follows from no other rank
        how, fix = f"{how} after another: {status.elsewhere}", "read the output of that rank's node"
    elif is_ours() and first.exitcode == ExitCode.INTERRUPTED:
        how = "was interrupted by SIGINT, which did not reach the launch itself"
        fix = interruption.advice_of_ranks()
    elif is_ours() and not is_training() and first.exitcode == -signal.SIGKILL:
        fix = "most often memory: ask the scheduler for more; muster bench takes less with a smaller --max-size"
    elif first.exitcode < 0:
        fix = FIX_BY_SIGNAL.get(first.signal_name(), fix)
    others = ", and this node's other ranks were stopped" if status.stopped & status.workers else ""
    wrong = f"rank {rank} on {socket.gethostname()} {how}{others}"
    notify(MusterError(wrong, seen=message_of(first) or f"process {first.pid}", fix=fix))
    if first.exitcode < 0 and reports[rank]:
        log = reports[rank][0]
        notify("\n       ".join([f"  log: {one_line(log)}", *last_lines(Path(log))]))
    if followed := ", ".join(map(str, sorted(failures.keys() - stopped - {rank}))):
        notify(f"rank {followed} of this node ended after it")
    return ExitCode.FAILED


def report_of(failure: ProcessFailure) -> list[str]:
    """The lines of a rank's report: the path of its log, then those of RankReport."""
    try:
        path = Path(os.environ[LaunchVariable.RANK_REPORTS], str(failure.pid))
        return path.read_text(encoding="utf-8", errors="surrogateescape").splitlines()  # as the rank has written it
    except (KeyError, OSError):
        return []  # another program, or no log yet


def last_lines(log: Path, number: int = 10, most: int = 32768) -> list[str]:
    """The last `number` lines in the last `most` bytes of `log`, without control characters and C++ stack frames."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - most))
            lines = file.read().decode("utf-8", "replace").splitlines()
    except OSError as error:
        return [f"can't be read: {error}"]
    # The message of torch's C++ stands before its stack: "frame #4: c10d::ProcessGroupNCCL::Watchdog::run() + ..."
    shown = [line for line in lines if line.strip() and not line.startswith("frame #")]
    return ["".join(letter if letter.isprintable() else " " for letter in line) for line in shown[-number:]]


def message_of(failure: ProcessFailure) -> str:
    """The first line of the exception that the worker recorded, or nothing if it recorded none."""
    message: Any = failure.error_file_data["message"]  # which torch has read already
    if isinstance(message, dict):
        message = cast("dict[str, Any]", message).get("message", "")
    lines = str(message).strip().splitlines()
    # torch writes <NONE> where the worker recorded nothing.
    return lines[0] if lines and lines[0] != "<NONE>" else ""


def not_started(error: Exception) -> MusterError:
    """The error for ranks that can't be started, or whose logs can't be written."""
    fix = "--log-dir FOLDER or TMPDIR=FOLDER, with room, in which you may write"
    fix = "leave out --numa-binding: it needs GPUs, and numactl" if "NUMA" in str(error) else fix
    if isinstance(error, BlockingIOError) or "new thread" in str(error):
        fix = "fewer ranks by --nproc-per-node; or a higher limit of processes: ulimit -u, docker run --pids-limit"
    return MusterError(f"the ranks of {socket.gethostname()} can't be started", seen=_in_one_line(error), fix=fix)


def not_met(address: str, port: int, num_nodes: str, error: Exception) -> MusterError:
    """The error for nodes that did not meet."""
    host, seen = socket.gethostname(), _in_one_line(error)
    if "EADDRINUSE" in str(error) or "address already in use" in str(error).lower():
        fix = "--master-port PORT, the same on all nodes, with a free port"
        return MusterError(f"port {port} on {host} is taken", seen=seen, fix=fix)
    if isinstance(error, AttributeError) and torch.__version__ < "2.10":  # which lacks what the agent reads
        fix = "torch 2.10 or newer in this environment; PYTHONPATH may bring another"
        return MusterError("the agent can't run with this torch", seen=f"torch {torch.__version__}: {seen}", fix=fix)
    wrong = f"{host} did not meet the others at {address}:{port}"
    fix = f"check that all {num_nodes} nodes started the command and reach the port; for a slow start: --rdzv-timeout N"
    return MusterError(wrong, seen=seen, fix=fix, code=ExitCode.FAILED)


def lost_nodes(address: str, port: int, error: Exception) -> MusterError:
    """The error for nodes that had met, and then lost each other."""
    host, again = socket.gethostname(), interruption.advice_of_ranks()
    fix = f"read the output of the other nodes; {again}"
    if isinstance(error, RendezvousClosedError):
        wrong = f"{host} did not start its ranks again: another node has ended the launch"
    elif isinstance(error, RendezvousTimeoutError):
        wrong, fix = f"{host} waited for enough nodes to start again, and too few came", f"--nnodes=MIN:MAX, or {fix}"
    else:
        wrong = f"{host} has lost the node at {address}:{port}, where all meet: without it none can start again"
        fix = f"without that node, {again}"
    return MusterError(wrong, seen=_in_one_line(error), fix=fix, code=ExitCode.FAILED)


def _in_one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"
