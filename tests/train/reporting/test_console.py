"""Each rank has a log file of its own; the console shows rank 0, or all ranks with host and rank in each line."""

import os
import pty
import re
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from muster.train.reporting import console
from muster.train.reporting.console import Lines, Tee, plain
from tests.train.conftest import environment

HOST = socket.gethostname()
LINE = re.compile(rf"\[{re.escape(HOST)} \d\] .*")
TALK = """
import os, sys, warnings
from muster.train.trainer import Trainer
train_epoch = Trainer.train_epoch
def talking(self):
    rank = os.environ.get("RANK", "0")
    print("printed by", rank)
    print("complained by", rank, file=sys.stderr)
    os.write(1, f"written by {rank}\\n".encode())
    return train_epoch(self)
Trainer.train_epoch = talking
"""
SHORT = ["--max-steps=2", "--model=squeezenet1_1", "--data=fake", "--num-samples=64", "--num-classes=2"]
SHORT += ["--image-size=32", "--no-bf16", "--batch-size=4"]


def log_of(run: Path, rank: int, attempt: str = "0") -> str:
    return (run / "logs" / attempt / HOST / f"rank-{rank}.log").read_text()


@pytest.mark.process
def test_each_rank_has_a_file_and_the_console_shows_rank_0(train, tmp_path):
    argv = ["ddp", *SHORT, "--name=run", f"--runs-dir={tmp_path}"]
    secret = {"MUSTER_COMMAND": "train ddp --of-the-user", "WANDB_API_KEY": "not to be written down"}
    first, second = train(argv, 2, ok=True, before=TALK, env=secret)
    assert (second.out, second.err) == ("", "")
    own, other = log_of(tmp_path / "run", 0), log_of(tmp_path / "run", 1)
    for text, rank in ((own, 0), (other, 1)):
        lines = text.splitlines()
        assert f"rank {rank} of 2 on {HOST}, cpu, process " in lines[0]
        assert lines[0].endswith(": train ddp --of-the-user")
        assert f"printed by {rank}" in lines
        assert f"complained by {rank}" in lines
        assert lines[-1].endswith("ends with exit code 0")
        assert secret["WANDB_API_KEY"] not in text
    # What C libraries print goes to one place only: for rank 0 to the console, for others to the log.
    assert "written by 1" in other
    assert "written by 0" in first.out
    assert "epoch 1/10  step 2  " in other
    shown = [line for line in first.out.splitlines() if line != "written by 0"]
    assert shown == [line for line in own.splitlines() if line[:4] != "=== " and line != "complained by 0"]
    for words in ("2 processes on", "train loss", "validation accuracy"):
        assert words in own
    # The next attempt leaves these logs as they are.
    train([*argv, "--resume", "--max-steps=3"], 2, ok=True, env={"MUSTER_ATTEMPT": "1"})
    assert (own, other) == (log_of(tmp_path / "run", 0), log_of(tmp_path / "run", 1))
    assert "note: " not in log_of(tmp_path / "run", 0, "1")
    train([*argv, "--resume", "--max-steps=4"], 2, ok=True, env={"MUSTER_ATTEMPT": "1"})
    assert log_of(tmp_path / "run", 1, "1").count("ends with exit code 0") == 2


@pytest.mark.process
def test_a_name_that_is_no_text_is_no_reason_not_to_train(train, tmp_path):
    [ended] = train(["single", *SHORT, "--name=a\udcff", f"--runs-dir={tmp_path}"], ok=True)
    assert r"/a\udcff" in ended.out
    assert (tmp_path / "a\udcff" / "summary.json").exists()


@pytest.mark.process
def test_all_ranks_on_the_console_each_line_with_host_and_rank(train, tmp_path):
    argv = ["ddp", *SHORT, "--console=all", "--name=run", f"--runs-dir={tmp_path}"]
    ended = train(argv, 2, ok=True, before=TALK)
    for rank in (0, 1):
        lines = (ended[rank].out + ended[rank].err).splitlines()
        assert f"[{HOST} {rank}] printed by {rank}" in lines
        assert f"[{HOST} {rank}] complained by {rank}" in lines
        assert all(LINE.fullmatch(line) for line in lines if not line.startswith("written")), lines
        assert f"printed by {rank}" in log_of(tmp_path / "run", rank)
    assert re.search(rf"^\[{re.escape(HOST)} 0\] world +2 processes", ended[0].out, re.MULTILINE)
    assert "written by 1" not in ended[1].out
    assert "written by 1" in log_of(tmp_path / "run", 1)


@pytest.mark.process
@pytest.mark.parametrize("shown", ["rank0", "all"])
def test_the_error_of_another_rank_is_on_the_console_and_in_its_log(train, tmp_path, shown):
    broken = TALK.replace("    return", "    if rank == '1': raise ZeroDivisionError('made for the test')\n    return")
    argv = ["ddp", *SHORT, f"--console={shown}", "--name=run", f"--runs-dir={tmp_path}"]
    ended = train(argv, 2, before=broken)
    assert [rank.code for rank in ended] == [1, 1]
    assert f"[{HOST} 1] ZeroDivisionError: made for the test" in ended[1].err.splitlines()
    assert all(LINE.fullmatch(line) for line in ended[1].err.splitlines()), ended[1].err
    assert "\nZeroDivisionError: made for the test\n" in log_of(tmp_path / "run", 1)
    assert log_of(tmp_path / "run", 1).endswith("ends with exit code 1\n")
    assert "Traceback" not in ended[0].err
    assert f"rank 1 on {HOST} failed: ZeroDivisionError" in log_of(tmp_path / "run", 0)


