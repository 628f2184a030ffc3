"""A node's agent whose workers fail, or which gets a signal: its messages, and its exit code."""

import errno
import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import torch
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousClosedError, RendezvousTimeoutError
from torch.distributed.launcher.api import LaunchConfig

from muster.entrypoint.agent.agent import Status
from muster.entrypoint.agent.failures import lost_nodes, not_met, not_started, report
from muster.paths import ROOT
from muster.variables import LaunchVariable, RankReport

WORKER = """
import os, signal, sys, time
from muster.variables import RankReport
rank = os.environ["RANK"]
with open(os.path.join(os.environ["MUSTER_RANK_REPORTS"], str(os.getpid())), "w") as file:
    print(os.path.abspath(f"rank-{rank}.log"), file=file)
    if rank == sys.argv[2]:
        print(RankReport.ERROR_SHOWN, file=file)
with open(f"rank-{rank}.log", "w") as log:
    print(*(f"line {number}" for number in range(30)), "\\x1b[1mthe last", sep="\\n", file=log)
deadline = time.monotonic() + 240
while rank == "1" and not os.path.exists("rank-0.log") and time.monotonic() < deadline:
    time.sleep(0.05)  # the agent ends the other as soon as this one has ended: its log is looked for below
if rank == "1":
    os.kill(os.getpid(), getattr(signal, sys.argv[1])) if sys.argv[1] != "1" else sys.exit(1)
time.sleep(600)
"""


def run(folder: Path, how: str, told: str = "") -> subprocess.CompletedProcess[str]:
    """Runs an agent with two workers. Rank 1 ends by `how`, a signal or code 1; rank `told` has shown its own error."""
    (folder / "worker.py").write_text(WORKER)
    given = [*argv(), how, told]
    return subprocess.run(given, cwd=folder, env=environment(folder), capture_output=True, text=True, timeout=240)


def argv() -> list[str]:
    """The command of an agent with two workers that run worker.py."""
    one_node = ["--nnodes=1", "--rdzv-backend=static", "--master-port=0"]
    return [sys.executable, "-P", "-m", "muster.entrypoint.agent", *one_node, "--nproc-per-node=2", "worker.py"]


def environment(folder: Path) -> dict[str, str]:
    """The variables of that agent."""
    env = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ} | {"TMPDIR": str(folder)}
    return env | {"PYTHONPATH": str(ROOT)}


def test_of_a_worker_that_was_killed_the_last_lines_are_shown(tmp_path: Path) -> None:
    ended = run(tmp_path, "SIGKILL")
    assert ended.returncode == 1
    lines = ended.stderr.splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith("error: rank 1 on "))
    assert "was ended by SIGKILL" in lines[first]
    assert lines[first + 2].startswith("  fix: most often memory")
    assert lines[first + 3] == f"  log: {tmp_path / 'rank-1.log'}"
    shown = lines[first + 4 : first + 14]
    assert shown == [f"       line {number}" for number in range(21, 30)] + ["        [1mthe last"]
    # The folder of the ranks' reports is removed, and torch has left no folder.
    assert {path.name for path in tmp_path.iterdir()} == {"worker.py", "rank-0.log", "rank-1.log"}


def test_an_error_that_a_worker_has_shown_is_not_shown_again(tmp_path: Path) -> None:
    ended = run(tmp_path, "1", told="1")
    assert (ended.returncode, "error:" in ended.stderr) == (1, False), ended.stderr
    ended = run(tmp_path, "1")
    assert (ended.returncode, ended.stderr.count("error: rank 1 on ")) == (1, 1), ended.stderr
    assert "ended with exit code 1" in ended.stderr
    assert "line 29" not in ended.stderr


def failure(pid: int, exitcode: int, timestamp: int) -> ProcessFailure:
    made = ProcessFailure(local_rank=0, pid=pid, exitcode=exitcode, error_file="/does/not/exist")
    made.timestamp = timestamp
    return made


# Python's exceptions for a process and for a thread above the limit.
@pytest.mark.parametrize("error", [OSError(errno.EAGAIN, "Try again"), RuntimeError("can't start new thread")])
def test_a_limit_of_processes_is_not_taken_for_a_lack_of_room(error: Exception) -> None:
    fix = not_started(error).fix
    assert "ulimit -u" in fix
    assert "TMPDIR" not in fix


