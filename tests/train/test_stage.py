"""Data that are copied to each host's own disk."""

import fcntl
import json
import os
import threading
import time
from pathlib import Path

import pytest

from tests.clusters.requirements import require_namespaces
from train import data, pack
from train.data import stage, staging
from train.data.index import KEPT
from train.data.stage import digest_of, expanded, list_files, stage_data
from train.data.staging import MARK, Copy
from train.errors import MusterError
from train.options import Options
from train.vitals import STAGING
from train.world import World

IMAGES = ["--image-size=32", "--batch-size=4", "--epochs=1", "--max-steps=2", "--model=squeezenet1_1", "--no-bf16"]


def options(source: str, to: Path | str, **more) -> Options:
    return Options(data=source, stage_to=str(to), image_size=32, batch_size=4, **more)


def staged(asked: Options) -> Path:
    """The copy's folder, or file."""
    return Path(stage_data(asked, World())[0].data.partition(":")[2])


def content(folder: Path) -> dict[str, bytes]:
    """All files below `folder` but the mark."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != MARK
    }


@pytest.fixture
def images(tmp_path, make_images):
    for half in ("train", "val"):
        make_images(tmp_path / "images" / half, per_class=6)
    return tmp_path / "images"


def test_a_folder_of_images_is_copied_and_used_again(images, tmp_path):
    (images / "train" / "README").write_text("not an image")
    asked = options(f"imagefolder:{images}", tmp_path / "a b" / "disk")
    place = staged(asked)
    expected = content(images)
    del expected["train/README"]
    assert content(place) == expected
    assert place.parent == tmp_path / "a b" / "disk"
    one = data.open_shared(asked, World())
    assert (len(one.train), len(one.valid)) == (24 // 2, 12)
    assert one.train.name(0).startswith(str(place))
    assert "12.0" not in one.notes[0]
    assert "24 files" in one.notes[0]
    before = {path: path.stat().st_ino for path in place.rglob("*")}
    assert staged(asked) == place
    assert {path: path.stat().st_ino for path in place.rglob("*")} == before
    assert [path.name for path in place.parent.iterdir() if ".partial" in path.name] == []


@pytest.mark.parametrize("harm", ["a size", "a file gone", "no mark", "a mark of others"])
def test_a_copy_that_is_not_whole_is_made_anew(images, tmp_path, harm):
    asked = options(f"imagefolder:{images}", tmp_path / "disk")
    place = staged(asked)
    image = next(place.rglob("*.jpg"))
    if harm == "a size":
        image.write_bytes(b"short")
    elif harm == "a file gone":
        image.unlink()
    elif harm == "no mark":
        (place / MARK).unlink()
    else:
        (place / MARK).write_text(json.dumps({"digest": "0", "files": 24}))
    leftover = tmp_path / "disk" / f".{place.name}.partial-x"
    leftover.mkdir()
    assert staged(asked) == place
    assert content(place) == content(images)
    assert not leftover.exists()


def test_changed_data_get_a_copy_of_their_own(images, tmp_path):
    asked = options(f"imagefolder:{images}", tmp_path / "disk")
    first = staged(asked)
    path = images / "train" / "cat" / "000.jpg"
    os.utime(path, ns=(1, 1))
    assert staged(asked) != first


def test_shards_keep_their_index(images, tmp_path):
    pack.pack(images, tmp_path / "shards", shard_mb=1, seed=0)
    place = staged(options(f"shards:{tmp_path / 'shards'}", tmp_path / "disk"))
    assert content(place) == content(tmp_path / "shards")
    kept = place / "train" / KEPT
    before = kept.stat().st_mtime_ns
    source = data.open_source(Options(data=f"shards:{place}", image_size=32))
    assert (len(source.train), kept.stat().st_mtime_ns) == (12, before)


def test_tokens_and_cifar_are_copied_as_they_are_read(tmp_path):
    (tmp_path / "text.txt").write_text("a text " * 100)
    place = staged(options(f"tokens:{tmp_path / 'text.txt'}", tmp_path / "disk"))
    assert place.name == "text.txt"
    assert place.read_text() == "a text " * 100
    folder = tmp_path / "texts"
    (folder / "sub").mkdir(parents=True)
    for name, text in {"a.txt": b"one", "sub/b.py": b"two", ".hidden": b"no", "c.bin.gz": b"\0"}.items():
        (folder / name).write_bytes(text)
    assert set(content(staged(options(f"tokens:{folder}", tmp_path / "disk")))) == {"a.txt", "sub/b.py"}
    for name in ("train.bin", "val.bin"):
        (folder / name).write_bytes(b"\1\0" * 9)
    assert set(content(staged(options(f"tokens:{folder}", tmp_path / "disk")))) == {"train.bin", "val.bin"}
    (tmp_path / "cifar" / "cifar-10-batches-py").mkdir(parents=True)
    (tmp_path / "cifar" / "cifar-10-batches-py" / "data_batch_1").write_bytes(b"x")
    place = staged(options(f"cifar10:{tmp_path / 'cifar'}", tmp_path / "disk"))
    assert set(content(place)) == {"cifar-10-batches-py/data_batch_1"}


def test_a_folder_with_variables_is_what_they_are_on_this_host(tmp_path, monkeypatch):
    monkeypatch.setenv("SCRATCH_HERE", str(tmp_path))
    assert expanded("$SCRATCH_HERE/x") == expanded("${SCRATCH_HERE}/x") == tmp_path / "x"
    assert expanded("a; touch b") == Path("a; touch b").absolute()
    for text, words in (("$NOT_SET_HERE/x", "not set"), ("", "empty")):
        with pytest.raises(MusterError, match=words) as raised:
            expanded(text)
        assert f"--stage-to={text}" in raised.value.seen


def test_what_can_not_be_staged_is_refused(images, tmp_path):
    def error(asked):
        with pytest.raises(MusterError) as raised:
            stage_data(asked, World())
        assert raised.value.code == 2
        return str(raised.value)

    assert "no files" in error(options("digits", tmp_path))
    assert "does not exist" in error(options(f"imagefolder:{tmp_path / 'none'}", tmp_path))
    assert "can't be read" in error(options(f"tokens:{tmp_path / 'none'}", tmp_path))
    (tmp_path / "file").touch()
    assert "can't be copied" in error(options(f"imagefolder:{images}", tmp_path / "file"))


def test_no_room_is_told_before_a_byte_is_copied(images, tmp_path, monkeypatch):
    statvfs = os.statvfs

    class Full:
        """A stand-in for a disk with little room."""

        def __init__(self, path):
            self.f_frsize, self.f_bavail = statvfs(path).f_frsize, 3

    monkeypatch.setattr(staging.os, "statvfs", Full)
    with pytest.raises(MusterError, match="no room") as raised:
        stage_data(options(f"imagefolder:{images}", tmp_path / "disk"), World())
    assert raised.value.code == 2
    assert not list((tmp_path / "disk").glob("*/"))


def copy_of(images: Path, disk: Path) -> Copy:
    files = list_files(Options(data=f"imagefolder:{images}"), "imagefolder", images)
    return Copy(images, disk, files, digest_of(images, files))


def test_a_file_that_changes_or_fails_leaves_nothing(images, tmp_path, monkeypatch):
    copy = copy_of(images, tmp_path / "disk")
    (images / "val" / "cat" / "003.jpg").write_bytes(b"another")
    copy.run()
    with pytest.raises(MusterError, match="changed while it was copied") as raised:
        copy.result()
    assert raised.value.seen.endswith("val/cat/003.jpg")
    copy = copy_of(images, tmp_path / "disk")
    (images / "val" / "cat" / "002.jpg").unlink()
    copy.run()
    with pytest.raises(MusterError, match="can't be copied"):
        copy.result()
    assert not [path for path in (tmp_path / "disk").iterdir() if path.is_dir()]


def test_another_job_is_waited_for_and_its_copy_used(images, tmp_path):
    first, second = (copy_of(images, tmp_path / "disk") for _ in range(2))
    (tmp_path / "disk").mkdir()
    with (tmp_path / "disk" / f".muster-{first.digest}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the other job's
        second.start()
        partial = tmp_path / "disk" / f".muster-{first.digest}.partial-x"
        partial.mkdir()
        (partial / "some").write_bytes(b"x" * 77)
        end = time.monotonic() + 30
        while second.state()[0] != 77 and time.monotonic() < end:
            time.sleep(0.01)
        assert second.state() == (77, False, False)
    second.wait(30)
    first.run()
    assert first.result() == second.result()
    assert content(first.target) == content(images)
    assert first.done == second.done == sum(first.sizes)


def test_many_jobs_at_once_make_one_copy(images, tmp_path):
    copies = [copy_of(images, tmp_path / "disk") for _ in range(6)]
    for copy in copies:
        copy.start()
    for copy in copies:
        copy.wait(60)
    assert len({copy.result() for copy in copies}) == 1
    assert content(copies[0].target) == content(images)
    assert len([path for path in (tmp_path / "disk").iterdir() if path.is_dir()]) == 1


def test_a_copy_that_is_stopped_leaves_nothing(images, tmp_path, monkeypatch):
    copy = copy_of(images, tmp_path / "disk")
    held = threading.Event()
    monkeypatch.setattr(copy, "add", lambda num_bytes: held.wait(30))
    copy.start()
    copy.stopping = True
    held.set()
    copy.stop()
    assert copy.state()[1:] == (True, True)
    assert not [path for path in (tmp_path / "disk").iterdir() if path.is_dir()]


def test_a_copy_that_does_not_get_on_ends_the_run(images, tmp_path, monkeypatch):
    monkeypatch.setattr(stage, "EVERY_S", 0.05)
    copy = copy_of(images, tmp_path / "disk")
    held = threading.Event()
    monkeypatch.setattr(copy, "make", lambda: held.wait(60))
    copy.start()
    world = World(timeout_s=1)
    with pytest.raises(MusterError, match="does not get on"):
        stage.watch(world, copy, sum(copy.sizes))
    assert world.vitals.place == STAGING  # it has a watch of its own, of which this is a test
    held.set()
    copy.stop()


# Each rank gets a host of its own: a UTS namespace, with another name.
HOST = """
import ctypes, os, socket
assert ctypes.CDLL(None, use_errno=True).unshare(0x04000000) == 0
socket.sethostname("node" + os.environ["RANK_ON"])
"""


def on_hosts(hosts: list[str], tmp_path: Path) -> dict:
    """Environments of ranks on `hosts`, each of which has a $TMPDIR of its own."""
    places = {}
    for rank, host in enumerate(hosts):
        (tmp_path / f"disk{host}").mkdir(exist_ok=True)
        places[rank] = {"RANK_ON": host, "TMPDIR": str(tmp_path / f"disk{host}")}
    return places


@pytest.mark.process
def test_one_rank_of_each_host_copies(images, tmp_path, train, summary_of):
    require_namespaces()
    rank_env = on_hosts(["0", "0", "1"], tmp_path)
    argv = ["ddp", *IMAGES, f"--data=imagefolder:{images}", "--batch-size=2", f"--runs-dir={tmp_path / 'runs'}"]
    argv += ["--stage-to=$TMPDIR/data", "--timeout-s=60"]
    ended = train(argv, 3, before=HOST, rank_env=rank_env, ok=True)
    copies = [list((tmp_path / f"disk{host}" / "data").glob("muster-*")) for host in "01"]
    assert [len(found) for found in copies] == [1, 1]
    assert content(copies[0][0]) == content(copies[1][0]) == content(images)
    summary = summary_of(next((tmp_path / "runs").iterdir()))
    assert summary["data"] == f"imagefolder:{images}"
    assert summary["hosts"] == ["node0", "node1"]
    assert "the data are read from" in ended[0].out
    assert "MB (100%" in ended[0].err
    before = copies[1][0].stat().st_ino
    train([*argv, "--resume", "--max-steps=3"], 3, before=HOST, rank_env=rank_env, ok=True)
    assert copies[1][0].stat().st_ino == before


@pytest.mark.process
def test_a_host_without_room_or_variable_ends_all(images, tmp_path, train):
    require_namespaces()
    rank_env = on_hosts(["0", "1"], tmp_path)
    argv = ["ddp", *IMAGES, f"--data=imagefolder:{images}", f"--runs-dir={tmp_path / 'runs'}", "--timeout-s=60"]
    (tmp_path / "disk1" / "taken").touch()
    (tmp_path / "disk0" / "taken").mkdir()
    ended = train([*argv, "--stage-to=$TMPDIR/taken"], 2, before=HOST, rank_env=rank_env)
    assert [rank.code for rank in ended] == [2, 2]
    assert "rank 1 of 2 on node1" in ended[0].err
    assert "can't be copied" in ended[0].err
    assert ended[1].err == ""
    rank_env[0]["HERE"] = str(tmp_path)
    ended = train([*argv, "--stage-to=$HERE"], 2, before=HOST, rank_env=rank_env)
    assert [rank.code for rank in ended] == [2, 2]
    assert "is not set" in ended[0].err
    assert "node1" in ended[0].err
