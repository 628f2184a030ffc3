"""Starts trainers quickly: imports torch once, then forks a process for each rank that is asked for.

A request is a line of JSON: {"ranks": [{"argv", "env", "folder", "name"}], "deadline_s"}. The answer is a line with the
exit codes, null for a rank that had to be killed at the deadline. Run as a program, by the fixture `train`.
"""

import json
import os
import signal
import sys
import time

import sklearn.datasets  # noqa: F401
import torchvision  # noqa: F401

import train.process  # noqa: F401
from train.__main__ import main


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
    try:
        main()
    except SystemExit as error:
        return int(error.code or 0)
    return 0


def fork(asked: dict) -> int:
    """The process id of a rank."""
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
    """The exit codes of `pids`."""
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


if __name__ == "__main__":
    for line in sys.stdin:
        request = json.loads(line)
        answer = wait([fork(asked) for asked in request["ranks"]], request["deadline_s"])
        print(json.dumps(answer), flush=True)
