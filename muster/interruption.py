"""Ctrl-C: at any moment of any command one line that says what was interrupted and how to go on, and exit code 130.

A command's first import is this module, and its first call `start`: Python's own answer to SIGINT is a traceback of
whatever was being loaded. Until there is something to clear up a process ends inside the handler. Within `clearing_up`
SIGINT is a KeyboardInterrupt, with a deadline: it may come where it is swallowed, or while the main thread is held by a
call into C++, which no handler interrupts.

A terminal sends SIGINT to all processes of a command, a scheduler or `kill -INT` to one: who starts others passes it
on.
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
"""How to go on where the run has a checkpoint."""

CLEAR_UP_S = 5.0
"""From SIGINT until a process ends whether it has cleared up or not."""


class Interruption:
    """What there is to know when SIGINT comes.

    Attributes:
        command: what is interrupted.
        advice: how to go on.
        is_silent: whether another process prints the line, or it is printed already.
        has_come: whether SIGINT has come.
    """

    command = ""
    advice = "the same command starts it again"
    is_silent = False
    has_come = False


current = Interruption()


def start(command: str, *, is_silent: bool = False) -> None:
    """What programs of ours begin with: from now on SIGINT ends them with the line, or silently, and code 130.

    One that was held comes now. Who ignores SIGINT (nohup, a shell's background) goes on ignoring it.
    """
    current.command, current.is_silent = command, is_silent
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A path, or a run's name, may have letters that the terminal's encoding lacks.
        sys.stdout.reconfigure(errors="backslashreplace")  # pyright: ignore[reportUnknownMemberType]
    # Else Python gives them their default answers back while it ends: a signal in place of the code.
    atexit.register(finish)
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, end)
    if signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:
        # As some supervisors start it: the kernel would forget how a child has ended, which Python takes for code 0.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])


def start_rank(command: str) -> None:
    """`start`, for one rank of a job: its agent prints the line, or where there is none rank 0 does."""
    start(command, is_silent=LaunchVariable.RANK_REPORTS in os.environ or os.environ.get("RANK", "0") != "0")


def finish() -> None:
    """From now on neither SIGINT nor a scheduler's warning changes how this process, which has done its work, ends."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)


def hold() -> None:
    """Holds SIGINT, for the program of ours that this process becomes: it gets it when it calls `start`."""
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])


@contextmanager
def held() -> Generator[None]:
    """A context in which programs of ours are started, which get SIGINT when they call `start`."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def clearing_up() -> Generator[None]:
    """A context in which SIGINT is a KeyboardInterrupt; after it, or CLEAR_UP_S later, it ends this process.

    Other threads than the main one can't do this: there nothing changes.
    """
    from threading import current_thread, main_thread  # here and not above: until `start` a Ctrl-C is a traceback

    if current_thread() is not main_thread() or signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        yield
        return
    owner = os.getpid()

    def interrupt(*_: object) -> None:
        if os.getpid() != owner:
            os._exit(ExitCode.INTERRUPTED)  # a fork that has no answer of its own yet
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
            wrong, fix = "the working directory is not there any more", "cd FOLDER, one that is there on every node"
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
    """Tells that the standard output can't be written, but of a pipe whose reader has seen enough."""
    # What is left is not written again while Python ends.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if error.errno != errno.EPIPE:
        wrong, fix = f"the output can't be written: {error.strerror}", "make room, or write to another file system"
        notify(MusterError(wrong, seen="the standard output", fix=fix))


class _Watch:
    """A thread that sees SIGINT although the main thread does not come to its handler, and sets the deadline."""

    def __init__(self) -> None:
        from threading import Thread

        # Python's C code writes the number of each signal there as soon as it comes.
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        # A fork has the same pipe: a signal to a data worker is not one to the trainer.
        os.register_at_fork(after_in_child=self._forget)
        Thread(target=self._wait, name="interruption", daemon=True).start()

    def _forget(self) -> None:
        with suppress(ValueError):  # of a thread's fork
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
    """Prints what was interrupted, and ends this process with code 130, without destructors. Handles signals too."""
    report()
    with suppress(Exception):
        sys.stdout.flush()
    if current.has_come:
        from muster.processes import kill_descendants  # here and not above, as threading

        with suppress(Exception):
            kill_descendants()
    os._exit(ExitCode.INTERRUPTED)


def report() -> None:
    """Prints what was interrupted, once, on a line of its own: a terminal may stand in that of a progress bar."""
    if current.is_silent:
        return
    current.is_silent = True
    line = f"muster: {current.command} was interrupted: {current.advice}\n"
    with suppress(OSError):
        # Where there was a bar the cursor is hidden.
        os.write(2, (f"\n\x1b[?25h{line}" if os.isatty(2) else line).encode(errors="replace"))


def report_for_ranks() -> None:
    """`report`, for the ranks that this process has started; some may have reported a checkpoint."""
    with suppress(KeyError, OSError):
        folder = os.environ[LaunchVariable.RANK_REPORTS]
        for name in os.listdir(folder):
            with open(os.path.join(folder, name), encoding="utf-8", errors="replace") as file:
                if RankReport.HAS_CHECKPOINT in file.read().splitlines():
                    current.advice = GOES_ON
    report()