@pytest.mark.parametrize(
    ("others", "stopped", "is_told"),
    [
        pytest.param(set[int](), set[int](), False, id="alone"),
        pytest.param({105}, set[int](), False, id="all ended by themselves"),
        pytest.param({105}, {105}, True, id="stopped"),
        pytest.param({105}, {95}, False, id="before a restart"),
    ],
)
def test_only_ranks_that_were_stopped_are_called_so(
    capsys: pytest.CaptureFixture[str], others: set[int], stopped: set[int], is_told: bool
) -> None:
    """All ranks of a script end by themselves if it does not know an option, for example."""
    assert report({4: failure(104, 2, 99)}, Status(workers={104, *others}, stopped=stopped)) == 1
    assert ("other ranks" in capsys.readouterr().err) == is_told


@pytest.mark.parametrize(("most", "others", "code"), [("10", 75, 75), ("10", 3, 1), ("", 75, 1)])
def test_another_program_asks_a_job_script_for_the_next_attempt(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], most: str, others: int, code: int
) -> None:
    """The script of `muster job SITE -- muster run SCRIPT.py` puts its job back into the queue after code 75."""
    monkeypatch.setenv("MUSTER_MAX_REQUEUES", most)
    monkeypatch.delenv("MUSTER_COMMAND", raising=False)
    assert report({0: failure(100, 75, 98), 1: failure(101, others, 99)}, Status(workers={100, 101})) == code
    assert ("error" in capsys.readouterr().err) == (code == 1)


@pytest.mark.parametrize("has_checkpoint", [True, False])
def test_a_rank_that_was_interrupted_without_its_launch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], has_checkpoint: bool
) -> None:
    monkeypatch.setenv("MUSTER_COMMAND", "train ddp")
    report_checkpoint(tmp_path, monkeypatch, has_checkpoint)
    assert report({1: failure(101, 130, 99)}, Status(workers={101})) == 1
    said = capsys.readouterr().err
    assert "was interrupted by SIGINT, which did not reach the launch itself" in said
    assert ("--resume" in said) == has_checkpoint


def report_checkpoint(folder: Path, monkeypatch: pytest.MonkeyPatch, has_checkpoint: bool) -> None:
    """Makes a rank's report in `folder`, for the agent that this process is."""
    monkeypatch.setenv(LaunchVariable.RANK_REPORTS, str(folder))
    lines = ["rank-1.log", *([RankReport.HAS_CHECKPOINT] if has_checkpoint else [])]
    (folder / "101").write_text("\n".join(lines))


@pytest.mark.parametrize("exitcode", [130, -signal.SIGKILL])
def test_a_check_has_no_checkpoint_batch_or_data_workers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], exitcode: int
) -> None:
    monkeypatch.setenv("MUSTER_COMMAND", "muster bench")
    assert report({1: failure(101, exitcode, 99)}, Status(workers={101})) == 1
    assert not re.search("--resume|batch|data workers", capsys.readouterr().err)


@pytest.mark.parametrize("has_checkpoint", [True, False])
@pytest.mark.parametrize("error", [RendezvousClosedError(), RendezvousTimeoutError(), OSError("connection lost")])
def test_of_lost_nodes_a_training_with_a_checkpoint_is_told_to_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, has_checkpoint: bool
) -> None:
    report_checkpoint(tmp_path, monkeypatch, has_checkpoint)
    assert ("--resume" in lost_nodes("node01", 61000, error).fix) == has_checkpoint


