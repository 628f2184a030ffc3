"""One node's agent: torchrun in this process, with exit codes that mean something.

The launcher execs this file by its path; every option of torchrun means what it means there. It adds three things:
a node waits for the master with a deadline and a message, a failure is told in three lines, and the exit code of the
workers survives (torchrun answers 1 whatever they answered).

It is the one file of this folder that loads torch. Nothing here imports it, and it imports nothing from here: it
also runs users' scripts, with their folders on the module path.
"""

import argparse
import logging
import os
import re
import socket
import sys
import time
from typing import Any, cast

import torch
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.run import get_args_parser, parse_args, run  # pyright: ignore[reportUnknownVariableType]

DONE, FAILED, USER_MUST_CHANGE, PREEMPTED = 0, 1, 2, 75

CONNECT_TIMEOUT_S = 5.0
RETRY_S = 0.2
SAY_AFTER_S = 20.0

# What torchrun logs about the end of a worker; the three lines below say it better.
_SAID_BELOW = ("Sending process %s closing signal %s", "failed (exitcode: %s)")

FIX_BY_SIGNAL = {
    "SIGKILL": "most often memory: ask the scheduler for more, or take a smaller --batch-size or fewer loader workers",
    "SIGBUS": "most often /dev/shm is full: docker run --shm-size=8g, or --train-num-workers 0",
}


def main(argv: list[str]) -> int:
    """The exit code of this node's workers, after running them by torchrun's arguments `argv`."""
    logging.getLogger("torch.distributed.elastic.multiprocessing.api").addFilter(
        lambda entry: not str(entry.msg).startswith(_SAID_BELOW)
    )
    arguments = parse_args(known(argv))
    try:
        place = place_to_wait_for(arguments)
        if place is not None:
            wait_for(*place, timeout_s=rendezvous_timeout_s(arguments))
        run(arguments)
    except ChildFailedError as error:
        return report(error.failures)
    except SignalException as error:
        print(f"muster: ended by {error.sigval.name} on {socket.gethostname()}", file=sys.stderr)
        return FAILED
    except Exception as error:
        return report_rendezvous(arguments, error)
    return DONE


def known(argv: list[str]) -> list[str]:
    """`argv` without the launcher's own first option where this version of torchrun doesn't have it."""
    if argv and argv[0].startswith("--numa-binding=") and "--numa-binding" not in get_args_parser().format_usage():
        print(f"muster: {argv[0]} is left out: torch {torch.__version__} does not have it", file=sys.stderr)
        return argv[1:]
    return argv


def place_to_wait_for(arguments: argparse.Namespace) -> tuple[str, int] | None:
    """Where another node's store has to listen before this one can join; None where this one is to listen itself."""
    if arguments.standalone:
        return None
    if arguments.rdzv_backend == "static":
        return (arguments.master_addr, arguments.master_port) if arguments.node_rank > 0 else None
    address, _, port = arguments.rdzv_endpoint.rpartition(":")
    return (address.strip("[]"), int(port)) if "is_host=0" in arguments.rdzv_conf else None


def rendezvous_timeout_s(arguments: argparse.Namespace) -> float:
    """Seconds that --rdzv-conf allows for meeting; torchrun's own default without."""
    match = re.search(r"(?:^|,)(?:join_)?timeout=(\d+)", arguments.rdzv_conf or "")
    return float(match[1]) if match else 600.0


def wait_for(address: str, port: int, timeout_s: float) -> None:
    """Returns when something listens at `address` and `port`.

    torch waits too, but in silence, then names neither.

    Raises:
        TimeoutError: nothing did within `timeout_s`; the message says what was waited for and what came last.
    """
    start = time.monotonic()
    is_said = False
    while True:
        try:
            with socket.create_connection((address, port), timeout=CONNECT_TIMEOUT_S):
                return
        except OSError as reason:
            last = reason
        waited_s = time.monotonic() - start
        if waited_s >= timeout_s:
            raise TimeoutError(f"nothing listened on {address}:{port} within {timeout_s:.0f} s: {last}")
        if waited_s >= SAY_AFTER_S and not is_said:
            is_said = True
            line = f"muster: {socket.gethostname()} waits for {address}:{port} ({last}), {timeout_s:.0f} s at most"
            print(line, file=sys.stderr)
        time.sleep(RETRY_S)


def report(failures: dict[int, ProcessFailure]) -> int:
    """The exit code for workers that failed, after telling of the one that failed first, if it did not itself."""
    codes = {failure.exitcode for failure in failures.values()}
    # A worker with one of these has told the user what to do; those that died of its absence count for nothing.
    for code in (USER_MUST_CHANGE, PREEMPTED):
        if code in codes:
            return code
    rank, first = min(failures.items(), key=lambda item: item[1].timestamp)
    name = first.signal_name() if first.exitcode < 0 else ""
    how = f"was ended by {name}" if name else f"ended with exit code {first.exitcode}"
    say(
        f"rank {rank} on {socket.gethostname()} {how}, and this node's other ranks were stopped",
        seen=message_of(first) or f"process {first.pid}",
        fix=FIX_BY_SIGNAL.get(name, "read what it said above; `muster run --debug` shows this program's traceback too"),
    )
    return FAILED


def message_of(failure: ProcessFailure) -> str:
    """The first line of the exception that the worker recorded, or nothing if it recorded none."""
    recorded: dict[str, Any] = failure.error_file_data
    message = recorded.get("message") or ""
    if isinstance(message, dict):
        message = cast("dict[str, Any]", message).get("message", "")
    lines = str(message).strip().splitlines()
    # torch writes <NONE> where the worker recorded nothing.
    return lines[0] if lines and lines[0] != "<NONE>" else ""


def report_rendezvous(arguments: argparse.Namespace, error: Exception) -> int:
    """The exit code for nodes that did not meet, after saying where they should have."""
    if os.environ.get("MUSTER_DEBUG"):
        raise error
    address, port = place_to_wait_for(arguments) or (arguments.master_addr, arguments.master_port)
    place = f"{address}:{port}"
    text = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    if "EADDRINUSE" in str(error) or "address already in use" in str(error).lower():
        say(
            f"port {port} on {socket.gethostname()} is taken",
            seen=text,
            fix="--master-port PORT, the same on all nodes, with a free port",
        )
        return USER_MUST_CHANGE
    say(
        f"{socket.gethostname()} did not meet the others at {place}",
        seen=f"{type(error).__name__}: {text}",
        fix=f"look whether the command started on all {arguments.nnodes} nodes, and whether the port is open between "
        "them; a slow start: --rdzv-timeout SECONDS",
    )
    return FAILED


def say(wrong: str, *, seen: str, fix: str) -> None:
    """Prints the three lines of an error."""
    print(f"error: {wrong}\n seen: {seen}\n  fix: {fix}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
