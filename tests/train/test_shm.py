"""Workers of the data loader, and a /dev/shm that is too small for them, as docker's is."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from muster.config import Options
from muster.errors import MusterError
from muster.train import data
from muster.train.data import shm
from muster.train.data.loader import open_batches
from muster.train.world import World
from tests.clusters.requirements import program, require_namespaces

ROOT = Path(__file__).parents[2]
MIB = shm.MIB

# A batch: 32 images of 3 x 64 x 64 floats, 1.5 MiB, and a page of labels.
FAKE = ["--data=fake", "--num-samples=640", "--image-size=64", "--batch-size=32", "--model=squeezenet1_1", "--no-bf16"]
BATCH = 32 * 3 * 64 * 64 * 4 + 4096
NEEDED = int(6 * BATCH * 1.1) + 1


def need(num_workers: int = 2, option: str = "--train-num-workers", num_batches: int = 100) -> shm.Need:
    return shm.Need(option=option, num_workers=num_workers, batch_bytes=10 * MIB, num_batches=num_batches)


def refused(monkeypatch, free: int, needs: list[shm.Need], ranks: int = 1) -> MusterError:
    monkeypatch.setattr(shm, "room", lambda: free)
    with pytest.raises(MusterError) as raised:
        shm.check(needs, ranks)
    assert raised.value.code == 2
    return raised.value


def test_what_is_needed_is_said(monkeypatch):
    error = refused(monkeypatch, 64 * MIB, [need()], ranks=2)
    assert error.seen == "64.0 MiB free, 132.0 MiB needed by the workers of 2 ranks on this host"
    assert error.fix == "docker run --shm-size=2g, or docker run --ipc=host, or --train-num-workers=0"


def test_the_fix_is_large_enough_and_the_fewer_workers_fit(monkeypatch):
    few, many = need(4), need(64, "--valid-num-workers", num_batches=1000)
    error = refused(monkeypatch, 100 * MIB, [few, many])
    assert "--shm-size=3g" in error.fix  # 130 batches, 1430 MiB
    assert error.fix.endswith("or --train-num-workers=3 --valid-num-workers=3")
    shm.check([need(3), need(3)], 1)
    refused(monkeypatch, 100 * MIB, [need(4)])


def test_an_epoch_of_few_batches_needs_no_more_than_those(monkeypatch):
    refused(monkeypatch, 21 * MIB, [need(8, num_batches=2)])
    monkeypatch.setattr(shm, "room", lambda: 23 * MIB)
    shm.check([need(8, num_batches=2)], 1)


def test_a_need_that_just_fits(monkeypatch):
    needed = need().needed(1)
    refused(monkeypatch, needed - 1, [need()])
    monkeypatch.setattr(shm, "room", lambda: needed)
    shm.check([need()], 1)


def test_tensors_take_whole_pages():
    page = os.sysconf("SC_PAGESIZE")
    assert shm.bytes_of(1, page, page + 1) == 4 * page


def test_no_dev_shm(monkeypatch, tmp_path):
    monkeypatch.setattr(shm, "FOLDER", tmp_path / "shm")
    shm.check([], ranks=1)
    with pytest.raises(MusterError) as raised:
        shm.check([need()], ranks=1)
    assert "0.0 MiB free" in raised.value.seen
    assert "--train-num-workers=0" in raised.value.fix


def test_what_the_loader_tells_of_its_batches(make_images, tmp_path):
    root = make_images(tmp_path / "images")
    (root / "bird" / "000.jpg").write_text("these are not pixels")
    options = Options(data=f"imagefolder:{root}", image_size=48, batch_size=4, train_num_workers=2, valid_num_workers=1)
    train, valid = open_batches(data.open_source(options), options, World())
    batch_bytes = shm.bytes_of(4 * 3 * 48 * 48, 4 * 8)
    for batches, word, num_workers in ((train, "train", 2), (valid, "valid", 1)):
        assert batches.shm_need(num_workers) == shm.Need(
            option=f"--{word}-num-workers",
            num_workers=num_workers,
            batch_bytes=batch_bytes,
            num_batches=len(batches),
        )
    alone = Options(data=f"imagefolder:{root}", image_size=48, batch_size=4)
    assert [batches.shm_need(0) for batches in open_batches(data.open_source(alone), alone, World())] == [None, None]


PEAK = """
import os, sys, time
from muster.train import data
from muster.train.data.loader import open_batches
from muster.config import parse
from muster.train.world import World

options = parse(sys.argv[1:])[1]
train, valid = open_batches(data.open_source(options), options, World())
need = train.shm_need(train.num_workers)
batches = iter(train)
held = next(batches)
# One is held, and the workers make all that they may.
wanted = (need.batches() - 1) * need.batch_bytes
used, end = 0, time.monotonic() + 60
while used < wanted and time.monotonic() < end:
    time.sleep(0.01)
    room = os.statvfs("/dev/shm")
    used = (room.f_blocks - room.f_bfree) * room.f_frsize
print(wanted, used, need.needed(1))
train.close()
"""


@pytest.mark.process
def test_the_need_is_what_the_workers_really_take():
    require_namespaces()
    mount = 'mount -t tmpfs -o size=64m tmpfs /dev/shm && exec "$@"'
    command = [program("unshare"), "--mount", "sh", "-c", mount, "sh", sys.executable, "-c", PEAK]
    command += ["single", *FAKE, "--train-num-workers=2"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=150)
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
    assert "2 ranks on this host" in ended[0].err
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
