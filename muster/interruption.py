"""Ctrl-C at any moment of any command: one line that says what was interrupted and how to continue, and exit code 130.

A command imports this module and calls `start` before all else: Python's own reaction to SIGINT is a traceback of
whatever was being imported. As long as there is nothing to clear up, the handler itself ends the process. Within
`clearing_up` SIGINT raises KeyboardInterrupt, with a deadline: the exception may be swallowed, or the main thread may
be in a call into C++, which no handler interrupts.

A terminal sends SIGINT to all processes of a command, a scheduler or `kill -INT` to one: a process that starts others
passes it on.
"""

import atexit
import errno
import io
import os
import signal
import sys
from collections.abc import Generator
from contextlib import contextmanager, suppress

from muster.errors import RESUME, ExitCode, MusterError, notify
from muster.variables import LaunchVariable, RankReport

GOES_ON = f"the same command with {RESUME}"
"""The advice for a run that has a checkpoint."""

CLEAR_UP_S = 5.0
"""Seconds from SIGINT until a process ends, whether it has cleared up or not."""


class Interruption:
    """The state that the handlers of SIGINT read.

    Attributes:
        command: the command that the line names.
        advice: how to continue, in the line.
        is_silent: whether another process prints the line, or it is printed already.
        has_come: whether SIGINT has come within `clearing_up`.
    """

    command = ""
    advice = "the same command starts it again"
    is_silent = False
    has_come = False


current = Interruption()


def start(command: str, *, is_silent: bool = False) -> None:
    """Installs the handler, first in each of our programs: SIGINT ends it with code 130 and the line, or silently.

    A SIGINT that was held is delivered now. A process that ignores SIGINT (nohup, a shell's `&`) goes on ignoring it.
    """
    current.command, current.is_silent = command, is_silent
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A path, or a run's name, may have letters that the terminal's encoding lacks.
        sys.stdout.reconfigure(errors="backslashreplace")  # pyright: ignore[reportUnknownMemberType]
    # Else Python restores the default handlers while it ends, and a signal would replace the exit code.
    atexit.register(finish)
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, end)
    if signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:
        # Some supervisors start it so: the kernel would discard a child's exit status, which Python then reads as 0.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])


def start_rank(command: str) -> None:
    """`start` for one rank of a job: its agent prints the line, or rank 0 where there is no agent."""
    start(command, is_silent=LaunchVariable.RANK_REPORTS in os.environ or os.environ.get("RANK", "0") != "0")


def finish() -> None:
    """Ignores SIGINT and a scheduler's warnings from now on: after the work they must not change the exit code."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)


def hold() -> None:
    """Blocks SIGINT before the exec of another program of ours, which receives it when it calls `start`."""
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])


@contextmanager
def held() -> Generator[None]:
    """A context for starting programs of ours: SIGINT is blocked in them until they call `start`."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def clearing_up() -> Generator[None]:
    """A context in which SIGINT raises KeyboardInterrupt; the process then ends with the context, or after CLEAR_UP_S.

    Nothing changes where SIGINT is ignored, and in threads other than the main one, as only that can set handlers.
    """
    from threading import current_thread, main_thread  # here and not above: until `start` a Ctrl-C is a traceback

    if current_thread() is not main_thread() or signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        yield
        return
    owner = os.getpid()

    def interrupt(*_: object) -> None:
        if os.getpid() != owner:
            os._exit(ExitCode.INTERRUPTED)  # a forked child that has no handler of its own yet
        if current.has_come:
            end()  # the second one
        current.has_come = True
        raise KeyboardInterrupt

    watch = _Watch()
    before, unraisable = signal.signal(signal.SIGINT, interrupt), sys.unraisablehook
    # Python swallows what is raised in a destructor.
    sys.unraisablehook = lambda what: end() if current.has_come else unraisable(what)
    try:
        yield
    except BaseException:
        if not current.has_come:
            raise
    finally:
        if current.has_come:
            end()
        signal.signal(signal.SIGINT, before)
        sys.unraisablehook = unraisable
        watch.close()


