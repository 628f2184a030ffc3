"""Processes by multiprocessing, without torchrun: for debuggers, notebooks and those who learnt it so.

The launcher execs this module. Each process gets the variables that torchrun would set, and then runs the
program in the interpreter it already is. As torchrun's agent would, this process passes warnings and Ctrl-C on to the
ranks, and the code of the rank that failed first is its own.
"""

import os
import sys

from muster import interruption

if __name__ == "__main__":
    interruption.start(interruption.launched_command())

import argparse
import ctypes
import multiprocessing
import runpy
import signal
import socket
import tempfile
import time
from multiprocessing import resource_tracker
from multiprocessing.connection import wait
from multiprocessing.context import SpawnProcess
from types import FrameType

from muster import processes
from muster.errors import ExitCode, MusterError, code_for_job
from muster.variables import LaunchVariable

WARNINGS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
"""As in agent.py."""

GRACE_S = 30.0
"""Seconds in which ranks end by themselves, once one has ended by a code that all of them are about to have."""

SHARED_CODES = (ExitCode.USER_MUST_CHANGE, ExitCode.PREEMPTED, ExitCode.INTERRUPTED)
"""Codes that our trainers end with on all ranks; another program's say nothing to us."""


def run(local_rank: int, options: argparse.Namespace, parent: int) -> None:
    """Runs the program as rank `local_rank` of this node."""
    # A terminal's Ctrl-C is for the parent, which passes it on: a second one would end a rank before it clears up.
    os.setpgid(0, 0)
    if LaunchVariable.COMMAND not in os.environ:
        # Another program has no answer of its own to a launcher that was killed, and hears warnings as they come.
        ctypes.CDLL(None).prctl(1, signal.SIGINT)  # PR_SET_PDEATHSIG
        if os.getppid() != parent:
            os._exit(ExitCode.FAILED)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [*WARNINGS, signal.SIGINT])
    rank = options.node_rank * options.nproc_per_node + local_rank
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(local_rank),
        WORLD_SIZE=str(options.nnodes * options.nproc_per_node),
        LOCAL_WORLD_SIZE=str(options.nproc_per_node),
        GROUP_RANK=str(options.node_rank),
        MASTER_ADDR=options.master_addr,
        MASTER_PORT=str(options.master_port),
    )
    sys.argv = [options.program, *options.arguments]
    if options.module:
        if "PYTHONSAFEPATH" not in os.environ:
            sys.path.insert(0, os.getcwd())
        runpy.run_module(options.program, run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, os.path.dirname(os.path.abspath(options.program)))
        runpy.run_path(options.program, run_name="__main__")


class Ranks:
    """This node's processes.

    Attributes:
        heard: the name of the last signal that was passed on; empty without any.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self.heard = ""
        self._is_ours = LaunchVariable.COMMAND in os.environ
        self._first = options.node_rank * options.nproc_per_node
        resource_tracker.ensure_running()  # its start lets signals through that are held
        # What they inherit: all is held until they have their answer to it, SIGTERM only here while they are started.
        signal.pthread_sigmask(signal.SIG_BLOCK, [*WARNINGS, signal.SIGINT])
        spawn = multiprocessing.get_context("spawn")
        self._processes: list[SpawnProcess] = []
        for local_rank in range(options.nproc_per_node):
            process = spawn.Process(target=run, args=(local_rank, options, os.getpid()))
            process.start()
            self._processes.append(process)
        for number in WARNINGS:
            signal.signal(number, self._pass_on)
        if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
            signal.signal(signal.SIGINT, self._pass_on)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [*WARNINGS, signal.SIGINT])

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        if name == self.heard == "SIGINT":
            processes.kill_descendants()
            interruption.end()
        self.heard = name
        self._send(number)

    def _send(self, number: int) -> None:
        for process in self._processes:
            if process.exitcode is None and process.pid is not None:
                os.kill(process.pid, number)

    def join(self) -> int:
        """The exit code of all of them: that of the first that failed, after the others have ended or been ended."""
        failed = None
        while failed is None and (running := self._running()):
            wait([process.sentinel for process in running])
            failed = next((process for process in self._processes if process.exitcode), None)
        if failed is None:
            return ExitCode.DONE
        if not (self._is_ours and failed.exitcode in SHARED_CODES) and not self.heard:
            self._send(signal.SIGTERM)
        end = time.monotonic() + GRACE_S
        while (running := self._running()) and time.monotonic() < end:
            wait([process.sentinel for process in running], end - time.monotonic())
        processes.kill_descendants()
        return self._answer(failed)

    def _running(self) -> list[SpawnProcess]:
        return [process for process in self._processes if process.exitcode is None]

    def _answer(self, failed: SpawnProcess) -> int:
        code, host = failed.exitcode or 0, socket.gethostname()
        if self.heard == "SIGINT":
            interruption.say_for_ranks()
            return ExitCode.INTERRUPTED
        if self._is_ours and code in SHARED_CODES:
            return code
        if self.heard and code == -signal.Signals[self.heard]:
            # It had not begun to listen: our trainers can be started again as they were, of others nobody knows that.
            when = " before the training began" if self._is_ours else ""
            print(f"muster: ended by {self.heard} on {host}{when}", file=sys.stderr, flush=True)
            return ExitCode.PREEMPTED if self._is_ours else ExitCode.FAILED
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        wrong = f"rank {self._first + self._processes.index(failed)} on {host} {how}, and the other ranks were stopped"
        fix = "read what it said above"
        print(MusterError(wrong, seen=f"process {failed.pid}", fix=fix), file=sys.stderr, flush=True)
        return ExitCode.FAILED


def parse() -> argparse.Namespace:
    """The options, named as torchrun's."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("nnodes", "node-rank", "nproc-per-node", "master-port"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--master-addr", required=True)
    parser.add_argument("-m", "--module", action="store_true")
    parser.add_argument("program")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    return parser.parse_args()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="muster-", ignore_cleanup_errors=True) as words:
        os.environ[LaunchVariable.LAST_WORDS] = words
        options = parse()
        code = code_for_job(Ranks(options).join(), speaks=options.node_rank == 0)
    # Without multiprocessing's farewell, which waits for ranks that could not be ended.
    os._exit(code)
