"""Starts trainers quickly: imports torch once, then forks a process for each requested rank.

A request is a line of JSON: {"ranks": [{"argv", "env", "folder", "name", "before"}], "deadline_s", "shm"}. The answer
is a line with the exit codes, null for a rank that had to be killed at the deadline. The fixture `train` runs this file
as a program.

The code `before` is run before the trainer. With `shm`, options of a tmpfs ("size=16m"), the ranks share a private
/dev/shm.
"""

import ctypes
import json
import os
import signal
import sys
import time
from importlib import import_module

import torchvision  # noqa: F401

import muster.train.process  # noqa: F401
from muster.config import SOURCES, STRATEGIES
from muster.train.__main__ import main, parse

CLONE_NEWNS, MS_RDONLY, MS_REC, MS_PRIVATE = 0x20000, 1, 0x4000, 0x40000  # <sched.h>, <sys/mount.h>


def mount_shm(options: str) -> None:
    """Mounts a tmpfs on /dev/shm that only this process and its children see."""
    libc = ctypes.CDLL(None, use_errno=True)
    flags = MS_RDONLY if options == "ro" else 0
    data = None if flags else options.encode()
    for failed in (
        libc.unshare(CLONE_NEWNS),
        libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None),
        libc.mount(b"tmpfs", b"/dev/shm", b"tmpfs", flags, data),
    ):
        if failed:
            raise OSError(ctypes.get_errno(), "a /dev/shm of its own can't be mounted")


def become(asked: dict) -> int:
    """Runs the trainer as `asked`, in this process; returns its exit code."""
    os.environ.clear()
    os.environ.update(asked["env"])
    os.chdir(asked["folder"])
    for number, stream in ((1, "out"), (2, "err")):
        file = os.open(f"{stream}{asked['name']}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, number)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
    sys.argv = ["train", *asked["argv"]]
    exec(asked["before"], {})
    try:
        main()
    except SystemExit as error:
        return int(error.code or 0)
    return 0


def fork(asked: dict) -> int:
    """Forks a process for a rank; returns its process id."""
    pid = os.fork()
    if pid:
        return pid
    code = 99
    try:
        code = become(asked)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def wait(pids: list[int], deadline_s: float) -> list[int | None]:
    """Waits for the processes `pids`; returns their exit codes, None for each that it killed after `deadline_s`."""
    end = time.monotonic() + deadline_s
    codes: dict[int, int | None] = {}
    while len(codes) < len(pids):
        for pid in set(pids) - set(codes):
            late = time.monotonic() > end
            if late:
                os.kill(pid, signal.SIGKILL)
            ended, status = os.waitpid(pid, 0 if late else os.WNOHANG)
            if ended:
                codes[pid] = None if late else os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    return [codes[pid] for pid in pids]


def within(request: dict) -> list[int | None]:
    """Runs ranks that share a private /dev/shm; returns their exit codes."""
    reading, writing = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            mount_shm(request["shm"])
            answer = wait([fork(asked) for asked in request["ranks"]], request["deadline_s"])
            os.write(writing, json.dumps(answer).encode())
        finally:
            os._exit(0)
    os.close(writing)
    os.waitpid(pid, 0)
    with os.fdopen(reading) as answer:
        return json.loads(answer.read() or "[]")


def load_all() -> None:
    """Imports the modules that a trainer imports only after reading its options, so that each fork has them already."""
    parse(["single"])
    for name in STRATEGIES:
        import_module(f"muster.train.parallel.{name}")
    for name in SOURCES:
        import_module(f"muster.train.data.{name}")


if __name__ == "__main__":
    load_all()
    for line in sys.stdin:
        request = json.loads(line)
        if request["shm"] is None:
            answer = wait([fork(asked) for asked in request["ranks"]], request["deadline_s"])
        else:
            answer = within(request)
        print(json.dumps(answer), flush=True)
