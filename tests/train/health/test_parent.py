"""Ranks whose agent is gone end, and their data workers with them."""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress

import pytest

from muster.train.checkpoint import manager as checkpoint
from tests.train.conftest import bare, environment, free_port
from tests.train.health.test_heartbeat import DEADLINE_S, FAST

ALONE = """
import os
exec(os.environ["BEFORE"])
from muster.train.__main__ import main
main()
"""

ORPHAN = """
import os, subprocess, sys
os.environ["MUSTER_LAUNCH"] = f".{os.getpid()}"
ranks = [
    subprocess.Popen([sys.executable, *sys.argv[1:]], env={**os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank)})
    for rank in range(2)
]
print(*[rank.pid for rank in ranks], flush=True)
for rank in ranks:
    rank.wait()
"""


def is_running(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


EARLY = """
import os, time
import muster.train.__main__ as main
read = main.read
def reading(argv):
    parent = os.getppid()
    open(os.path.join(os.environ["READING"], os.environ["RANK"]), "w").close()
    while os.getppid() == parent:
        time.sleep(0.05)
    return read(argv)
main.read = reading
"""

# The ranks wait for the agent's store, which is not there.
CONNECTING = """
import os
import muster.train.process as process
connect = process.connect
def connecting(world, **more):
    open(os.path.join(os.environ["READING"], os.environ["RANK"]), "w").close()
    return connect(world, **more)
process.connect = connecting
"""

STARTING = """
import os, time
open(os.path.join(os.environ["READING"], os.environ["RANK"]), "w").close()
parent = os.getppid()
while os.getppid() == parent:
    time.sleep(0.05)
"""

BEFORE = {"training": FAST, "loading": EARLY + FAST, "connecting": CONNECTING, "starting": STARTING}


@pytest.mark.once
@pytest.mark.process
@pytest.mark.parametrize(
    "when",
    ["training", *(pytest.param(each, marks=pytest.mark.full) for each in ("connecting", "loading", "starting"))],
)
def test_ranks_end_when_their_agent_does(small, tmp_path, when):
    (reading := tmp_path / "reading").mkdir()
    env = environment({"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "BEFORE": BEFORE[when]})
    env |= {"READING": str(reading), "TORCHELASTIC_USE_AGENT_STORE": str(when != "training")}
    env["MASTER_PORT"] = str(free_port())
    argv = ["ddp", *small, "--model=squeezenet1_1", "--image-size=32", "--epochs=1000", "--train-num-workers=1"]
    argv += ["--name=run", f"--runs-dir={tmp_path / 'runs'}", "--data=fake", "--num-samples=200"]
    with (tmp_path / "err").open("wb") as err:
        command = [sys.executable, "-c", ORPHAN, "-c", ALONE, *argv]
        # In a process group of its own, so that its remaining processes can be killed.
        agent = subprocess.Popen(
            command, env=env, stdout=subprocess.PIPE, stderr=err, start_new_session=True, text=True, cwd=tmp_path
        )
    try:
        assert agent.stdout
        pids = [int(word) for word in agent.stdout.readline().split()]
        end = time.monotonic() + DEADLINE_S
        while (
            not checkpoint.saved(tmp_path / "runs" / "run") if when == "training" else len(list(reading.iterdir())) < 2
        ):
            assert time.monotonic() < end, (tmp_path / "err").read_text()
            time.sleep(0.05)
        agent.kill()
        agent.wait()
        while any(map(is_running, pids)) or os.path.exists(f"/proc/{agent.pid}"):
            assert time.monotonic() < end + 60, "ranks outlive their agent"
            time.sleep(0.05)
        while members(agent.pid):
            assert time.monotonic() < end + 60, f"data workers outlive their trainer: {members(agent.pid)}"
            time.sleep(0.05)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(agent.pid, signal.SIGKILL)
        agent.communicate()
    said = (tmp_path / "err").read_text()
    assert "the process that started it" in said
    assert "Traceback" not in said


ORPHANED = """
import os
from muster.train.health import faults
from muster.train.trainer import Trainer
faults.GRACE_S = 1.5
step = Trainer.train_step
def orphaned(self, batches, sums):
    if self.progress.step == 2 and os.environ["RANK"] == "1":
        os.getppid = lambda: 1
    step(self, batches, sums)
Trainer.train_step = orphaned
"""


@pytest.mark.process
def test_an_orphan_says_so_and_nothing_of_what_follows(train, small, tmp_path):
    ended = train(["ddp", *small, f"--runs-dir={tmp_path}", "--epochs=1000"], 2, before=FAST + ORPHANED)
    assert [rank.code for rank in ended] == [1, 1]
    [line] = [line for line in bare(ended) if line.startswith("error: ")]
    assert "the process that started it" in line


WORKER = """
import multiprocessing, os, sys
from muster.train.data import loader
def work(end, ready):
    loader.begin_worker(0)
    end.send_bytes(b"begun")
    ready.close()
    try:
        end.recv_bytes()  # of a rank that is gone, or has closed it
    except EOFError:
        sys.excepthook(*sys.exc_info())
    open(sys.argv[1], "w").close()
context = multiprocessing.get_context("fork")
end, other = context.Pipe()
worker = context.Process(target=work, args=(end, other))
worker.start()
end.close()
other.recv_bytes()
other.close()
if sys.argv[2] == "lives":
    worker.join()
os._exit(0)
"""


@pytest.mark.parametrize("rank", ["lives", "is gone"])
def test_a_worker_is_silent_of_a_broken_connection(tmp_path, rank):
    said, ended = tmp_path / "said", tmp_path / "ended"
    with said.open("wb") as err:
        subprocess.run(
            [sys.executable, "-c", WORKER, ended, rank],
            env=environment({}),
            stderr=err,
            timeout=DEADLINE_S,
            check=True,
            start_new_session=True,
        )
    end = time.monotonic() + DEADLINE_S
    while not ended.exists():
        assert time.monotonic() < end, said.read_text()
        time.sleep(0.05)
    assert not said.read_text()


def members(group):
    """The processes of a process group that have not ended."""
    found = []
    for name in filter(str.isdecimal, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/stat") as file:
                state, _, number = file.read().rpartition(")")[2].split()[:3]
        except OSError:
            continue
        if int(number) == group and state != "Z":
            found.append(int(name))
    return found


UNREAD = """
import os, time
from muster.train.health.parent import Guard
here, there = os.pipe()
if os.fork():
    os.read(here, 1)
    os._exit(0)
Guard({"WORLD_SIZE": "2"})
err, other = os.pipe()
os.dup2(other, 2)
os.close(err)
os.write(there, b"!")
time.sleep(600)
"""


def test_a_rank_whose_words_nobody_reads_ends_too():
    """Until then it holds its standard output open, for whose end `subprocess.run` waits."""
    subprocess.run([sys.executable, "-c", UNREAD], env=environment({}), stdout=subprocess.PIPE, timeout=240, check=True)