def test_the_first_is_the_one_that_was_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Others may fail because of it, and yet record an earlier time, as they record whole seconds."""
    monkeypatch.setenv(LaunchVariable.RANK_REPORTS, str(tmp_path))
    log = tmp_path / "rank-5.log"
    (tmp_path / "105").write_text(f"{log}\n")
    failures = {4: failure(104, 1, 99), 5: failure(105, -signal.SIGSEGV, 100), 6: failure(106, 1, 99)}
    monkeypatch.setenv("MUSTER_COMMAND", "train ddp")
    status = Status()
    assert report(failures, status) == 1
    said = capsys.readouterr().err
    assert said.startswith("error: rank 5 on ")
    assert said.count("error: ") == 1
    assert "SIGSEGV" in said
    assert "can't be read: " in said
    assert said.endswith("rank 4, 6 of this node ended after it\n")
    # A rank that has shown an error, its own or the one that caused it, is not reported.
    for pid in (104, 106):
        (tmp_path / str(pid)).write_text(f"/a/log\n{RankReport.ERROR_SHOWN}\n")
    assert report({rank: failures[rank] for rank in (4, 6)}, status) == 1
    assert capsys.readouterr().err == ""
    assert report(failures, status) == 1
    assert capsys.readouterr().err.startswith("error: rank 5 on ")
    # Nor is a rank that an agent or a scheduler ended by SIGTERM in the meantime.
    assert report({1: failure(101, 3, 100), 2: failure(102, -signal.SIGTERM, 99)}, status) == 1
    assert capsys.readouterr().err.startswith("error: rank 1 on ")
    monkeypatch.delenv(LaunchVariable.RANK_REPORTS)
    assert report(failures, status) == 1
    assert "log:" not in capsys.readouterr().err
    assert report({4: failure(104, 2, 1), 5: failure(105, -9, 0)}, status) == 2


def test_what_a_worker_recorded_is_shown_or_which_process_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "error.json"
    recorded = {"message": "ValueError: made for the test\nmore", "extraInfo": {"timestamp": "99"}}
    file.write_text(json.dumps({"message": recorded}))
    told = ProcessFailure(local_rank=0, pid=101, exitcode=1, error_file=str(file))
    for each, seen in ((told, "ValueError: made for the test"), (failure(101, 1, 99), "process 101")):
        assert report({1: each}, Status()) == 1
        said = capsys.readouterr().err
        assert f" seen: {seen}\n" in said
        assert "--tee 3" in said
    monkeypatch.setenv("MUSTER_COMMAND", "train ddp")
    assert report({1: told}, Status()) == 1
    assert "--debug shows its traceback" in capsys.readouterr().err


def test_a_wrong_call_does_not_follow_from_another_rank(capsys: pytest.CaptureFixture[str]) -> None:
    for exitcode, follows in ((1, True), (2, False)):
        assert report({1: failure(101, exitcode, 99)}, Status(elsewhere="rank 0 on node01 failed")) == 1
        assert ("after another: rank 0 on node01 failed" in capsys.readouterr().err) == follows


@pytest.mark.parametrize(
    ("words", "is_taken"),
    [
        ("[Errno 98] Address already in use", True),
        ("The server socket has failed to listen. port: 61000, code: -98, name: EADDRINUSE", True),
        ("connection timed out", False),
    ],
)
def test_a_port_that_is_taken_is_told_as_that(words: str, is_taken: bool) -> None:
    told = not_met("node01", 61000, "2", OSError(words))
    assert (told.code, "--master-port PORT" in told.fix) == ((2, True) if is_taken else (1, False))


def test_a_torch_that_is_too_old_is_told_as_that(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a framework brought torch 2.9: then no node is missing, and no port is closed."""
    monkeypatch.setattr(torch, "__version__", type(torch.__version__)("2.9.1+cu128"))
    told = not_met("127.0.0.1", 0, "1", AttributeError("'LaunchConfig' object has no attribute 'signals_to_handle'"))
    assert (told.code, told.seen.partition(": ")[0]) == (2, f"torch {torch.__version__}")
    assert told.fix.startswith("torch 2.10 or newer")


STOPPED = """
import os, signal, subprocess, sys, time
if os.environ["RANK"] == "0":
    while not os.path.exists("ready"):
        time.sleep(0.01)
    sys.exit(2)
print(subprocess.Popen(["sleep", "300"]).pid)
signal.signal(signal.SIGTERM, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
os.close(os.open("ready", os.O_CREAT))
time.sleep(600)
"""


def test_what_the_agent_stopped_is_not_the_cause_and_leaves_nothing_running(tmp_path: Path) -> None:
    (tmp_path / "worker.py").write_text(STOPPED)
    ended = subprocess.run(argv(), cwd=tmp_path, env=environment(tmp_path), capture_output=True, text=True, timeout=240)
    # 2 is the code of shells and many programs for wrong arguments: the launch of a user's program ends with 1.
    assert ended.returncode == 1
    assert "error: rank 0 on " in ended.stderr
    assert "exit code 2" in ended.stderr
    assert "rank 1" not in ended.stderr
    assert is_gone(int(ended.stdout))


