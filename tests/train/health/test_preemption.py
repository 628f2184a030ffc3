"""A warned run stops after a step on which all ranks agree, and ends with the same bits once it was resumed."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from muster.train.checkpoint import manager as checkpoint
from muster.train.distributed.world import World
from muster.train.trainer import ProgressSync
from tests.train.checkpoint.test_resume import assert_same_bits, common, images  # noqa: F401
from tests.train.comparing import SPLITS, STEPS, TEXT, trained
from tests.train.conftest import environment

# The ranks add up their progress every `every` steps, however long a step takes.
WARN = """
import os, signal
from muster.train import trainer
trainer.SYNC_STEPS, trainer.WAIT_S = {every}, 1e9
step = trainer.Trainer.train_step
def warned(self, batches, sums):
    step(self, batches, sums)
    if self.progress.step == {step} and os.environ.get("RANK", "0") == "{rank}":
        os.kill(os.getpid(), signal.{name})
trainer.Trainer.train_step = warned
"""


@pytest.fixture(scope="module")
def argv_of_three(common):  # noqa: F811
    return ["ddp", *common, "--epochs=3", "--name=run"]


@pytest.fixture(scope="module")
def straight(train, argv_of_three, tmp_path_factory):
    runs = tmp_path_factory.mktemp("straight")
    train([*argv_of_three, f"--runs-dir={runs}"], 2, ok=True)
    return runs / "run"


def steps_of(run):
    return checkpoint.load_newest(run)[1]["progress"]["step"]


@pytest.mark.process
@pytest.mark.parametrize(
    ("step", "stopped", "every"),
    [
        (5, 6, 1),
        *(pytest.param(*case, marks=pytest.mark.full) for case in [(7, 8, 1), (8, 8, 1), (12, 12, 1), (5, 8, 10)]),
    ],
    ids=["in mid-epoch", "read at its end", "heard at its end", "at the last", "between looks: at the epoch's end"],
)
def test_one_ranks_warning_stops_all_and_loses_nothing(train, argv_of_three, straight, tmp_path, step, stopped, every):
    argv = [*argv_of_three, f"--log-every={every}", f"--runs-dir={tmp_path}"]
    ended = train(argv, 2, before=WARN.format(step=step, rank=1, name="SIGUSR1", every=every))
    assert [rank.code for rank in ended] == [75, 75]
    assert steps_of(tmp_path / "run") == stopped
    assert f"after step {stopped}" in ended[0].err
    assert "--resume" in ended[0].err
    assert not ended[1].err
    assert not (tmp_path / "run" / "summary.json").exists()
    if every == 1:  # also of the step at which it stopped
        lines = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
        assert [line["step"] for line in lines if line["kind"] == "steps"] == list(range(1, stopped + 1))
    train([*argv, "--resume"], 2, ok=True)
    assert_same_bits(straight, tmp_path / "run")
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert [record["epoch"] for record in summary["epochs"]] == [1, 2, 3]


@pytest.mark.process
def test_a_warning_at_the_last_step_of_all_leaves_the_validation(train, argv_of_three, tmp_path):
    argv = [*argv_of_three, "--max-steps=6", f"--runs-dir={tmp_path}"]
    ended = train(argv, 2, before=WARN.format(step=6, rank=1, name="SIGTERM", every=1))
    assert [rank.code for rank in ended] == [75, 75]
    assert steps_of(tmp_path / "run") == 6
    train([*argv, "--resume"], 2, ok=True)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert [(record["epoch"], record["step"]) for record in summary["epochs"]] == [(1, 4), (2, 6)]
    again = train([*argv, "--resume"], 2, ok=True)
    assert "complete already (1 epoch, 6 steps)" in again[0].out


@pytest.mark.process
@pytest.mark.parametrize(
    "strategy", [*(pytest.param(each, marks=pytest.mark.full) for each in ("fsdp", "tp")), "pipeline"]
)
def test_a_rank_that_counts_no_loss_is_heard_too(train, tmp_path, strategy):
    world_size, split = SPLITS[strategy]
    options = [*TEXT, *split, *STEPS, "--max-steps=6"]
    whole = trained(train, tmp_path, strategy, world_size, options, "whole")
    for rank in (0, world_size - 1):
        argv = [strategy, *options, f"--name=rank{rank}", f"--runs-dir={tmp_path}"]
        ended = train(argv, world_size, before=WARN.format(step=3, rank=rank, name="SIGUSR2", every=1))
        assert [process.code for process in ended] == [75] * world_size
        assert steps_of(tmp_path / f"rank{rank}") == 4
        train([*argv, "--resume"], world_size, ok=True)
        again = checkpoint.load_newest(tmp_path / f"rank{rank}")[1]
        assert all(tensor.equal(again["model"][name]) for name, tensor in whole["model"].items())


# A rank that already handled the signal would not be ended by it, and would report the loss of the other.
EARLY = """
import os, signal, time
from pathlib import Path
from muster.train import trainer
Path(os.environ["PIDS"], str(os.getpid())).touch()
class Slow(trainer.Log):
    def __init__(self, folder, step):
        time.sleep(0.7)
        super().__init__(folder, step)
        pids = map(int, os.listdir(os.environ["PIDS"]))
        for pid in sorted(pids, key=lambda pid: pid == os.getpid()):  # this one last: it ends by it
            os.kill(pid, signal.SIGTERM)
