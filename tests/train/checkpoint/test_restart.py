"""Ranks that die are started again by torchrun, and go on with their run by themselves."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from muster.config import Options
from muster.errors import MusterError
from muster.train.checkpoint import manager as checkpoint
from muster.train.checkpoint.run_directory import choose_run, launch_of
from tests.train.checkpoint.test_resume import assert_same_bits, common, images  # noqa: F401
from tests.train.comparing import save
from tests.train.conftest import environment

MUSTER = str(Path(sys.executable).with_name("muster"))

# Rank 1 is killed once at each of `steps`.
DYING = """
import os, signal, sys
from pathlib import Path
from muster.train.__main__ import main
from muster.train.trainer import Trainer
deaths = Path(sys.argv.pop(1))
steps = {steps}
step = Trainer.train_step
def dying(self, batches, sums):
    step(self, batches, sums)
    num_deaths = len(deaths.read_text()) if deaths.exists() else 0
    if os.environ["RANK"] == "1" and num_deaths < len(steps) and self.progress.step == steps[num_deaths]:
        with deaths.open("a") as file:
            file.write("x")
        os.kill(os.getpid(), signal.SIGKILL)
Trainer.train_step = dying
if __name__ == "__main__":
    main()
"""


def options(tmp_path, **more):
    return Options(runs_dir=str(tmp_path / "runs"), **more)


def dying(tmp_path, steps, max_restarts, argv):
    """Runs a training on two ranks, which dies at `steps`, by `muster run`; returns the completed process."""
    script = tmp_path / "dying.py"
    script.write_text(DYING.format(steps=steps))
    command = [MUSTER, "run", "--nproc-per-node=2", f"--max-restarts={max_restarts}", script, tmp_path / "deaths"]
    command += [*argv, f"--runs-dir={tmp_path / 'runs'}", "--blocking-save"]
    return subprocess.run(command, env=environment(), cwd=tmp_path, capture_output=True, text=True, timeout=300)


@pytest.mark.full
@pytest.mark.process
@pytest.mark.timeout(400)
def test_a_killed_rank_costs_the_steps_since_the_last_checkpoint_and_nothing_else(train, common, tmp_path):  # noqa: F811
    argv = ["ddp", *common, "--epochs=3"]
    # At the second step there is no checkpoint yet; at the sixth there is one, of the fourth.
    done = dying(tmp_path, [2, 6], 2, argv)
    assert done.returncode == 0, done.stderr
    assert len((tmp_path / "deaths").read_text()) == 2
    assert "the ranks were started again: from the beginning" in done.stdout
    assert "the ranks were started again: from step-00000004" in done.stdout
    assert "rank 1 on" in done.stderr
    assert "was ended by SIGKILL: the ranks start again, restart 2 of 2" in done.stderr
    [run] = (tmp_path / "runs").iterdir()
    train([*argv, f"--runs-dir={tmp_path / 'straight'}"], 2, ok=True)
    [straight] = (tmp_path / "straight").iterdir()
    assert_same_bits(straight, run)
    epochs = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["epoch"] for line in epochs if line["kind"] == "epoch"] == [1, 2, 3]


def test_a_launch_is_told_by_its_agent_to_its_own_workers_alone():
    told = {"MUSTER_LAUNCH": "a1b2.77"}
    assert launch_of(told, 77) == "a1b2"
    assert launch_of(told, 78) == ""
    assert launch_of({}, 77) == ""


@pytest.mark.parametrize("name", [None, "mine"])
def test_the_same_launch_goes_on_with_its_run(tmp_path, name):
    older = choose_run(options(tmp_path), "ddp").folder
    save(older, {"model": "resnet18"}, step=9, keep=2)
    (older / ".launch").write_text("[" * 100_000)  # damaged: it tells nothing
    other = choose_run(options(tmp_path), "ddp").folder
    (other / ".launch").write_text('{"launch": "word", "resumed_from": [], "latest": ""}')  # damaged as well
    first = choose_run(options(tmp_path, name=name), "ddp", "word")
    assert first.resumed_from is None
    (first.folder / "metrics.jsonl").touch()
    again = choose_run(options(tmp_path, name=name), "ddp", "word")
    assert (again.folder, again.resumed_from) == (first.folder, None)
    save(first.folder, {"model": "resnet18"}, step=1, keep=2)
    again = choose_run(options(tmp_path, name=name), "ddp", "word")
    assert (again.folder, again.resumed_from) == (first.folder, checkpoint.saved(first.folder)[0])
    assert "step-00000001" in again.notes[-1]
    if name is None:
        assert choose_run(options(tmp_path), "ddp", "another").folder.name.endswith("-4")
    else:
        with pytest.raises(MusterError, match="never overwritten"):
            choose_run(options(tmp_path, name=name), "ddp", "another")


def test_a_launch_that_resumed_an_older_checkpoint_resumes_it_again(tmp_path):
    """Until it has saved a checkpoint of its own, which may have the step of one that was there before."""
    folder = tmp_path / "runs" / "old"
    for step in (4, 8):
        folder.mkdir(parents=True, exist_ok=True)
        save(folder, {"model": "resnet18"}, step=step, keep=2)
    asked = options(tmp_path, resume=str(folder / "checkpoints" / "step-00000004"))
    for _ in range(2):
        chosen = choose_run(asked, "ddp", "word")
        assert (chosen.folder, chosen.resumed_from.name) == (folder, "step-00000004")
    save(folder, {"model": "resnet18"}, step=8, keep=2)
    os.utime(checkpoint.saved(folder)[0], ns=(1, 1))
    chosen = choose_run(asked, "ddp", "word")
    assert (chosen.folder, chosen.resumed_from.name) == (folder, "step-00000008")