def test_workers_end_with_an_agent_that_was_killed(tmp_path: Path) -> None:
    # One write a line, as both workers share a pipe.
    (tmp_path / "worker.py").write_text("import os, time\nos.write(1, f'{os.getpid()}\\n'.encode())\ntime.sleep(600)")
    with subprocess.Popen(
        argv(), cwd=tmp_path, env=environment(tmp_path), stdout=subprocess.PIPE, text=True
    ) as started:
        assert started.stdout is not None
        try:
            workers = [int(started.stdout.readline()) for _ in range(2)]
        finally:
            started.kill()
        assert all(map(is_gone, workers))


DEAF = """
import os, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
time.sleep(1)  # by then the agent knows its ranks
os.write(1, b"ready\\n")
time.sleep(20)
open("outlived", "w").close()
time.sleep(600)
"""
NEWER = hasattr(LaunchConfig, "shutdown_timeout")
"""Whether this torch has --shutdown-timeout and --log-line-prefix-template."""


@pytest.mark.full
def test_ranks_that_do_not_end_by_sigterm_are_told_and_end_by_a_second_one(tmp_path: Path) -> None:
    (tmp_path / "worker.py").write_text(DEAF)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    *agent, worker = argv()
    given = [*agent, *(["--shutdown-timeout=2"] if NEWER else []), worker]
    with subprocess.Popen(given, cwd=tmp_path, env=environment(tmp_path), text=True, **pipes) as started:
        assert started.stdout is not None
        assert started.stderr is not None
        try:
            assert [started.stdout.readline() for _ in range(2)] == ["ready\n"] * 2
            started.terminate()
            assert any("passed SIGTERM on to its ranks" in line for line in started.stderr)
            assert started.poll() is None
            started.terminate()
            # torch's own lines, one for each rank that it kills, would hide this line.
            assert [line.partition(" on ")[0] for line in started.stderr] == ["muster: ended by SIGTERM"]
            assert started.wait(60) == 1
        finally:
            started.kill()
    assert not (NEWER and (tmp_path / "outlived").exists())


def test_the_output_of_each_rank_has_its_prefix_and_its_file(tmp_path: Path) -> None:
    # One write a line, as both workers share a pipe.
    (tmp_path / "worker.py").write_text("import os\nos.write(1, f\"rank {os.environ['RANK']}\\n\".encode())\n")
    *agent, worker = argv()
    given = [*agent, "--tee=3", "--log-dir=logs", worker]
    ended = subprocess.run(given, cwd=tmp_path, env=environment(tmp_path), capture_output=True, text=True, timeout=240)
    assert ended.returncode == 0, ended.stderr
    lines = sorted(ended.stdout.splitlines(), key=lambda line: line[-1])
    assert [line.rpartition(":")[2] for line in lines] == ["rank 0", "rank 1"]
    assert all(line.startswith("[") for line in lines)
    logs = sorted(path.read_text() for path in (tmp_path / "logs").glob("**/stdout.log"))
    assert logs == ["rank 0\n", "rank 1\n"]
    if NEWER:
        given.insert(-1, "--log-line-prefix-template=<${rank}> ")
        ended = subprocess.run(
            given, cwd=tmp_path, env=environment(tmp_path), capture_output=True, text=True, timeout=240
        )
        assert sorted(ended.stdout.splitlines()) == ["<0> rank 0", "<1> rank 1"]


def is_gone(pid: int) -> bool:
    """Whether this process ends within 20 seconds; one that does not is killed."""
    try:
        psutil.Process(pid).wait(timeout=20)
    except psutil.NoSuchProcess:
        pass
    except psutil.TimeoutExpired:
        psutil.Process(pid).kill()
        return False
    return True


