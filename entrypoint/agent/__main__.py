"""One node's agent: torchrun in this process, with exit codes that mean something.

The launcher execs this module; every option of torchrun means what it means there. It adds:
a node waits for the master with a deadline and a message, a failure is told in three lines, and the exit code of the
workers survives (torchrun answers 1 whatever they answered). And a scheduler's warning goes on to the workers, who
write a checkpoint and end by themselves; torchrun would take it for the order to stop them.

It, supervision.py and node_beats.py are the files of this folder that load torch: nothing else here imports them.
"""

# ruff: noqa: E402

import argparse
import functools
import gc
import logging
import os
import re
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import Any, cast

import psutil

from muster import interruption, processes
from muster.notices import said_if_slow
from muster.variables import LaunchVariable

if __name__ == "__main__":
    # Before torch is loaded, which takes seconds.
    interruption.start(interruption.launched_command())

# torch reads the level as it is loaded. Its notes on names that no address leads back to are of no use to a user.
QUIET = "TORCH_CPP_LOG_LEVEL" not in os.environ
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

# One node's agent speaks for all.
SPEAKS = not any(re.fullmatch(r"--node-rank=[1-9][0-9]*|--rdzv-conf=.*is_host=0.*", word) for word in sys.argv)

gc.disable()  # to look for garbage among what imports make, all of which stays, is an eighth of their time

with said_if_slow("loading PyTorch", is_said=SPEAKS):
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
    from torch.distributed.elastic.rendezvous import RendezvousClosedError, RendezvousTimeoutError
    from torch.distributed.launcher import api
    from torch.distributed.run import parse_args, run  # pyright: ignore[reportUnknownVariableType]

from muster.entrypoint.agent import agent as supervision
from muster.entrypoint.agent import nodes as node_beats
from muster.entrypoint.agent.agent import Agent, Status
from muster.errors import ExitCode, MusterError

gc.enable()
if QUIET:
    del os.environ["TORCH_CPP_LOG_LEVEL"]  # the ranks' own is theirs


WARNINGS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
"""What schedulers send some time before SIGKILL: the trainers hear the same ones (train/preemption.py)."""

FIX_BY_SIGNAL = {
    "SIGKILL": "most often memory: ask the scheduler for more, or take a smaller --batch-size or fewer loader workers",
    "SIGBUS": "most often /dev/shm is full: docker run --shm-size=8g, or --train-num-workers 0",
}

CONNECT_TIMEOUT_S = 5.0
RETRY_S = 0.2
SAY_AFTER_S = 20.0

# What torchrun logs about an end; the lines below say it better.
_SAID_BELOW = ("Sending process %s closing signal %s", "failed (exitcode: %s)", "Received %s death signal")


def main(argv: list[str]) -> int:
    """The exit code of this node's workers, after running them by torchrun's arguments `argv`."""
    for name in ("agent.server.api", "multiprocessing.api"):
        logging.getLogger(f"torch.distributed.elastic.{name}").addFilter(
            lambda entry: not str(entry.msg).startswith(_SAID_BELOW)
        )
    arguments = parse_args(argv)
    status = Status()
    warning = Warning(status)
    try:
        warning.take_over(arguments)
        torchruns: Any = api  # it has no option for another agent than its own
        torchruns.LocalElasticAgent = functools.partial(Agent, status)
        supervision.give_up_on_lost_stores()
        if not node_beats.is_ours():
            supervision.tie_workers_to_agent()
        node_beats.wait_for_all()
        place = place_to_wait_for(arguments)
        supervision.meet_on_loopback(arguments)
        if place is not None:
            wait_for(*place, timeout_s=rendezvous_timeout_s(arguments))
        run(arguments)
    except ChildFailedError as error:
        return warning.answer() if warning.explains(error.failures) else report(error.failures, status)
    except SignalException as error:
        status.warning = status.warning or error.sigval.name
        return warning.answer()
    except MusterError as error:
        say(error)
        return error.code
    except Exception as error:
        if status.warning == "SIGINT":
            return warning.answer()
        if os.environ.get("MUSTER_DEBUG"):
            raise
        address, port = place_to_wait_for(arguments) or (arguments.master_addr, arguments.master_port)
        if status.has_started:
            return report_parting(f"{address}:{port}", error)
        return report_rendezvous(address, port, arguments.nnodes, error)
    return ExitCode.DONE


class Warning:
    """A scheduler's warning to this node; `status.warning` is the signal's name."""

    def __init__(self, status: Status) -> None:
        self._status = status

    def take_over(self, arguments: argparse.Namespace) -> None:
        """From now on this hears the signals, in torchrun's place."""
        arguments.signals_to_handle = "SIGHUP,SIGQUIT"
        if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
            signal.signal(signal.SIGINT, self._interrupt)
        for number in WARNINGS:
            signal.signal(number, self._pass_on)
        # The launcher holds those that come before this (entrypoint/launch/start.py).
        signal.pthread_sigmask(signal.SIG_UNBLOCK, WARNINGS)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        """Has torchrun pass Ctrl-C on to its workers, and wait for them; a second one ends all at once."""
        if self._status.warning == "SIGINT":
            processes.kill_descendants()
            interruption.end()
        self._status.warning = "SIGINT"
        raise SignalException("this process got SIGINT", sigval=signal.SIGINT)

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        """Tells the workers. Where there are none yet, or for a second SIGTERM, torchrun ends everything."""
        warning, workers = signal.Signals(number), psutil.Process().children()
        if not workers or (self._status.warning == warning.name == "SIGTERM"):
            raise SignalException(f"this process got {warning.name}", sigval=warning)
        self._status.warning = warning.name
        for worker in workers:
            try:
                worker.send_signal(warning)
            except psutil.NoSuchProcess:
                continue
        if warning.name == "SIGTERM" and not node_beats.is_ours():
            # Not by print: this may have come while another line was written.
            waits = "passed SIGTERM on to its ranks and waits for their end; a second SIGTERM ends them"
            os.write(2, f"muster: {socket.gethostname()} {waits}\n".encode())

    def explains(self, failures: dict[int, ProcessFailure]) -> bool:
        """Whether the workers were ended by this very signal, before they could hear it."""
        heard = self._status.warning
        if heard == "SIGINT":
            return True
        return bool(heard) and all(failure.signal_name() == heard for failure in failures.values())

    def answer(self) -> int:
        """The exit code of a node that was stopped before its workers could write anything."""
        heard = self._status.warning
        if heard == "SIGINT":
            interruption.say_for_ranks()
            return ExitCode.INTERRUPTED
        # Our trainers had not begun, and can be started again as they were; of other programs nobody knows that.
        is_ours = node_beats.is_ours() and heard in {number.name for number in WARNINGS}
        when = " before the training began" if is_ours else ""
        print(f"muster: ended by {heard} on {socket.gethostname()}{when}", file=sys.stderr)
        return ExitCode.PREEMPTED if is_ours else ExitCode.FAILED


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


