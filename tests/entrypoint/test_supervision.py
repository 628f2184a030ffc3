"""What the agent does beside torchrun: it ends workers that give no sign of life, and counts restarts."""

import os
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from muster import ROOT
from muster.entrypoint.last_words import how_ended
from muster.entrypoint.supervision import LEFT, Beats, leave

# Seconds until a worker counts as dead: shorter here than in earnest.
AGENT = """
import functools, sys
from muster.entrypoint import agent
agent.Supervision = functools.partial(agent.Supervision, silent_s=3)
sys.exit(agent.main(sys.argv[1:]))
"""
ONE_NODE = ["--standalone", "--local-addr=127.0.0.1", "--nproc-per-node=2"]


def ran(folder: Path, script: str, *options: str) -> subprocess.CompletedProcess[str]:
    """The ended agent, which has run `script` as two workers in `folder`."""
    (folder / "script.py").write_text(script)
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "TMPDIR") if name in os.environ}
    env = {**kept, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    argv = [sys.executable, "-c", AGENT, *ONE_NODE, *options, "script.py"]
    return subprocess.run(argv, cwd=folder, env=env, capture_output=True, text=True, timeout=120)


def test_looks_are_counted_and_not_seconds(tmp_path: Path) -> None:
    beats, file, other = Beats(), tmp_path / "0.beat", tmp_path / "1.beat"
    assert beats.look([file]) == {}
    file.touch()
    os.utime(file, ns=(1, 1))
    assert [beats.look([file])[file] for _ in range(3)] == [0, 1, 2]
    os.utime(file, ns=(2, 2))
    other.touch()
    assert beats.look([file, other]) == {file: 0, other: 0}
    assert beats.look([file, other]) == {file: 1, other: 1}
    file.unlink()
    assert beats.look([file, other]) == {other: 2}


@pytest.mark.parametrize(
    ("code", "words"), [(1, "ended with exit code 1"), (-9, "was ended by SIGKILL"), (-40, "was ended by signal 40")]
)
def test_how_a_worker_ended(code: int, words: str) -> None:
    assert how_ended(code) == words


class Store:
    """A stand-in for the agents' store, in which the other node is counted at the host's third look."""

    def __init__(self) -> None:
        self.count = self.looks = 0

    def add(self, key: str, number: int) -> int:
        assert key == LEFT
        self.looks += number == 0
        self.count += number + (self.looks == 3)
        return self.count


def test_the_node_with_the_store_leaves_last() -> None:
    store = Store()
    for rank, looks in ((1, 0), (0, 3)):
        store.count = 0
        leave(SimpleNamespace(_store=store, _worker_group=SimpleNamespace(group_world_size=2, group_rank=rank)))
        assert store.looks == looks


def test_a_store_that_is_gone_keeps_nobody() -> None:
    # None: whatever is asked of it fails.
    leave(SimpleNamespace(_store=None, _worker_group=SimpleNamespace(group_world_size=2, group_rank=0)))


def test_the_level_of_the_agents_log_is_not_that_of_its_ranks() -> None:
    code = "import os; from muster.entrypoint import agent; print(os.environ.get('TORCH_CPP_LOG_LEVEL'))"
    for given in ("None", "INFO"):
        env = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT)}
        env |= {} if given == "None" else {"TORCH_CPP_LOG_LEVEL": given}
        done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120)
        assert done.stdout == f"{given}\n", done.stderr


STOPPED = """
import os, signal, sys, time
from pathlib import Path
beat = Path(os.environ["TORCHELASTIC_ERROR_FILE"] + ".beat")
beat.touch()
if os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    Path("pid").write_text(str(os.getpid()))
    os.kill(os.getpid(), signal.SIGSTOP)
end = time.monotonic() + (60 if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" else 6)
while time.monotonic() < end:
    beat.touch()
    time.sleep(0.3)
"""


def is_alive(pid: int) -> bool:
    """Whether a process runs, or waits to be asked how it ended."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize("max_restarts", [0, pytest.param(1, marks=pytest.mark.full)])
def test_a_worker_that_gives_no_sign_of_life_is_ended(tmp_path: Path, max_restarts: int) -> None:
    done = ran(tmp_path, STOPPED, f"--max-restarts={max_restarts}")
    assert "rank 1 on " in done.stderr
    assert "gave no sign of life for 3 s" in done.stderr
    assert not is_alive(int((tmp_path / "pid").read_text()))
    if max_restarts:
        assert done.returncode == 0, done.stderr
        assert "the ranks start again, restart 1 of 1" in done.stderr
    else:
        assert done.returncode == 1
        assert "error: rank 1 on " in done.stderr
        assert "most often memory" not in done.stderr


DIES = """
import os, sys
os.write(1, f"{os.environ['MUSTER_LAUNCH']} {os.getppid()}\\n".encode())
if os.environ["RANK"] == "1":
    sys.exit(int(open("code").read()))
import time
time.sleep(60)
"""


def test_workers_that_fail_each_time_end_with_a_count(tmp_path: Path) -> None:
    (tmp_path / "code").write_text("3")
    done = ran(tmp_path, DIES, "--max-restarts=2")
    assert done.returncode == 1
    assert done.stderr.count("ended with exit code 3: the ranks start again, restart ") == 2
    assert "ended with exit code 3 after 2 restarts, and --max-restarts=2 allows no more" in done.stderr
    # One launch, whose word ends in the agent's process id, which is the parent of its workers.
    [(word, parent)] = {tuple(line.split()) for line in done.stdout.splitlines()}
    assert word.endswith(f".{parent}")


@pytest.mark.parametrize("code", [2, 75])
def test_what_the_user_must_change_is_not_tried_again(tmp_path: Path, code: int) -> None:
    (tmp_path / "code").write_text(str(code))
    done = ran(tmp_path, DIES, "--max-restarts=2")
    assert done.returncode == code
    assert "start again" not in done.stderr


ONE_FAILS = """
import os, sys, time
if os.environ["RANK"] == "1":
    time.sleep(3)
    sys.exit(1)
"""


def test_a_node_that_is_done_does_not_wait_for_one_that_has_failed(tmp_path: Path) -> None:
    """It would for 5 minutes: longer than this test has."""
    (tmp_path / "script.py").write_text(ONE_FAILS)
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "TMPDIR") if name in os.environ}
    env = {**kept, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    argv = [sys.executable, "-c", AGENT, "--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=static"]
    argv += ["--master-addr=127.0.0.1", f"--master-port={port}", "--rdzv-conf=timeout=60", "--max-restarts=0"]
    nodes = [
        subprocess.Popen(
            [*argv, f"--node-rank={node_rank}", "script.py"], cwd=tmp_path, env=env, stderr=subprocess.PIPE
        )
        for node_rank in range(2)
    ]
    try:
        said = [node.communicate(timeout=120)[1].decode() for node in nodes]
        assert [node.returncode for node in nodes] == [0, 1], said
    finally:
        for node in nodes:
            node.kill()
            node.communicate()
