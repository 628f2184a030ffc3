"""The lanes: what they count, what they show of a failure, and how they end."""

import io
import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest
from rich.console import Console

from tests.lanes import Lane, run_lanes

TESTS = """
import pytest

def test_passes(): pass

def test_fails():
    print("what it printed")
    assert 1 == 2

def test_is_skipped(): pytest.skip("missing programs: nothing")

@pytest.fixture
def broken(): raise RuntimeError("in its fixture")

def test_has_no_fixture(broken): pass
"""


def lane_of(path: Path, name: str = "some") -> Lane:
    return Lane(name, [sys.executable, "-m", "pytest", "-q", "-p", "tests.conftest", str(path)])


def test_failures_are_shown_with_their_output_and_all_is_counted(tmp_path: Path) -> None:
    (tmp_path / "test_them.py").write_text(TESTS)
    shown = io.StringIO()
    lanes = [lane_of(tmp_path / "test_them.py"), Lane("no tests", ["true"])]
    assert run_lanes(lanes, 2, tmp_path, Console(file=shown, width=100)) == 1
    assert lanes[0].outcomes == {"passed": 1, "failed": 2, "skipped": 1}
    assert lanes[1].state() == "ok"
    for words in ("what it printed", "in its fixture", "make test TESTS=", "skipped 1: missing programs: nothing"):
        assert words in shown.getvalue()


@pytest.mark.parametrize("argv", [["false"], [sys.executable, "-m", "pytest", "no-such-file.py"]])
def test_a_lane_that_ends_without_a_test_has_failed(tmp_path: Path, argv: list[str]) -> None:
    shown = io.StringIO()
    assert run_lanes([Lane("broken", argv)], 1, tmp_path, Console(file=shown, width=100)) == 1
    assert "broken ended with" in shown.getvalue()


def test_an_interrupt_ends_all_lanes_and_what_they_started(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    waits = (
        f"import os, time\ndef test_it():\n    open({str(pid)!r}, 'w').write(str(os.getpid()))\n    time.sleep(600)\n"
    )
    (tmp_path / "test_it.py").write_text(waits)

    def interrupt() -> None:
        while not (pid.exists() and pid.read_text()):
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    lanes = [lane_of(tmp_path / "test_it.py"), lane_of(tmp_path / "test_it.py", "waits")]
    thread = threading.Thread(target=interrupt, daemon=True)
    thread.start()
    assert run_lanes(lanes, 1, tmp_path, Console(file=io.StringIO())) == 130
    assert lanes[0].process is not None
    assert lanes[0].process.poll() is not None
    assert lanes[1].process is None
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)
