"""One node's agent: torchrun in this process, with exit codes that mean something.

The launcher execs this module; every option of torchrun means what it means there. It adds:
a node waits for the master with a deadline and a message, a failure is told in three lines, and the exit code of the
workers survives (torchrun answers 1 whatever they answered). And a scheduler's warning goes on to the workers, who
write a checkpoint and end by themselves; torchrun would take it for the order to stop them.

It, supervision.py, last_words.py, node_beats.py and spawn.py are the files of this folder that load
torch: nothing else here imports them.
"""

# ruff: noqa: E402

import argparse
import gc
import logging
import os
import re
import signal
import socket
import sys
import tempfile
import time
from types import FrameType

import psutil

# torch reads the level as it is loaded. Its notes on names that no address leads back to are of no use to a user.
QUIET = "TORCH_CPP_LOG_LEVEL" not in os.environ
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

gc.disable()  # to look for garbage among what imports make, all of which stays, is an eighth of their time

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.run import parse_args, run  # pyright: ignore[reportUnknownVariableType]

from muster.entrypoint import last_words, node_beats
from muster.entrypoint.supervision import Supervision
from muster.errors import ExitCode

gc.enable()
if QUIET:
    del os.environ["TORCH_CPP_LOG_LEVEL"]  # the ranks' own is theirs


WARNINGS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
"""What schedulers send some time before SIGKILL: the trainers hear the same ones (train/preemption.py)."""

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
    warning, supervision = Warning(), Supervision()
    try:
        warning.take_over(arguments)
        supervision.take_over(lambda: bool(warning.heard))
        node_beats.Nodes(supervision.ended).take_over()
        node_beats.wait_for_all()
        place = place_to_wait_for(arguments)
        if place is not None:
            wait_for(*place, timeout_s=rendezvous_timeout_s(arguments))
        run(arguments)
    except ChildFailedError as error:
        return (
            warning.answer()
            if warning.explains(error.failures)
            else last_words.report(error.failures, supervision.ended)
        )
    except SignalException as error:
        warning.heard = warning.heard or error.sigval.name
        return warning.answer()
    except Exception as error:
        if os.environ.get("MUSTER_DEBUG"):
            raise
        met = place_to_wait_for(arguments) or (arguments.master_addr, arguments.master_port)
        if supervision.has_started:
            return last_words.report_parting(met, error)
        return last_words.report_rendezvous(met, arguments.nnodes, error)
    return ExitCode.DONE


class Warning:
    """A scheduler's warning to this node.

    Attributes:
        heard: the signal's name; empty until there is one.
    """

    def __init__(self) -> None:
        self.heard = ""

    def take_over(self, arguments: argparse.Namespace) -> None:
        """From now on this hears the signals, in torchrun's place."""
        arguments.signals_to_handle = "SIGINT,SIGHUP,SIGQUIT"
        for number in WARNINGS:
            signal.signal(number, self._pass_on)
        # The launcher holds those that come before this (entrypoint/launch.py).
        signal.pthread_sigmask(signal.SIG_UNBLOCK, WARNINGS)

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        """Tells the workers. Where there are none yet, or for a second SIGTERM, torchrun ends everything."""
        warning, workers = signal.Signals(number), psutil.Process().children()
        if not workers or (self.heard == warning.name == "SIGTERM"):
            raise SignalException(f"this process got {warning.name}", sigval=warning)
        self.heard = warning.name
        for worker in workers:
            try:
                worker.send_signal(warning)
            except psutil.NoSuchProcess:
                continue

    def explains(self, failures: dict[int, ProcessFailure]) -> bool:
        """Whether the workers were ended by this very signal, before they could hear it."""
        return bool(self.heard) and all(failure.signal_name() == self.heard for failure in failures.values())

    def answer(self) -> int:
        """The exit code of a node that was stopped before its workers could write anything."""
        # Our trainers had not begun, and can be started again as they were; of other programs nobody knows that.
        is_ours = "MUSTER_COMMAND" in os.environ and self.heard in {number.name for number in WARNINGS}
        when = " before the training began" if is_ours else ""
        print(f"muster: ended by {self.heard} on {socket.gethostname()}{when}", file=sys.stderr)
        if self.heard == "SIGINT":
            return ExitCode.INTERRUPTED  # by the user, at the terminal: as a shell has it
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


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="muster-", ignore_cleanup_errors=True) as words:
        os.environ[last_words.LAST_WORDS] = words
        code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    # A thread may wait inside torch for a store that is gone, and would abort an interpreter that ends.
    os._exit(code)
