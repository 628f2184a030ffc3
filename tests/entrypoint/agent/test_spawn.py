"""Ranks that multiprocessing starts: their signals at the start, and how they end."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.entrypoint.conftest import COMMANDS, Run, clean_environment

SIGNALS = """
import os, signal
os.write(1, f"{signal.pthread_sigmask(0, [])} {signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL}\\n".encode())
if os.environ["RANK"] == "1":
    os._exit(0)  # none of the ranks waits for another that ends so
"""
SECOND = "import os, sys, time\nif os.environ['RANK'] == '1':\n    {}\ntime.sleep(600)\n"


def test_a_script_inherits_no_signal_held_or_ignored(command: Run, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SIGNALS)
    done = command("muster", "run", "--spawn=2", "script.py", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "set() True\n" * 2), done.stderr


@pytest.mark.parametrize(
    ("end", "code", "said"),
    [("sys.exit(75)", 1, "rank 1 "), ("sys.exit(3)", 1, "rank 1 "), ("os.kill(os.getpid(), 9)", 1, "SIGKILL")],
)
def test_the_code_of_the_rank_that_failed(command: Run, tmp_path: Path, end: str, code: int, said: str) -> None:
    (tmp_path / "script.py").write_text(SECOND.format(end))
    done = command("muster", "run", "--spawn=2", "script.py", cwd=tmp_path)
    assert done.returncode == code, done.stderr
    assert said in done.stderr


@pytest.mark.process
@pytest.mark.parametrize("name", ["SIGTERM", pytest.param("SIGUSR1", marks=pytest.mark.full)])
def test_a_warning_ends_a_training_with_a_checkpoint(tmp_path: Path, name: str) -> None:
    data = ["--image-size=16", "--batch-size=8", "--no-bf16", "--device=cpu"]
    options = [*data, "--epochs=3000", "--save-every=0.01", "--name=run"]
    argv = [sys.executable, str(COMMANDS / "train"), "ddp", "--spawn=2", *options]
    with (tmp_path / "said").open("wb") as said:
        launch = subprocess.Popen(argv, env=clean_environment(), cwd=tmp_path, stdout=said, stderr=said)
    try:
        end = time.monotonic() + 300
        while not (tmp_path / "runs" / "run" / "checkpoints" / "latest").exists():
            assert time.monotonic() < end, (tmp_path / "said").read_text()
            time.sleep(0.1)
        os.kill(launch.pid, getattr(signal, name))
        assert launch.wait(60) == 75, (tmp_path / "said").read_text()
    finally:
        launch.kill()
        launch.wait()
    assert "a checkpoint is written" in (tmp_path / "said").read_text()