@contextmanager
def command(name: str, is_debugged: bool = False) -> Generator[None]:
    """`clearing_up` for the command `name`: an error ends it with three lines, or a traceback if `is_debugged`."""
    current.command = name
    try:
        with clearing_up():
            yield
            print(end="", flush=True)  # there may be no standard output
    except OSError as error:
        if error.filename is not None or error.errno not in (errno.ENOENT, errno.EPIPE, errno.ENOSPC, errno.EDQUOT):
            raise
        if error.errno == errno.ENOENT:  # of os.getcwd
            wrong, fix = "the working directory no longer exists", "cd FOLDER, with one that exists on every node"
            notify(MusterError(wrong, seen=os.environ.get("PWD", "."), fix=fix))
            sys.exit(ExitCode.USER_MUST_CHANGE)
        give_up_output(error)
        sys.exit(ExitCode.FAILED)
    except MusterError as error:
        if os.environ.get("MUSTER_DEBUG") or is_debugged:
            sys.excepthook(type(error), error, error.__traceback__)
        else:
            notify(error)
        sys.exit(error.code)


def give_up_output(error: OSError) -> None:
    """Reports that the standard output can't be written; says nothing where the reader has closed the pipe."""
    # Else Python would try to write the rest again while it ends.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if error.errno != errno.EPIPE:
        wrong, fix = f"the output can't be written: {error.strerror}", "make room, or write to another file system"
        notify(MusterError(wrong, seen="the standard output", fix=fix))


class _Watch:
    """A thread that sees SIGINT even while the main thread can't run its handler, and enforces the deadline."""

    def __init__(self) -> None:
        from threading import Thread

        # Python's C code writes the number of each signal into the pipe as soon as it arrives.
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        # A forked child has the same pipe: a signal to a data worker must not count as one to the trainer.
        os.register_at_fork(after_in_child=self._forget)
        Thread(target=self._wait, name="interruption", daemon=True).start()

    def _forget(self) -> None:
        with suppress(ValueError):  # the fork was made by another thread than the main one
            signal.set_wakeup_fd(-1)

    def _wait(self) -> None:
        from time import sleep

        while numbers := os.read(self._read, 64):
            if signal.SIGINT in numbers:
                sleep(CLEAR_UP_S)
                end()
        os.close(self._read)

    def close(self) -> None:
        signal.set_wakeup_fd(-1)
        os.close(self._write)


def end(*_: object) -> None:
    """Prints what was interrupted, and ends this process with code 130, without destructors. `start` installs it."""
    report()
    with suppress(Exception):
        sys.stdout.flush()
    if current.has_come:
        from muster.processes import kill_descendants  # here and not above, as threading

        with suppress(Exception):
            kill_descendants()
    os._exit(ExitCode.INTERRUPTED)


def report() -> None:
    """Prints what was interrupted, once. A terminal gets a line break first: its cursor may be in a progress bar."""
    if current.is_silent:
        return
    current.is_silent = True
    line = f"muster: {current.command} was interrupted: {current.advice}\n"
    with suppress(OSError):
        # A progress bar hides the cursor: this shows it again.
        os.write(2, (f"\n\x1b[?25h{line}" if os.isatty(2) else line).encode(errors="replace"))


def advice_of_ranks() -> str:
    """How to continue the launch of this process: by --resume, if one of its ranks has reported a checkpoint."""
    with suppress(KeyError, OSError):
        folder = os.environ[LaunchVariable.RANK_REPORTS]
        for name in os.listdir(folder):
            with open(os.path.join(folder, name), encoding="utf-8", errors="replace") as file:
                if RankReport.HAS_CHECKPOINT in file.read().splitlines():
                    return GOES_ON
    return current.advice


def report_for_ranks() -> None:
    """`report` for the ranks that this process has started."""
    current.advice = advice_of_ranks()
    report()
