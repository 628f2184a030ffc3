"""Copies of the next batch to the device during a step, and the number of data workers."""

import os
import sys
import threading
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from muster.config import Options
from muster.errors import MusterError
from muster.train import data
from muster.train.data import cifar10, loader
from muster.train.data.loader import Reader, choose_workers, count_cores, open_batches, prefetch_to_device
from muster.train.data.source import Samples
from muster.train.distributed.world import World


class Side:
    """Stands for a stream of a GPU."""

    def __init__(self):
        self.events = []

    def record_event(self):
        self.events.append("queued")
        return self


@pytest.fixture
def side(monkeypatch):
    """A stand-in, on the CPU, for a GPU's stream: notes the order of copies queued and batches handed over."""

    def wait_for_copy(item, tensors, done):
        done.events.append("over")
        return item, tensors

    monkeypatch.setattr(torch.cuda, "stream", nullcontext)
    monkeypatch.setattr(loader, "wait_for_copy", wait_for_copy)
    return Side()


def test_each_item_is_queued_before_the_one_before_is_handed_over(side):
    seen = []
    for item, made in prefetch_to_device([1, 2, 3], lambda item: item * 10, side):
        seen.append((item, made))
        side.events.append("computed")
    assert seen == [(1, 10), (2, 20), (3, 30)]
    assert side.events == ["queued", "queued", *["over", "computed", "queued"], *["over", "computed"] * 2]
    assert list(prefetch_to_device([], lambda item: item, side)) == []


@pytest.fixture
def beside(side):
    """Opens batches that go through the stand-in, on the CPU."""
    opened = []

    def open_(asked, world=None):
        train, valid = open_batches(data.open_source(asked), asked, world or World())
        for batches in (train, valid):
            batches.side = Side()
            opened.append(batches)
        return train, valid

    yield open_
    for batches in opened:
        batches.close()


@pytest.mark.parametrize("num_workers", [0, 2])
def test_batches_copied_ahead_are_the_same(tmp_path, make_images, beside, num_workers):
    root = make_images(tmp_path / "images")
    asked = Options(data=f"imagefolder:{root}", image_size=24, batch_size=4, train_num_workers=num_workers)
    for one, other in zip(open_batches(data.open_source(asked), asked, World()), beside(asked), strict=True):
        pairs = list(zip(one, other, strict=True))
        one.close()
        assert pairs
        assert all(torch.equal(a, b) for own, theirs in pairs for a, b in zip(own, theirs, strict=True))


@pytest.mark.parametrize("skip", [True, False])
def test_a_bad_sample_is_told_when_its_batch_is_due(tmp_path, make_images, beside, skip):
    for half in ("train", "val"):
        make_images(tmp_path / half, per_class=8)
    more = {"on_bad_sample": "skip"} if skip else {}
    _, valid = beside(Options(data=f"imagefolder:{tmp_path}", image_size=24, batch_size=4, **more))
    for name in ("000", "001", "002", "003"):  # all of the third batch
        (tmp_path / "val" / "cat" / f"{name}.jpg").write_text("no")
    if skip:
        assert [int((labels >= 0).sum()) for _, labels in valid] == [4, 4, 4, 0]
        assert valid.num_bad == 4
        return
    got = iter(valid)
    assert [len(next(got)[1]) for _ in range(2)] == [4, 4]
    with pytest.raises(MusterError, match="can't be read"):
        next(got)


def test_an_epoch_ends_where_it_should(tmp_path, make_images, beside):
    root = make_images(tmp_path / "images")
    train, _ = beside(Options(data=f"imagefolder:{root}", image_size=24, batch_size=4))
    train.sampler.set_epoch(0, first_sample=4, max_steps=3)
    assert len(list(train)) == 3
    assert train.side.events.count("queued") == 3


def test_a_worker_that_is_killed_while_it_hands_a_batch_over_is_told_as_that(tmp_path, make_images, monkeypatch):
    root = make_images(tmp_path / "images")
    asked = Options(data=f"imagefolder:{root}", image_size=24, batch_size=4, train_num_workers=1)
    train, _ = open_batches(data.open_source(asked), asked, World())
    batches = iter(train)
    next(batches)
    workers: Any = train.loader and train.loader._iterator

    def get(timeout):
        # A worker's sockets close before the system reports its end.
        threading.Timer(0.2, workers._workers[0].kill).start()
        raise ConnectionResetError

    monkeypatch.setattr(workers._data_queue, "get", get)
    try:
        with pytest.raises(RuntimeError, match="killed by signal"):  # the words that memory.explain knows
            next(batches)
    finally:
        train.close()