def report(failures: Mapping[int, ProcessFailure], status: Status) -> int:
    """The exit code for workers that failed, after telling of the one that failed first, if it did not itself.

    Args:
        failures: by rank.
        status: which of them the agent ended, and what came before on another node.
    """
    codes = {failure.exitcode for failure in failures.values()}
    # A trainer with one of these has told the user what to do; those that died of its absence count for nothing. In
    # another program 2 may be an option that it does not know, and 75 anything.
    for code in (ExitCode.USER_MUST_CHANGE, ExitCode.PREEMPTED):
        if node_beats.is_ours() and code in codes:
            return code
    words = {rank: words_of(failure) for rank, failure in failures.items()}
    told = {rank for rank in failures if "told" in words[rank]}
    # As torchrun ends them, once one has failed.
    stopped = {rank for rank, failure in failures.items() if failure.exitcode == -signal.SIGTERM}
    own = failures.keys() - told
    if not own or (told and own <= stopped):
        return ExitCode.FAILED
    rank = node_beats.first_of({rank: failures[rank] for rank in own})
    first = failures[rank]
    how = node_beats.how_ended(first.exitcode)
    fix = "read what it said above; `muster run --debug` shows this program's traceback too"
    if first.pid in status.ended:
        how, fix = f"was ended: {status.ended[first.pid]}", "look what that rank's node said"
    elif status.elsewhere:
        how, fix = f"{how} after another: {status.elsewhere}", "look what that rank's node said"
    elif first.exitcode < 0:
        fix = FIX_BY_SIGNAL.get(first.signal_name(), fix)
    wrong = f"rank {rank} on {socket.gethostname()} {how}, and this node's other ranks were stopped"
    say(MusterError(wrong, seen=message_of(first) or f"process {first.pid}", fix=fix))
    if first.exitcode < 0 and words[rank]:
        log = words[rank][0]
        print(f"  log: {log}", *last_lines(Path(log)), sep="\n       ", file=sys.stderr)
    followed = ", ".join(map(str, sorted(failures.keys() - stopped - {rank})))
    if followed:
        print(f"rank {followed} of this node ended after it", file=sys.stderr)
    return ExitCode.FAILED


def words_of(failure: ProcessFailure) -> list[str]:
    """What a trainer has left for its agent (train/console.py): its log, and "told" if the user knows why it ended."""
    try:
        return Path(os.environ[LaunchVariable.LAST_WORDS], str(failure.pid)).read_text(encoding="utf-8").splitlines()
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


def report_rendezvous(address: str, port: int, num_nodes: str, error: Exception) -> int:
    """The exit code for nodes that did not meet, after saying where they should have."""
    host, seen = socket.gethostname(), _in_one_line(error)
    if "EADDRINUSE" in str(error) or "address already in use" in str(error).lower():
        fix = "--master-port PORT, the same on all nodes, with a free port"
        say(MusterError(f"port {port} on {host} is taken", seen=seen, fix=fix))
        return ExitCode.USER_MUST_CHANGE
    fix = (
        f"look whether the command started on all {num_nodes} nodes, and whether the port is open between "
        "them; a slow start: --rdzv-timeout SECONDS"
    )
    say(MusterError(f"{host} did not meet the others at {address}:{port}", seen=seen, fix=fix))
    return ExitCode.FAILED


def report_parting(place: str, error: Exception) -> int:
    """The exit code for nodes that had met, and then lost each other."""
    host, fix = socket.gethostname(), "look what the other nodes said; --resume goes on"
    if isinstance(error, RendezvousClosedError):
        wrong = f"{host} did not start its ranks again: another node has ended the launch"
    elif isinstance(error, RendezvousTimeoutError):
        wrong, fix = f"{host} waited in vain for enough nodes to start again", f"--nnodes=MIN:MAX, or {fix}"
    else:
        wrong = f"{host} has lost the node at {place}, by which all nodes meet: without it none can start again"
        fix = "start the job again, without that node: --resume goes on"
    say(MusterError(wrong, seen=_in_one_line(error), fix=fix))
    return ExitCode.FAILED


def _in_one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"


def say(error: MusterError) -> None:
    """Prints the three lines of an error, ahead of what this process says next."""
    print(error, file=sys.stderr, flush=True)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="muster-", ignore_cleanup_errors=True) as words:
        os.environ[LaunchVariable.LAST_WORDS] = words
        code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    # A thread may wait inside torch for a store that is gone, and would abort an interpreter that ends.
    os._exit(code)
