"""Checkpoints in the background: they hold the state at the request, and count only once they are complete."""

import errno
import re
import subprocess
import sys
import threading

import pytest
import torch
from torch.distributed.checkpoint.staging import DefaultStager

from muster import interruption
from muster.errors import MusterError
from muster.train.checkpoint import manager as checkpoint, storage
from muster.train.checkpoint.manager import CheckpointManager, TrainState, first_mismatch, open_stager
from muster.train.distributed.world import World
from tests.train.comparing import LIMIT, STEPS, TEXT, apart

DEADLINE_S = 60


@pytest.fixture
def manager(tmp_path):
    manager = CheckpointManager(tmp_path, World(), keep=2, in_background=True)
    yield manager
    manager.close()


@pytest.fixture
def held(monkeypatch):
    """Blocks writing to the disk until this event is set."""
    event, fsync = threading.Event(), storage.os.fsync

    def wait(descriptor):
        assert event.wait(DEADLINE_S)
        fsync(descriptor)

    monkeypatch.setattr(storage.os, "fsync", wait)
    yield event
    event.set()


def test_training_goes_on_while_the_moment_is_kept(manager, held, tmp_path):
    weights = torch.zeros(1000)
    manager.save({"model": {"w": weights}, "progress": {"step": 10}}, 10)
    weights.add_(1)
    assert checkpoint.saved(tmp_path) == []
    assert not (checkpoint.folder_of(tmp_path) / "latest").exists()
    held.set()
    manager.wait()
    [path] = checkpoint.saved(tmp_path)
    assert (checkpoint.folder_of(tmp_path) / "latest").read_text() == f"{path.name}\n"
    assert torch.equal(checkpoint.load(path)["model"]["w"], torch.zeros(1000))


def test_errors_name_resume_as_soon_as_one_is_complete(manager, monkeypatch):
    """The trainer may hang before it notices that one is complete."""
    monkeypatch.setattr(interruption.current, "advice", "the same command starts it again")
    manager.save({"model": {"w": torch.zeros(10)}, "progress": {"step": 10}}, 10)
    manager.wait()
    assert "--resume" in interruption.current.advice


def test_each_is_copied_into_the_memory_of_the_one_before(manager, monkeypatch, tmp_path):
    staged, stage = [], DefaultStager.stage
    monkeypatch.setattr(DefaultStager, "stage", lambda self, state: staged.append(stage(self, state)) or staged[-1])
    weights = torch.zeros(1000)
    for step in (10, 20):
        manager.save({"model": {"w": weights}}, step)
        weights.add_(1)
    manager.wait()
    first, second = (copied["model/w"] for copied in staged)
    assert first.data_ptr() == second.data_ptr() != weights.data_ptr()
    newer, older = (checkpoint.load(path)["model"]["w"] for path in checkpoint.saved(tmp_path))
    assert (newer.unique().item(), older.unique().item()) == (1, 0)


def test_the_memory_of_copies_is_pinned_where_there_is_a_gpu(monkeypatch):
    asked = []
    monkeypatch.setattr(checkpoint, "DefaultStager", asked.append)
    for kind in ("cuda", "cpu"):
        open_stager(World(device=torch.device(kind)))
    assert [each.use_pinned_memory for each in asked] == [True, False]


def test_a_training_that_waits_keeps_no_copy(monkeypatch, tmp_path):
    copied = []
    monkeypatch.setattr(DefaultStager, "stage", lambda self, state: copied.append(state) or state)
    manager = CheckpointManager(tmp_path, World(), keep=2, in_background=False)
    manager.save({"model": {"w": torch.ones(10)}}, 10)
    assert copied == []
    assert torch.equal(checkpoint.load(checkpoint.saved(tmp_path)[0])["model"]["w"], torch.ones(10))


RECORDED = """
import pickle, sys
from pathlib import Path
import torch, torch.distributed as dist
from torch._C import _distributed_c10d
from muster.train.checkpoint.manager import CheckpointManager
from muster.train.distributed.backends import open_group
from muster.train.distributed.world import World

world = World(backend="gloo", store=dist.HashStore())
open_group(world)
manager = CheckpointManager(Path(sys.argv[1]), world, keep=2, in_background=True)
recorded = {entry["process_group"][0] for entry in pickle.loads(_distributed_c10d._dump_fr_trace())["entries"]}
assert manager.group.group_name in recorded, recorded
"""


def test_the_flight_recorder_knows_the_group_before_another_thread_uses_it(tmp_path):
    """In torch 2.10 two threads that register groups with it at once may hang: nothing locks its list of groups.

    In a process of its own, as the first group of a process settles what it records.
    """
    argv = [sys.executable, "-c", RECORDED, str(tmp_path)]
    ended = subprocess.run(argv, capture_output=True, text=True, timeout=240, check=False)
    assert ended.returncode == 0, ended.stderr