trainer.Log = Slow
"""


@pytest.mark.process
def test_a_warning_before_all_ranks_listen_ends_all_alike(train, argv_of_three, tmp_path):
    (pids := tmp_path / "pids").mkdir()
    ended = train([*argv_of_three, f"--runs-dir={tmp_path}"], 2, before=EARLY, env={"PIDS": str(pids)})
    assert [rank.code for rank in ended] == [-signal.SIGTERM] * 2  # the agent's answer is 75
    assert not ended[0].err + ended[1].err


def disturbed(folder, argv, disturb):
    """Runs `train ARGV`, calls `disturb` after its first checkpoint; returns its exit code and standard error."""
    argv = [str(Path(sys.executable).with_name("train")), *argv, "--epochs=3000", f"--runs-dir={folder}"]
    # A shell that runs the tests in the background may make them ignore SIGINT.
    hears = {"preexec_fn": lambda: signal.signal(signal.SIGINT, signal.SIG_DFL), "start_new_session": True}
    with (folder / "err").open("wb") as err:
        launch = subprocess.Popen(argv, env=environment(), cwd=folder, stdout=subprocess.DEVNULL, stderr=err, **hears)
        try:
            end = time.monotonic() + 120
            metrics = folder / "run" / "metrics.jsonl"
            # The line comes when the run has noticed that its checkpoint is complete.
            while not metrics.exists() or '"checkpoint"' not in metrics.read_text():
                assert time.monotonic() < end, "no checkpoint came"
                assert launch.poll() is None, (folder / "err").read_text()
                time.sleep(0.05)
            disturb(launch)
            code = launch.wait(60)
        finally:
            launch.kill()
            launch.wait()
    said = (folder / "err").read_text()
    assert "Traceback" not in said
    return code, said


@pytest.mark.process
@pytest.mark.parametrize("name", ["SIGTERM", pytest.param("SIGUSR1", marks=pytest.mark.full)])
def test_the_agent_passes_a_warning_on(argv_of_three, tmp_path, name):
    code, said = disturbed(tmp_path, argv_of_three, lambda agent: agent.send_signal(getattr(signal, name)))
    assert code == 75, said
    assert said.count("stopped by a warning") == 1, said
    step = steps_of(tmp_path / "run")
    assert 0 < step < 12000


@pytest.mark.process
@pytest.mark.once
@pytest.mark.parametrize(("strategy", "words"), [("ddp", "train ddp was"), ("single", "train single was")])
def test_control_c_at_a_terminal_ends_at_once_with_a_line(tmp_path, strategy, words):
    """A terminal sends SIGINT to the launcher and to all ranks."""
    argv = [strategy, *TEXT, *STEPS, "--name=run", *(["--nproc-per-node=2"] if strategy == "ddp" else [])]
    code, said = disturbed(tmp_path, argv, lambda launch: os.killpg(launch.pid, signal.SIGINT))
    assert code == 130, said
    assert words in said.splitlines()[-1], said
    assert "--resume" in said.splitlines()[-1], said
    assert said.count("interrupted") == 1, said
    assert "death signal" not in said


def test_a_warning_before_the_ranks_have_started_asks_for_a_requeue(tmp_path):
    """Nothing is trained yet, so nothing is lost: `train` ends with 75, the code for a requeue."""
    env = environment({"MUSTER_COMMAND": "train ddp"})
    argv = [sys.executable, "-P", "-m", "muster.entrypoint.agent", "--nnodes=2", "--node-rank=1", "--nproc-per-node=1"]
    argv += ["--rdzv-backend=static", "--master-addr=127.0.0.1", "--master-port=9", "--rdzv-conf=timeout=100"]
    process = subprocess.Popen([*argv, "-m", "this"], env=env, cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    try:
        # The agent prints this after it has waited a while: by then it handles the signal.
        assert process.stderr is not None
        assert "waits for" in process.stderr.readline()
        process.send_signal(signal.SIGUSR1)
        assert process.wait(30) == 75
        assert "SIGUSR1" in process.stderr.read()
    finally:
        process.kill()
        process.communicate()


PENDING = """
import os, signal, sys
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
os.kill(os.getpid(), signal.SIGUSR1)
os.execv(sys.argv[1], sys.argv[1:])
"""


@pytest.mark.process
@pytest.mark.parametrize("mode", ["agent", "worker"])
def test_a_warning_of_the_first_moment_is_kept(tmp_path, argv_of_three, mode):
    """The launcher blocks the signal from the start: the agent ends before any step, a rank after its first steps."""
    train = [str(Path(sys.executable).with_name("train"))]
    if mode == "worker":
        train = [sys.executable, "-m", "muster.train"]
    argv = [sys.executable, "-c", PENDING, *train, *argv_of_three, f"--runs-dir={tmp_path}"]
    done = subprocess.run(argv, env=environment(), cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert done.returncode == 75, done.stderr
    assert "SIGUSR1" in done.stderr
    assert "Traceback" not in done.stderr
    assert bool(checkpoint.saved(tmp_path / "run")) == (mode == "worker")


@pytest.mark.parametrize(("step_s", "next_step"), [(0.01, 10), (0.3, 5), (0.9, 4), (30, 3)])
def test_long_steps_are_looked_at_one_by_one(monkeypatch, step_s, next_step):
    monkeypatch.setattr(time, "perf_counter", lambda: 100.0)
    sync = ProgressSync(World(), every=50)
    sync.since = 0, 100.0 - step_s
    sync.start(1, "a signal", False)
    assert sync.finish(2) == [1.0, 0.0]
    assert sync.next == next_step


@pytest.mark.process
def test_a_data_worker_outlives_a_warning_and_not_the_trainers_order(tmp_path):
    script = (
        "import os, signal, sys\nfrom muster.train.health import preemption\npreemption.leave_signals_to_trainer()\n"
    )
    script += "print('ready', flush=True)\n"
    script += "for line in sys.stdin:\n    print('alive', flush=True)\n"
    pipe = subprocess.PIPE
    worker = subprocess.Popen([sys.executable, "-c", script], env=environment(), stdin=pipe, stdout=pipe, text=True)
    try:
        assert worker.stdin
        assert worker.stdout
        assert worker.stdout.readline() == "ready\n"
        for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM):
            os.kill(worker.pid, number)
            worker.stdin.write("\n")
            worker.stdin.flush()
            assert worker.stdout.readline() == "alive\n"
        os.kill(worker.pid, signal.SIGTERM)
        assert worker.wait(60) == 0
    finally:
        worker.kill()
        worker.communicate()