@pytest.mark.process
def test_a_folder_that_takes_no_log_is_no_reason_not_to_train(train, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "logs").write_text("a file")
    [ended] = train(["single", *SHORT, "--name=run", f"--runs-dir={tmp_path}"], ok=True)
    assert f"note: rank 0 on {HOST} has no log file: " in ended.err


@pytest.mark.process
def test_a_terminal_has_a_line_that_is_written_over_and_the_log_gets_lines(tmp_path):
    argv = [
        sys.executable,
        "-m",
        "muster.train",
        "single",
        *SHORT,
        "--epochs=2",
        "--name=run",
        f"--runs-dir={tmp_path}",
    ]
    argv.remove("--max-steps=2")
    here, there = pty.openpty()
    said: list[bytes] = []

    def read() -> None:
        try:
            while text := os.read(here, 65536):
                said.append(text)
        except OSError:
            return  # the other end of the terminal is closed

    reader = threading.Thread(target=read)
    reader.start()
    env = environment({"TERM": "xterm-256color", "COLUMNS": "100"})
    try:
        code = subprocess.run(argv, env=env, cwd=tmp_path, stdout=there, stderr=there, timeout=240).returncode
    finally:
        os.close(there)
        reader.join(30)
        os.close(here)
    screen = b"".join(said).decode()
    assert code == 0, screen
    assert "epoch 2/2 " in screen
    assert "\x1b[" in screen
    log = log_of(tmp_path / "run", 0)
    assert not re.search(r"[\x1b\r━]", log), log
    assert re.search(r"^ +2/2 +\d", log, re.MULTILINE), log
    assert "validation accuracy" in log


def test_the_attempt_is_the_schedulers_and_then_torchruns():
    assert console.attempt({}) == "0"
    assert console.attempt({"MUSTER_ATTEMPT": "2", "TORCHELASTIC_RESTART_COUNT": "1"}) == "2.1"
    assert console.attempt({"MUSTER_ATTEMPT": "1", "TORCHELASTIC_RESTART_COUNT": "0"}) == "1"
    assert console.attempt({"TORCHELASTIC_RESTART_COUNT": "3"}) == "0.3"
    assert console.log_folder(Path("run"), "../node 1", {}) == Path("run/logs/0/node-1")


def test_a_log_gets_the_final_text_of_a_line():
    assert plain("copied 1%\rcopied 2%\rcopied all\n\x1b[1mbold\x1b[0m\r") == "copied all\nbold"


def test_lines_are_written_whole(tmp_path, monkeypatch):
    with (tmp_path / "log").open("w") as log, (tmp_path / "screen").open("w") as screen:
        stream = Tee(screen, log, Lines(screen.fileno(), "[node02 3] ", "ascii"))
        print("one", end=", ", file=stream, flush=True)
        assert not (tmp_path / "screen").read_text()
        print("two\nthree ü", file=stream)
        print("the rest", end="", file=stream)
        monkeypatch.setattr(sys, "stdout", stream)
        console.flush()
        console.flush()
    assert (tmp_path / "screen").read_text() == "[node02 3] one, two\n[node02 3] three \\xfc\n[node02 3] the rest\n"
    assert (tmp_path / "log").read_text() == "one, two\nthree ü\nthe rest\n"


def test_a_rank_of_open_mpi_in_a_job_draws_no_bars_into_the_jobs_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """Open MPI gives its ranks terminals."""
    master, terminal = pty.openpty()
    with os.fdopen(terminal, "w") as screen, os.fdopen(master), open(os.devnull, "w") as log:
        stream = Tee(screen, log)
        monkeypatch.delenv("MUSTER_SCHEDULER", raising=False)
        monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
        assert stream.isatty()
        monkeypatch.setenv("MUSTER_SCHEDULER", "pbs")
        assert not stream.isatty()


@pytest.mark.process
def test_a_rank_knows_its_terminal_though_its_lines_go_to_the_log(tmp_path: Path) -> None:
    code = """
import os, sys
from pathlib import Path
from muster.train.distributed.world import World
from muster.train.reporting import console
for all_ranks in (False, True):
    pid = os.fork()
    if not pid:
        world = World(rank=1, world_size=2)
        console.open_log(Path("run"), world, "train ddp", all_ranks=all_ranks)
        os._exit(not console.has_terminal(world))
    if os.waitpid(pid, 0)[1]:
        sys.exit(f"not with {all_ranks=}")
"""
    here, there = pty.openpty()
    with os.fdopen(there, "w") as screen, os.fdopen(here):
        argv = [sys.executable, "-c", code]
        assert subprocess.run(argv, env=environment(), cwd=tmp_path, stderr=screen, timeout=240).returncode == 0


@pytest.mark.process
def test_a_console_that_takes_nothing_ends_no_training(tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "muster.train", "single", *SHORT, "--name=run", f"--runs-dir={tmp_path}"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(argv, env=environment(), cwd=tmp_path, stdout=full, stderr=full, timeout=240)
    assert done.returncode == 0
    assert "validation accuracy" in log_of(tmp_path / "run", 0)


@pytest.mark.process
def test_letters_that_the_console_has_not_end_no_training(tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "muster.train", "single", *SHORT, "--name=run", f"--runs-dir={tmp_path / 'größe'}"]
    env = environment({"PYTHONIOENCODING": "ascii"})
    done = subprocess.run(argv, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert "gr\\xf6\\xdfe/run" in done.stdout