def test_a_second_one_waits_for_the_first(manager, held, tmp_path):
    manager.save({"model": {"w": torch.zeros(10)}}, 10)
    second = threading.Thread(target=manager.save, args=({"model": {"w": torch.ones(10)}}, 20))
    second.start()
    second.join(0.3)
    assert second.is_alive()
    held.set()
    second.join(DEADLINE_S)
    manager.wait()
    assert [path.name for path in checkpoint.saved(tmp_path)] == ["step-00000020", "step-00000010"]


def test_a_disk_that_is_full_is_told_at_the_next_one(manager, monkeypatch, tmp_path):
    manager.save({"model": {"w": torch.zeros(10)}}, 10)
    manager.wait()

    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(storage.os, "fsync", full)
    manager.save({"model": {"w": torch.ones(10)}}, 20)
    with pytest.raises(MusterError, match="No space left") as raised:
        manager.save({"model": {"w": torch.ones(10)}}, 30)
    assert "the last good one is step-00000010" in raised.value.seen
    assert raised.value.code == 1
    assert [path.name for path in checkpoint.folder_of(tmp_path).iterdir() if path.is_dir()] == ["step-00000010"]


def test_an_error_that_is_no_full_disk_does_not_hide_why_the_run_ends(monkeypatch, tmp_path):
    manager = CheckpointManager(tmp_path, World(), keep=2, in_background=True)

    def out_of_memory(descriptor):
        raise MemoryError("made for the test")

    monkeypatch.setattr(storage.os, "fsync", out_of_memory)
    manager.save({"model": {"w": torch.zeros(10)}}, 10)
    manager.close()
    manager.save({"model": {"w": torch.zeros(10)}}, 20)
    with pytest.raises(RuntimeError, match="rank 0 could not write the checkpoint: MemoryError") as raised:
        manager.wait()
    assert "made for the test" in str(raised.value.__cause__)


@pytest.mark.parametrize("make", [lambda p: torch.optim.SGD(p, momentum=0.9), torch.optim.AdamW, torch.optim.SGD])
def test_moments_come_back_and_hyperparameters_stay_the_users(manager, tmp_path, make):
    def training():
        model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
        return model, make(model.parameters())

    def step(model, optimizer):
        model(torch.ones(2, 3) * torch.tensor([[1.0], [2.0]])).pow(2).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    one, other = training(), training()
    step(*one)
    manager.save(TrainState(model=one[0], optimizer=one[1]).state(), 1)
    manager.wait()
    [path] = checkpoint.saved(tmp_path)
    index = storage.read_index(path)
    assert first_mismatch(index, other[0]) is None
    other[1].param_groups[0]["lr"] = one[1].param_groups[0]["lr"] = 0.125
    TrainState(model=other[0], optimizer=other[1]).fill(path, index, 0, None)
    step(*one)
    step(*other)
    assert other[1].param_groups[0]["lr"] == 0.125
    assert all(
        torch.equal(a, b) for a, b in zip(one[0].state_dict().values(), other[0].state_dict().values(), strict=True)
    )


def test_weights_of_another_shape_are_named(manager, tmp_path):
    manager.save({"model": torch.nn.Linear(3, 4).state_dict()}, 1)
    manager.wait()
    index = storage.read_index(checkpoint.saved(tmp_path)[0])
    assert first_mismatch(index, torch.nn.Linear(3, 5)) == "bias is [4] in it, [5] here"
    assert first_mismatch(index, torch.nn.Linear(3, 4, bias=False)) == "bias is [4] in it, missing here"


# Each rank prints how many bytes of a checkpoint it copies before it goes on.
WEIGH = """
import os
out = os.fdopen(os.dup(1), "w", buffering=1)
from torch.distributed.checkpoint.staging import DefaultStager
stage = DefaultStager.stage
def weighed(self, tensors):
    print("copied", sum(tensor.nbytes for tensor in tensors.values()), file=out)
    return stage(self, tensors)
DefaultStager.stage = weighed
"""


@pytest.mark.process
@pytest.mark.parametrize("more", [[], ["--zero1"]], ids=["replicas", "moments dealt out"])
def test_replicas_share_the_copy_among_them(train, tmp_path, more):
    common = [*TEXT, *STEPS, "--max-steps=2", f"--runs-dir={tmp_path}"]
    [alone] = train(["single", *common, "--accumulate=2", "--name=one"], ok=True, before=WEIGH)
    ranks = train(["ddp", *common, *more, "--name=two"], 2, ok=True, before=WEIGH)
    whole, *shares = (int(re.search(r"^copied (\d+)$", ended.out, re.MULTILINE)[1]) for ended in (alone, *ranks))
    assert sum(shares) == whole
    assert max(shares) < 0.6 * whole
    one, two = (checkpoint.load_newest(tmp_path / name)[1] for name in ("one", "two"))
    assert apart(one, two)[0] < LIMIT
