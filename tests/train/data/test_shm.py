"""Workers of the data loader, and a /dev/shm that is too small for them, as docker's is."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from muster.config import Options
from muster.errors import MusterError
from muster.train import data
from muster.train.data import loader
from muster.train.data.loader import open_batches
from muster.train.distributed.world import World
from tests.clusters.requirements import program, require_namespaces

ROOT = Path(__file__).parents[3]

# A batch: 32 images of 3 x 64 x 64 floats, 1.5 MiB, and a page of labels.
FAKE = ["--data=fake", "--num-samples=640", "--image-size=64", "--batch-size=32", "--model=squeezenet1_1", "--no-bf16"]
BATCH = 32 * 3 * 64 * 64 * 4 + 4096
NEEDED = int(6 * BATCH * 1.1) + 1


def test_tensors_take_whole_pages():
    page = os.sysconf("SC_PAGESIZE")
    assert loader.shm_bytes(1, page, page + 1) == 4 * page


def test_no_dev_shm(monkeypatch, tmp_path):
    monkeypatch.setattr(loader, "SHM", tmp_path / "shm")
    assert loader.free_shm() == 0


@pytest.fixture
def asked(make_images, tmp_path):
    """Options for images of which one can't be read, and the bytes of a batch."""
    root = make_images(tmp_path / "images")
    (root / "bird" / "000.jpg").write_text("these are not pixels")
    return Options(data=f"imagefolder:{root}", image_size=48, batch_size=4), loader.shm_bytes(4 * 3 * 48 * 48, 4 * 8)


def opened(options, **workers):
    options = replace(options, **workers)
    return open_batches(data.open_source(options), options, World())


def test_what_the_loader_knows_of_its_batches(asked):
    options, batch_bytes = asked
    assert [batches.batch_bytes() for batches in opened(options)] == [batch_bytes] * 2


@pytest.mark.parametrize("part", ["train", "valid"])
def test_more_workers_than_fit_are_refused_with_what_fits(monkeypatch, asked, part):
    options, batch_bytes = asked
    monkeypatch.setattr(loader, "free_shm", lambda: loader.shm_needed(3, batch_bytes, 1))
    opened(options, train_num_workers=3, valid_num_workers=3)
    with pytest.raises(MusterError) as raised:
        opened(options, **{f"{part}_num_workers": 4})
    assert raised.value.code == 2
    assert "needed by the workers of 1 ranks" in raised.value.seen
    assert raised.value.fix == f"docker run --shm-size=2g, or docker run --ipc=host, or --{part}-num-workers=3"


PEAK = """
import os, sys, time
from muster.train import data
from muster.train.__main__ import parse
from muster.train.data import loader
from muster.train.data.loader import open_batches
from muster.train.distributed.world import World

options = parse(sys.argv[1:])[1]
train, valid = open_batches(data.open_source(options), options, World())
batch_bytes = train.batch_bytes()
batches = iter(train)
held = next(batches)
# One is held, and the workers make all that they may.
wanted = (train.num_workers * loader.AHEAD + loader.IN_USE - 1) * batch_bytes
used, end = 0, time.monotonic() + 60
while used < wanted and time.monotonic() < end:
    time.sleep(0.01)
    room = os.statvfs("/dev/shm")
    used = (room.f_blocks - room.f_bfree) * room.f_frsize
print(wanted, used, loader.shm_needed(train.num_workers, batch_bytes, 1))
train.close()
"""


@pytest.mark.process
def test_the_need_is_what_the_workers_really_take():
    require_namespaces()
    mount = 'mount -t tmpfs -o size=64m tmpfs /dev/shm && exec "$@"'
    command = [program("unshare"), "--mount", "sh", "-c", mount, "sh", sys.executable, "-c", PEAK]
    command += ["single", *FAKE, "--train-num-workers=2"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    wanted, used, needed = map(int, done.stdout.split())
    # Beside the batches: a page for each semaphore of the queues.
    assert wanted <= used <= wanted + 64 * 4096
    assert used < needed


@pytest.mark.process
def test_two_ranks_are_refused_before_a_worker_starts(train, tmp_path):
    require_namespaces()
    argv = ["ddp", *FAKE, "--train-num-workers=2", f"--runs-dir={tmp_path}"]
    ended = train(argv, 2, shm="size=16m", deadline_s=120)
    assert [rank.code for rank in ended] == [2, 2]
    assert ended[1].err == ""
    assert [line.split(":")[0].strip() for line in ended[0].err.splitlines()] == ["error", "seen", "fix"]
    assert "16.0 MiB free" in ended[0].err
    assert "2 ranks here" in ended[0].err
    assert "--shm-size=2g" in ended[0].err
    assert not list(tmp_path.iterdir())


@pytest.mark.process
@pytest.mark.parametrize(
    ("options", "code"),
    # A tmpfs has whole pages; one of size 0 has no limit.
    [(f"size={NEEDED + 8192}", 0), (f"size={NEEDED - 8192}", 2), ("size=0", 0), ("ro", 2)],
)
def test_room_enough_is_enough(train, tmp_path, options, code):
    require_namespaces()
    argv = ["single", *FAKE, "--train-num-workers=2", "--epochs=1", f"--runs-dir={tmp_path}"]
    [ended] = train(argv, shm=options, deadline_s=120)
    assert ended.code == code, ended.err
    assert ("0.0 MiB free" in ended.err) == (options == "ro")
