"""What a node's agent says where its workers failed, or its node did not meet the others; and its exit code then."""

import os
import signal
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousClosedError, RendezvousTimeoutError

from muster.errors import ExitCode

FAILURE = "MUSTER_FAILURE"
"""The variable with the exit code for a failure, for programs whose own 1 says something else."""

LAST_WORDS = "MUSTER_LAST_WORDS"
"""The variable with the folder in which trainers leave word for this agent, each in a file named by its process."""

FIX_BY_SIGNAL = {
    "SIGKILL": "most often memory: ask the scheduler for more, or take a smaller --batch-size or fewer loader workers",
    "SIGBUS": "most often /dev/shm is full: docker run --shm-size=8g, or --train-num-workers 0",
}

Place = tuple[str, int]
"""The address and the port by which nodes meet."""


def report(failures: Mapping[int, ProcessFailure], ended: Mapping[int, str]) -> int:
    """The exit code for workers that failed, after telling of the one that failed first, if it did not itself.

    Args:
        failures: by rank.
        ended: why the agent ended a process, by its id, where it did.
    """
    codes = {failure.exitcode for failure in failures.values()}
    # A worker with one of these has told the user what to do; those that died of its absence count for nothing.
    for code in (ExitCode.USER_MUST_CHANGE, ExitCode.PREEMPTED):
        if code in codes:
            return code
    words = {rank: words_of(failure) for rank, failure in failures.items()}
    told = {rank for rank in failures if "told" in words[rank]}
    # As torchrun ends them, once one has failed.
    stopped = {rank for rank, failure in failures.items() if failure.exitcode == -signal.SIGTERM}
    own = failures.keys() - told - stopped or failures.keys() - told
    if not own or (told and own <= stopped):
        return ExitCode.FAILED
    # A worker that was killed has no record of the time; the others' records know it to the second only.
    rank = min(own, key=lambda rank: (failures[rank].exitcode >= 0, failures[rank].timestamp))
    first = failures[rank]
    how = how_ended(first.exitcode)
    fix = "read what it said above; `muster run --debug` shows this program's traceback too"
    if first.pid in ended:
        how = f"was ended: {ended[first.pid]}"
    elif first.exitcode < 0:
        fix = FIX_BY_SIGNAL.get(first.signal_name(), fix)
    say(
        f"rank {rank} on {socket.gethostname()} {how}, and this node's other ranks were stopped",
        seen=message_of(first) or f"process {first.pid}",
        fix=fix,
    )
    if first.exitcode < 0 and words[rank]:
        log = words[rank][0]
        print(f"  log: {log}", *last_lines(Path(log)), sep="\n       ", file=sys.stderr)
    followed = ", ".join(map(str, sorted(failures.keys() - stopped - {rank})))
    if followed:
        print(f"rank {followed} of this node ended after it", file=sys.stderr)
    return failure()


def how_ended(exitcode: int) -> str:
    """How a process ended, in words: by a signal, or with a code."""
    if exitcode >= 0:
        return f"ended with exit code {exitcode}"
    try:
        return f"was ended by {signal.Signals(-exitcode).name}"
    except ValueError:
        return f"was ended by signal {-exitcode}"


def words_of(failure: ProcessFailure) -> list[str]:
    """What a trainer has left for its agent (train/console.py): its log, and "told" if the user knows why it ended."""
    try:
        return Path(os.environ[LAST_WORDS], str(failure.pid)).read_text(encoding="utf-8").splitlines()
    except (KeyError, OSError, UnicodeDecodeError):
        return []  # another program, or no log yet


def last_lines(log: Path, number: int = 10, most: int = 8192) -> list[str]:
    """The last lines of a file, of at most so many bytes, without escape codes."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - most))
            lines = file.read().decode("utf-8", "replace").splitlines()[-number:]
    except OSError as error:
        return [f"can't be read: {error}"]
    return ["".join(letter if letter.isprintable() else " " for letter in line) for line in lines]


def message_of(failure: ProcessFailure) -> str:
    """The first line of the exception that the worker recorded, or nothing if it recorded none."""
    recorded: dict[str, Any] = failure.error_file_data
    message = recorded.get("message") or ""
    if isinstance(message, dict):
        message = cast("dict[str, Any]", message).get("message", "")
    lines = str(message).strip().splitlines()
    # torch writes <NONE> where the worker recorded nothing.
    return lines[0] if lines and lines[0] != "<NONE>" else ""


def report_rendezvous(met: Place, num_nodes: str, error: Exception) -> int:
    """The exit code for nodes that did not meet, after saying where they should have."""
    address, port = met
    host, seen = socket.gethostname(), _in_one_line(error)
    if "EADDRINUSE" in str(error) or "address already in use" in str(error).lower():
        fix = "--master-port PORT, the same on all nodes, with a free port"
        say(f"port {port} on {host} is taken", seen=seen, fix=fix)
        return ExitCode.USER_MUST_CHANGE
    say(
        f"{host} did not meet the others at {address}:{port}",
        seen=seen,
        fix=f"look whether the command started on all {num_nodes} nodes, and whether the port is open between "
        "them; a slow start: --rdzv-timeout SECONDS",
    )
    return failure()


def report_parting(met: Place, error: Exception) -> int:
    """The exit code for nodes that had met, and then lost each other."""
    host, fix = socket.gethostname(), "look what the other nodes said; --resume goes on"
    if isinstance(error, RendezvousClosedError):
        wrong = f"{host} did not start its ranks again: another node has ended the launch"
    elif isinstance(error, RendezvousTimeoutError):
        wrong, fix = f"{host} waited in vain for enough nodes to start again", f"--nnodes=MIN:MAX, or {fix}"
    else:
        place = f"{met[0]}:{met[1]}"
        wrong = f"{host} has lost the node at {place}, by which all nodes meet: without it none can start again"
        fix = "start the job again, without that node: --resume goes on"
    say(wrong, seen=_in_one_line(error), fix=fix)
    return failure()


def _in_one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"


def failure() -> int:
    """The exit code for what this agent itself tells of."""
    return int(os.environ.get(FAILURE) or ExitCode.FAILED)


def say(wrong: str, *, seen: str, fix: str) -> None:
    """Prints the three lines of an error."""
    print(f"error: {wrong}\n seen: {seen}\n  fix: {fix}", file=sys.stderr, flush=True)
