"""Checkpoints within an epoch: they do not change the training, and a run resumed from them ends with the same bits."""

import json
import time

import pytest

from muster.config import Options
from muster.train.checkpoint import manager as checkpoint
from muster.train.distributed.world import World
from muster.train.trainer import Trainer
from tests.train.checkpoint.test_resume import assert_same_bits, common, images, straight  # noqa: F401
from tests.train.comparing import SPLITS, STEPS, TEXT, trained

# The ranks add up their progress after each step, and a checkpoint is due at each of them.
AT_EACH_LOOK = """
from muster.train import trainer
trainer.SYNC_STEPS = 1
trainer.Trainer.is_save_due = lambda self: self.world.main and self.options.save_every > 0
"""


def test_the_next_one_is_due_after_so_many_minutes_by_one_ranks_clock(monkeypatch):
    monkeypatch.setattr(time, "monotonic", lambda: 160.0)
    trainer = Trainer("ddp", Options(save_every=1), World(world_size=2))
    for since, is_due in ((100.1, False), (100.0, True), (160.0, False)):
        trainer.last_save = since
        assert trainer.is_save_due() == is_due
    of_rank_1 = Trainer("ddp", Options(save_every=1), World(rank=1, world_size=2))
    for other in (of_rank_1, Trainer("single", Options(save_every=0), World())):
        other.last_save = 0.0
        assert not other.is_save_due()


def middles(run):
    """The steps of the checkpoints that were written within epochs."""
    states = [checkpoint.load(path) for path in sorted(run.glob("checkpoints/step-*"))]
    return [state["progress"]["step"] for state in states if state["progress"]["sample"]]


@pytest.mark.process
def test_checkpoints_within_an_epoch_change_nothing_and_can_be_resumed(train, common, straight, tmp_path):  # noqa: F811
    """Batch normalisation too: each rank goes on with its own statistics, whatever the checkpoint has."""
    argv = ["ddp", *common, "--epochs=4"]
    train([*argv, "--name=run", f"--runs-dir={tmp_path}"], 2, before=AT_EACH_LOOK, ok=True)
    run = tmp_path / "run"
    assert_same_bits(straight, run)
    found = middles(run)
    assert len(found) > 1, list(run.glob("checkpoints/*"))
    assert json.loads((run / "summary.json").read_text())["num_timed_steps"] > 0
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    written = [line["step"] for line in lines if line["kind"] == "checkpoint"]
    assert len(written) == len(set(written)), written  # at the end of an epoch there is one anyway
    for step in (found[0], found[-1]):
        path = run / "checkpoints" / f"step-{step:08}"
        train([*argv, f"--resume={path}", f"--name=from-{step}", f"--runs-dir={tmp_path}"], 2, ok=True)
        assert_same_bits(straight, tmp_path / f"from-{step}")


@pytest.mark.full
@pytest.mark.process
@pytest.mark.once
@pytest.mark.parametrize("strategy", [*SPLITS, "single"])
def test_under_every_strategy(train, tmp_path, strategy):
    world_size, split = SPLITS.get(strategy, (1, []))
    options = [*TEXT, *split, *STEPS, "--max-steps=6", "--keep-checkpoints=9"]
    trained(train, tmp_path, strategy, world_size, options, "straight")
    argv = [strategy, *options, f"--runs-dir={tmp_path}"]
    train([*argv, "--name=run"], world_size, before=AT_EACH_LOOK, ok=True)
    assert_same_bits(tmp_path / "straight", tmp_path / "run")
    path = tmp_path / "run" / "checkpoints" / f"step-{middles(tmp_path / 'run')[0]:08}"
    train([*argv, "--name=again", f"--resume={path}"], world_size, ok=True)
    assert_same_bits(tmp_path / "straight", tmp_path / "again")


@pytest.mark.process
def test_none_is_written_where_none_is_wanted(train, tmp_path):
    options = [*TEXT, *STEPS, "--max-steps=6", "--keep-checkpoints=9", "--save-every=0"]
    train(["ddp", *options, "--name=run", f"--runs-dir={tmp_path}"], 2, before=AT_EACH_LOOK, ok=True)
    assert len(list((tmp_path / "run" / "checkpoints").glob("step-*"))) == 1