def test_of_a_rank_that_nccl_has_aborted_the_reason_is_shown_and_not_its_stack(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(LaunchVariable.RANK_REPORTS, str(tmp_path))
    reason = "[Rank 3] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7, OpType=ALLREDUCE)"
    frames = [f"frame #{number}: c10d::ProcessGroupNCCL::Watchdog::run() + 0x{number:x}" for number in range(20)]
    log = tmp_path / "rank-3.log"
    log.write_text("\n".join([reason, *frames, "", "terminate called after throwing an instance", *frames, ""]))
    (tmp_path / "103").write_text(f"{log}\n")
    assert report({3: failure(103, -signal.SIGABRT, 100)}, Status()) == 1
    said = capsys.readouterr().err
    assert "was ended by SIGABRT" in said
    assert "--timeout-s" in said
    assert reason in said
    assert "frame #" not in said


def test_a_run_with_an_escape_code_in_its_name_sends_none_to_the_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(LaunchVariable.RANK_REPORTS, str(tmp_path))
    log = tmp_path / "a\x1b[31mb.log"
    log.write_text("the last line\n")
    (tmp_path / "103").write_text(f"{log}\n")
    assert report({3: failure(103, -signal.SIGKILL, 100)}, Status()) == 1
    said = capsys.readouterr().err
    assert "\x1b" not in said
    assert rf"  log: {tmp_path}/a\x1b[31mb.log" in said
    assert "the last line" in said


def test_a_log_in_a_folder_whose_name_is_no_text_is_shown_and_what_its_rank_has_said_is_not_told_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(LaunchVariable.RANK_REPORTS, str(tmp_path))
    log = tmp_path / os.fsdecode(b"caf\xe9.log")
    log.write_text("the last line\n")
    (tmp_path / "103").write_bytes(os.fsencode(f"{log}\n"))
    assert report({3: failure(103, -signal.SIGKILL, 100)}, Status()) == 1
    assert "the last line" in capsys.readouterr().err
    (tmp_path / "103").write_bytes(os.fsencode(f"{log}\n{RankReport.ERROR_SHOWN}\n"))
    assert report({3: failure(103, 1, 100)}, Status()) == 1
    assert capsys.readouterr().err == ""


def test_a_ranks_report_is_read_as_the_rank_has_written_it_where_names_are_latin_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ranks write in UTF-8, whatever the locale's encoding, which `os.fsdecode` uses."""
    monkeypatch.setenv(LaunchVariable.RANK_REPORTS, str(tmp_path))
    monkeypatch.setattr(os, "fsdecode", lambda name: bytes(name).decode("latin-1"))
    log = tmp_path / "caf\xe9.log"
    log.write_text("the last line\n")
    (tmp_path / "103").write_text(f"{log}\n", encoding="utf-8")
    assert report({3: failure(103, -signal.SIGKILL, 100)}, Status()) == 1
    assert "the last line" in capsys.readouterr().err


WAITS = """
import os, signal, sys, time
def hear(number, frame):
    os.write(1, b"heard\\n")
    if number == signal.SIGINT:
        time.sleep(1)
        os._exit(0)
for name in sys.argv[2:]:
    signal.signal(getattr(signal, name), hear)
signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])  # held while it started
if "reports" in sys.argv:
    open(os.path.join(os.environ["MUSTER_RANK_REPORTS"], str(os.getpid())), "w").close()
os.write(1, b"ready\\n")
while not os.path.exists("go"):
    time.sleep(0.05)
"""


def started(
    folder: Path, *words: str, options: tuple[str, ...] = (), nohup: bool = False, **variables: str
) -> "subprocess.Popen[str]":
    """Starts an agent; returns it when its two workers are ready. They end when there is a file `go` in `folder`."""

    def prepare() -> None:
        signal.signal(signal.SIGHUP, signal.SIG_IGN if nohup else signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # the process that started the tests may ignore it

    (folder / "worker.py").write_text(WAITS)
    *command, worker = argv()
    agent = subprocess.Popen(
        [*command, *options, worker, *words], cwd=folder, env=environment(folder) | variables, text=True,
        preexec_fn=prepare, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert agent.stdout is not None
    assert [agent.stdout.readline() for _ in range(2)] == ["ready\n"] * 2
    return agent


@pytest.mark.parametrize("nohup", [True, False])
def test_a_terminal_that_is_closed_ends_nothing_under_nohup(tmp_path: Path, nohup: bool) -> None:
    with started(tmp_path, nohup=nohup) as agent:
        try:
            agent.send_signal(signal.SIGHUP)
            with suppress(subprocess.TimeoutExpired):
                agent.wait(0.5)
            (tmp_path / "go").touch()
            assert agent.wait(60) == (0 if nohup else 1)
        finally:
            agent.kill()


@pytest.mark.parametrize(
    ("command", "first", "second", "code", "words"),
    [
        ("train ddp", "SIGINT", "SIGTERM", 130, "was interrupted"),  # as LSF's bkill sends them
        ("train ddp", "SIGUSR1", "SIGHUP", 1, "ended by SIGHUP"),
        ("train ddp", "SIGTERM", "SIGTERM", 75, "ended by SIGTERM"),
        ("muster bench", "SIGTERM", "SIGTERM", 75, "ended by SIGTERM"),
    ],
)
def test_of_two_signals_the_one_that_ends_the_launch_is_told(
    tmp_path: Path, command: str, first: str, second: str, code: int, words: str
) -> None:
    reports = "reports" if command.startswith("train") else "no reports"
    with started(tmp_path, reports, first, MUSTER_COMMAND=command) as agent:
        assert agent.stdout is not None
        try:
            agent.send_signal(getattr(signal, first))
            assert agent.stdout.readline() == "heard\n"
            agent.send_signal(getattr(signal, second))
            (tmp_path / "go").touch()
            assert agent.wait(60) == code
            assert agent.stderr is not None
            said = agent.stderr.read()
        finally:
            agent.kill()
    assert words in said
    assert "before the training began" not in said


def test_ranks_do_not_start_again_after_a_warning(tmp_path: Path) -> None:
    for variables, code in (({}, 1), ({"MUSTER_COMMAND": "train ddp"}, 75)):
        with started(tmp_path, options=("--max-restarts=2",), **variables) as agent:
            try:
                agent.send_signal(signal.SIGTERM)
                assert agent.wait(60) == code
                assert agent.stderr is not None
                assert "start again" not in agent.stderr.read()
            finally:
                agent.kill()


def test_a_signal_that_comes_while_an_agent_tells_how_it_ended_changes_nothing(tmp_path: Path) -> None:
    # Rank 0 fills stderr's pipe, which nobody reads, so that the agent has to wait until it can write.
    fill = (
        "import os, sys\nos.set_blocking(2, False)\ntry:\n    while True:\n        os.write(2, b'.' * 16)\n"
        "except BlockingIOError:\n    os.set_blocking(2, True)\n    open('full', 'w').close()\n    sys.exit(3)\n"
    )
    (tmp_path / "worker.py").write_text(f"import os\nif os.environ['RANK'] == '0':\n    exec({fill!r})\n")
    with subprocess.Popen(argv(), cwd=tmp_path, env=environment(tmp_path), stderr=subprocess.PIPE) as agent:
        while not (tmp_path / "full").exists():
            assert agent.poll() is None
            time.sleep(0.05)
        children = psutil.Process(agent.pid).children()
        psutil.wait_procs(children, timeout=30)
        time.sleep(1)
        agent.send_signal(signal.SIGTERM)
        assert agent.stderr is not None
        said = agent.stderr.read()
        assert agent.wait(30) == 1
    assert b"Traceback" not in said
    assert b"error: rank 0 on " in said


def test_an_option_of_the_script_is_not_the_node_rank_of_the_launch(tmp_path: Path) -> None:
    with started(tmp_path, "--node-rank=1", MUSTER_COMMAND="train ddp", MUSTER_MAX_REQUEUES="3") as agent:
        try:
            agent.send_signal(signal.SIGTERM)
            _, said = agent.communicate(timeout=60)
        finally:
            agent.kill()
    assert "muster: attempt 1 of 4 ends with 75" in said  # which the node of rank 0 alone prints


def test_an_agent_with_a_closed_stderr_ends_with_its_code(tmp_path: Path) -> None:
    with started(tmp_path, MUSTER_COMMAND="train ddp", MUSTER_MAX_REQUEUES="3") as agent:
        assert agent.stderr is not None
        try:
            agent.stderr.close()
            agent.send_signal(signal.SIGTERM)
            assert agent.wait(60) == 75
        finally:
            agent.kill()
