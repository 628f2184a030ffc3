"""Ctrl-C: exit code 130 and one line, at any moment."""

import os
import pty
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from muster.paths import ROOT
from tests.interruptions import COMMANDS, END_S, FIRST_S, interrupt, prepare

START = "import os, signal, sys, time\nfrom muster import interruption\ninterruption.start('muster try')\n"
KILL = "os.kill(os.getpid(), signal.SIGINT)\n"
LINE = "muster: muster try was interrupted: the same command starts it again\n"


def ran(code: str, *, answer: signal.Handlers = signal.SIG_DFL, **streams: int) -> subprocess.CompletedProcess[str]:
    """Runs a program that starts as our commands do; returns the completed process."""
    return subprocess.run(
        [sys.executable, "-c", START + code], cwd=ROOT, text=True, timeout=60,
        preexec_fn=lambda: signal.signal(signal.SIGINT, answer), **(streams or {"capture_output": True}),
    )  # fmt: skip


@pytest.mark.parametrize(
    "code",
    [
        KILL,
        f"with interruption.clearing_up():\n    {KILL}",
        # Code that may swallow the exception: a clause for all exceptions, a destructor.
        f"with interruption.clearing_up():\n    try:\n        {KILL}    except BaseException:\n        pass\n",
        f"class A:\n    def __del__(self):\n        {KILL}with interruption.clearing_up():\n    A()\n    time.sleep(9)",
        # Another exception takes its place.
        f"with interruption.clearing_up():\n    try:\n        {KILL}    finally:\n        raise ValueError\n",
    ],
)
def test_one_line_and_130_whatever_becomes_of_the_exception(code: str) -> None:
    done = ran(code)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", LINE)


def test_a_process_that_is_held_in_c_or_clears_up_for_ever_has_a_deadline() -> None:
    held = "import hashlib\ninterruption.CLEAR_UP_S = 0.2\nwith interruption.clearing_up():\n"
    for code in (
        f"    {KILL}".replace("os.kill", "try:\n        os.kill") + "    finally:\n        time.sleep(500)\n",
        "    import threading\n    threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGINT)).start()\n"
        "    hashlib.pbkdf2_hmac('sha256', b'', b'', 10**9)\n",
    ):
        done = ran(held + code)
        assert (done.returncode, done.stderr) == (130, LINE)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2])
def test_a_signal_that_comes_while_python_ends_leaves_the_code(number: int) -> None:
    """Python empties modules after it has restored the default handlers of signals."""
    last = "class A:\n    def __del__(self, kill=os.kill, pid=os.getpid()):\n"
    done = ran(f"{last}        kill(pid, {int(number)})\na = A()\nsys.exit(2)\n")
    assert (done.returncode, done.stderr) == (2, "")


def test_a_process_that_ignores_sigint_goes_on_ignoring_it() -> None:
    code = f"{KILL}with interruption.clearing_up():\n    {KILL}print('done')\n"
    done = ran(code, answer=signal.SIG_IGN)
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")


def test_how_a_child_ends_is_known_where_children_were_ignored() -> None:
    code = "import subprocess\nsys.exit(subprocess.call([sys.executable, '-S', '-c', 'raise SystemExit(3)']))\n"
    done = subprocess.run(
        [sys.executable, "-c", START + code], cwd=ROOT, timeout=60,
        preexec_fn=lambda: signal.signal(signal.SIGCHLD, signal.SIG_IGN),
    )  # fmt: skip
    assert done.returncode == 3


def test_a_sigint_that_was_held_is_delivered_when_the_process_has_its_handler() -> None:
    again = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r}); from muster import interruption; interruption.start('next')"
    )
    done = ran(f"interruption.hold()\n{KILL}os.execv(sys.executable, [sys.executable, '-c', {again!r}])\n")
    assert (done.returncode, done.stderr) == (130, LINE.replace("muster try", "next"))


def test_on_a_terminal_the_line_is_not_glued_to_a_progress_bar() -> None:
    ours, theirs = pty.openpty()
    try:
        done = ran(f"print('a bar', end='', flush=True)\n{KILL}", stdout=theirs, stderr=theirs)
        assert done.returncode == 130
        shown = os.read(ours, 4096).decode().replace("\x1b[?25h", "")
        assert shown.splitlines() == ["a bar", LINE.rstrip()]
    finally:
        os.close(ours)
        os.close(theirs)


@pytest.mark.parametrize("name", ["env", "detect", "job"])
def test_short_commands_at_random_moments(tmp_path: Path, name: str) -> None:
    after_s = random.Random(name).uniform(4 * FIRST_S, 8 * FIRST_S)
    ended = interrupt(COMMANDS[name][1], after_s, tmp_path)
    assert not ended.fault(), ended.said


@pytest.mark.process
@pytest.mark.parametrize(
    ("name", "to_group"),
    [
        ("train", True),
        pytest.param("train", False, marks=pytest.mark.full),
        ("doctor", False),
        pytest.param("muster run", True, marks=pytest.mark.full),
        pytest.param("bench", True, marks=pytest.mark.full),
        pytest.param("selftest", True, marks=pytest.mark.full),
        pytest.param("report", True, marks=pytest.mark.full),
    ],
)
def test_long_commands_at_random_moments(tmp_path: Path, name: str, to_group: bool) -> None:
    prepare(tmp_path)
    last_s, argv = COMMANDS[name]
    ended = interrupt(argv, random.Random(name).uniform(1, last_s / 2), tmp_path, to_group=to_group)
    assert not ended.fault(), ended.said


@pytest.mark.process
def test_a_sigint_while_ranks_are_started_leaves_no_process_of_theirs(tmp_path: Path) -> None:
    script = tmp_path / "script.sh"
    script.write_text('#!/bin/sh\nsleep 120 &\n[ "$LOCAL_RANK" = 0 ] && kill -INT $PPID\nwait\n')
    script.chmod(0o755)
    ended = interrupt(["muster", "run", "--nproc-per-node=32", "--no-python", str(script)], END_S, tmp_path)
    assert (ended.code, ended.fault()) == (130, "")