def test_workers_are_as_many_as_the_cores_give(tmp_path, make_images):
    folder = f"imagefolder:{make_images(tmp_path / 'images')}"
    gpu, cpu = torch.device("cuda", 0), torch.device("cpu")
    source = data.open_source(Options(data=folder, image_size=24))
    assert [choose_workers(source, gpu, cores) for cores in (1, 2, 8, 17, 100)] == [1, 1, 7, 16, 16]
    assert choose_workers(source, cpu, 100) == 0
    for name in ("digits", "synthetic"):
        assert choose_workers(data.open_source(Options(data=name)), gpu, 8) == 0
    fake = data.open_source(Options(data="fake", num_samples=4))
    assert choose_workers(fake, gpu, 8) == 7
    pictures = cifar10.Augmented(torch.zeros(1, 3, 32, 32, dtype=torch.uint8), torch.tensor([0]))
    assert choose_workers(replace(source, train=pictures), gpu, 8) == 7


def test_cores_are_shared_by_ranks_that_are_bound_to_the_same(monkeypatch):
    places = [("a", {0, 1, 2, 3}), ("a", {0, 1, 2, 3}), ("a", {4, 5}), ("b", {0, 1, 2, 3})]

    def ask(place, told):
        """The cores of the rank at `place` where all ranks have `told` theirs, and the value that it sends them."""
        said = []
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: place[1])
        world = SimpleNamespace(host=place[0], gather=lambda value: said.append(value) or told or [value])
        return count_cores(world), said[0]

    told = [ask(place, [])[1] for place in places]
    assert [ask(place, told)[0] for place in places] == [2, 2, 2, 4]
    assert [ask(place, [])[0] for place in places] == [4, 4, 2, 4]


@pytest.fixture
def on_gpu(monkeypatch):
    """Chooses the number of workers as if training were on a GPU."""
    monkeypatch.setattr(loader, "choose_workers", lambda source, device, cores: choose_workers(source, GPU, cores))


GPU = torch.device("cuda", 0)


@pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")
def test_few_workers_where_dev_shm_is_small_and_a_note(tmp_path, make_images, on_gpu, monkeypatch):
    root = make_images(tmp_path / "images", per_class=80)
    asked = Options(data=f"imagefolder:{root}", image_size=32, batch_size=4)
    need = loader.shm_bytes(4 * 3 * 32 * 32, 4 * 8)
    monkeypatch.setattr(
        loader, "free_shm", lambda: int(need * 1.1 * (2 * 3 + loader.IN_USE)) + 1
    )  # stands for a small /dev/shm
    train, valid = open_batches(data.open_source(asked), asked, World(), cores=8)
    assert (train.num_workers, valid.num_workers) == (3, 3)
    assert "3 instead of 7 workers a rank load training data" in train.notes[0]
    assert "validation" in valid.notes[0]
    explicit = Options(data=f"imagefolder:{root}", image_size=32, batch_size=4, train_num_workers=7)
    with pytest.raises(MusterError, match="too small"):
        open_batches(data.open_source(explicit), explicit, World(), cores=8)
    monkeypatch.setattr(loader, "free_shm", lambda: sys.maxsize)
    train, valid = open_batches(data.open_source(asked), asked, World(), cores=8)
    assert (train.num_workers, train.notes, valid.notes) == (7, [], [])


def test_workers_use_one_thread_and_have_seeds_of_their_own(tmp_path, make_images):
    class Telling(Samples):
        def __len__(self):
            return 8

        def read(self, index):
            seen = torch.utils.data.get_worker_info()
            return torch.tensor([torch.get_num_threads(), seen.id]), seen.seed % 2**31

    asked = Options(data=f"imagefolder:{make_images(tmp_path / 'images')}", image_size=24, train_num_workers=2)
    seeds = set()
    for rank in (0, 1):
        source = data.open_source(asked)
        batches = loader.Batches(source, [[loader.Draw(0, 0)], [loader.Draw(1, 0)]], asked, World(rank=rank))
        batches.reader = Reader(Telling(), seed=0, replace=False)
        batches.make_loader(2)
        for batch in batches.loader:
            assert batch.inputs[0, 0] == 1
            seeds.add(int(batch.labels[0]))
        batches.close()
    assert len(seeds) == 4


@pytest.mark.process
def test_the_choice_is_in_the_summary(tmp_path, train, make_images, summary_of):
    root = make_images(tmp_path / "images")
    common = [f"--data=imagefolder:{root}", "--image-size=32", "--batch-size=4", "--epochs=1", "--max-steps=2"]
    common += ["--model=squeezenet1_1", "--no-bf16", f"--runs-dir={tmp_path}"]
    [plain] = train(["single", *common, "--name=plain"], ok=True)
    [given] = train(["single", *common, "--train-num-workers=1", "--name=given"], ok=True)
    for name, chosen in {"plain": [0, 0], "given": [1, 0]}.items():
        options = summary_of(tmp_path / name)["options"]
        assert [options[f"{half}_num_workers"] for half in ("train", "valid")] == chosen
    assert "loading" not in plain.out
    assert "1 workers a rank for training, 0 for validation" in given.out


def test_data_that_are_made_on_the_device_have_no_workers():
    """Whatever the user asks for: the header and the summary once showed the number asked for."""
    asked = Options(data="synthetic", image_size=8, num_samples=8, batch_size=4, train_num_workers=2)
    train, valid = open_batches(data.open_source(asked), asked, World())
    assert (train.num_workers, valid.num_workers) == (0, 0)
