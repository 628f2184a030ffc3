"""Tar shards: those of `train pack`, those of webdataset, damaged ones; and the index beside them."""

import io
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from muster.config import Options
from muster.errors import MusterError
from muster.train import data
from muster.train.data import pack, shards
from muster.train.data.loader import open_batches
from muster.train.data.shards import INDEX, SAMPLE, read_headers
from muster.train.distributed.world import World

ROOT = Path(__file__).parents[3]

SLOW_PACK = """
import time
from muster.train.data import pack
add = pack.tarfile.TarFile.addfile
pack.tarfile.TarFile.addfile = lambda *words: (time.sleep(0.05), add(*words))
pack.main()
"""


def options(root: Path, **more) -> Options:
    return Options(data=f"shards:{root}", image_size=24, batch_size=4, **more)


@pytest.fixture
def packed(tmp_path, make_images):
    """A folder with train/ and val/, and its shards."""
    for half, count in (("train", 20), ("val", 5)):
        make_images(tmp_path / "images" / half, per_class=count)
    pack.pack(tmp_path / "images", tmp_path / "shards", shard_mb=1, seed=3)
    return tmp_path / "images", tmp_path / "shards"


def contents(images) -> list[tuple[bytes, int]]:
    """Bytes and class of each image."""
    return sorted((images.content(number), int(images.labels[number])) for number in range(len(images)))


def test_a_packed_folder_has_the_same_images(packed):
    folder, out = packed
    one, other = data.open_source(Options(data=f"imagefolder:{folder}")), data.open_source(options(out))
    assert contents(one.train) == contents(other.train)
    assert contents(one.valid) == contents(other.valid)
    assert (other.num_classes, len(other.train), len(other.valid)) == (2, 40, 10)
    labels = other.train.labels.tolist()
    assert labels != sorted(labels)
    assert json.loads((out / "classes.json").read_text()) == ["bird", "cat"]


def test_crops_are_drawn_for_training_alone(packed):
    """Validation sees the same pixels each time, whatever the random numbers."""
    source = data.open_source(options(packed[1]))

    def pixels(half, seed):
        torch.manual_seed(seed)
        return half.read(0)[0]

    assert torch.equal(pixels(source.valid, 1), pixels(source.valid, 2))
    assert not torch.equal(pixels(source.train, 1), pixels(source.train, 2))


def test_packing_again_gives_the_same_bytes_and_another_seed_another_order(packed, tmp_path):
    folder, out = packed
    for seed, equal in ((3, True), (4, False)):
        again = tmp_path / f"again{seed}"
        pack.pack(folder, again, shard_mb=1, seed=seed)
        assert ((again / "train/000000.tar").read_bytes() == (out / "train/000000.tar").read_bytes()) == equal


def test_shards_stay_below_their_size(tmp_path, make_images):
    root = make_images(tmp_path / "images", per_class=200, size=96)
    pack.pack(root, tmp_path / "out", shard_mb=1, seed=0)
    sizes = [path.stat().st_size for path in sorted((tmp_path / "out").glob("*.tar"))]
    assert len(sizes) > 1
    assert max(sizes) <= 10**6 + tarfile.RECORDSIZE  # tar fills its last record
    source = data.open_source(options(tmp_path / "out"))
    assert (len(source.train), len(source.valid)) == (360, 40)


def fail(*_):
    """A stand-in for writing to a disk that fails."""
    raise OSError(5, "Input/output error", "a shard")


def test_nothing_is_overwritten_and_nothing_half_made_is_left(packed, tmp_path, monkeypatch):
    folder, out = packed
    with pytest.raises(MusterError, match="nothing is overwritten"):
        pack.pack(folder, out, shard_mb=1, seed=0)

    monkeypatch.setattr(tarfile.TarFile, "addfile", fail)
    for place in ("new", "a/new/place"):
        with pytest.raises(MusterError, match="Input/output error"):
            pack.pack(folder, tmp_path / place, shard_mb=1, seed=0)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["images", "shards"]


def test_the_threads_of_a_packing_that_failed_are_ended_by_it(packed, tmp_path, monkeypatch):
    """The error's traceback kept the pool of threads: a thread of it collected it, waited for itself, and hung."""

    monkeypatch.setattr(tarfile.TarFile, "addfile", fail)
    before = set(threading.enumerate())
    with pytest.raises(MusterError) as raised:
        pack.pack(packed[0], tmp_path / "new", shard_mb=1, seed=0)
    assert set(threading.enumerate()) <= before
    assert raised.tb is not None  # held until here


@pytest.mark.parametrize("place", ["new/..", "images/shards", "images/a class/shards"])
def test_shards_are_not_put_where_they_would_be_a_class_or_leave_a_folder(make_images, tmp_path, place):
    folder = make_images(tmp_path / "images", 1, ("a class", "b"))
    with pytest.raises(MusterError) as raised:
        pack.pack(folder, tmp_path / place, shard_mb=1, seed=0)
    assert raised.value.code == 2
    assert {path.name for path in tmp_path.rglob("*")} == {"images", "a class", "b", "000.jpg"}


@pytest.mark.parametrize("place", ["train/shards", "val/shards", "link/shards"])
def test_shards_are_not_put_where_they_would_be_a_class_of_one_half(packed, place):
    """A training on the folder of the images would be refused from then on."""
    (packed[0] / "link").symlink_to("val")
    with pytest.raises(MusterError, match="would count as a class"):
        pack.pack(packed[0], packed[0] / place, shard_mb=1, seed=0)
    assert len(data.open_source(Options(data=f"imagefolder:{packed[0]}")).valid) == 10


def test_a_folder_with_escape_codes_in_its_name_changes_no_terminal(make_images, tmp_path, monkeypatch, capsys):
    folder, out = make_images(tmp_path / "images", 1, ("a", "b")), tmp_path / "a\x1b[31m\udcff"
    monkeypatch.setattr(sys, "argv", ["train pack", "--shard-mb=1", "--seed=0", str(folder), str(out)])
    pack.main()
    assert out.exists()
    assert "a\\x1b[31m\\udcff: 2 images" in capsys.readouterr().out


def test_a_folder_below_the_home_folder(packed, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert pack.pack(Path("~", packed[0].relative_to(tmp_path)), tmp_path / "other", shard_mb=1, seed=0) == 50


def test_shards_below_the_home_folder_are_where_data_look_for_them(packed, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    pack.pack(packed[0], Path("~/shards"), shard_mb=1, seed=0)
    assert len(data.open_source(options(Path("~/shards"))).train) == 40
    assert not Path("~").exists()


@pytest.mark.process
def test_the_command(packed, tmp_path, monkeypatch, capsys):
    folder, out = packed
    command = [str(Path(sys.executable).parent / "train"), "pack", str(folder), str(tmp_path / "a b")]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{tmp_path / 'a b'}: 50 images, for --data 'shards:{tmp_path}/a b'\n"
    pack.pack(folder, tmp_path / "same", shard_mb=1000, seed=0)
    shards = [[path.read_bytes() for path in sorted((tmp_path / name).rglob("*.tar"))] for name in ("a b", "same")]
    assert shards[0] == shards[1] != []
    # Others may read it, as any folder that a user makes.
    assert stat.S_IMODE((tmp_path / "a b").stat().st_mode) == 0o755
    capsys.readouterr()
    monkeypatch.setattr(sys, "argv", ["train pack", "--shard-mb=1", "--seed=0", str(folder), str(out)])
    with pytest.raises(SystemExit) as raised:
        pack.main()
    assert raised.value.code == 2
    assert [line.split(":")[0].strip() for line in capsys.readouterr().err.splitlines()] == ["error", "seen", "fix"]


@pytest.mark.parametrize("accumulate", [1, 2])
def test_batches_depend_on_the_global_batch_alone(packed, accumulate):
    source = data.open_source(options(packed[1]))

    def batches(rank, world_size, accumulate, num_workers=0):
        asked = options(packed[1], accumulate=accumulate, train_num_workers=num_workers, valid_num_workers=0)
        train, valid = open_batches(source, asked, World(rank=rank, world_size=world_size))
        pairs = list(train)
        train.close()
        return torch.stack([images for images, _ in pairs]), [labels for _, labels in valid]

    whole, labels = batches(0, 1, 2 * accumulate, num_workers=2)
    parts, counted = zip(*(batches(rank, 2, accumulate) for rank in (0, 1)), strict=True)
    steps = len(whole) // (2 * accumulate)
    together = torch.stack([part.view(steps, accumulate, *part.shape[1:]) for part in parts], dim=2)
    assert torch.equal(together.flatten(0, 2), whole)
    assert sorted(torch.cat([*counted[0], *counted[1]]).tolist()) == sorted(torch.cat(labels).tolist())


def test_a_folder_that_may_not_be_written_is_read_all_the_same(packed):
    user = os.geteuid()
    with tempfile.TemporaryDirectory() as root:
        os.chmod(root, 0o755)
        folder = Path(shutil.copytree(packed[1], Path(root) / "shards"))
        for half in ("train", "val"):
            (folder / half / INDEX).unlink()
            (folder / half).chmod(0o555)
        if user == 0:
            os.seteuid(65534)  # root may write everywhere
        try:
            source = data.open_source(options(folder))
        finally:
            os.seteuid(user)
            for half in ("train", "val"):
                (folder / half).chmod(0o755)
    assert len(source.train) == 40
    assert len(source.notes) == 2
    assert "can't be kept" in source.notes[0]


def test_a_bad_image_is_named_with_its_shard(packed):
    shard = packed[1] / "train/000000.tar"
    source = data.open_source(options(packed[1]))
    _, _, place, length = source.train.samples[5].item()
    with shard.open("r+b") as file:
        file.seek(place)
        file.write(bytes(length))
    train, _ = open_batches(source, options(packed[1]), World())
    with pytest.raises(MusterError) as raised:
        list(train)
    assert raised.value.seen == f"{shard}, 000000005.jpg"


def test_shards_of_another_packing_under_the_same_names_are_refused(packed, tmp_path):
    """A node may have an older copy, whose images would get the classes of others."""
    folder, out = packed
    found = shards.scan(options(out))
    pack.pack(folder, tmp_path / "older", shard_mb=1, seed=4)
    shutil.rmtree(out)
    (tmp_path / "older").rename(out)
    with pytest.raises(MusterError, match="not those whose headers were read"):
        shards.open_source(options(out), found)


def test_packing_ended_by_sigterm_leaves_nothing(packed, tmp_path):
    before = set(os.listdir(tmp_path))
    argv = [sys.executable, "-c", SLOW_PACK, packed[0], tmp_path / "new" / "out", "--shard-mb=1", "--seed=1"]
    with subprocess.Popen(argv, cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
        end = time.monotonic() + 60
        while set(os.listdir(tmp_path)) == before and time.monotonic() < end:
            time.sleep(0.02)
        process.terminate()
        errors = process.communicate(timeout=60)[1]
    assert process.returncode == 1, errors
    assert "SIGTERM" in errors
    assert set(os.listdir(tmp_path)) == before


def test_packing_leaves_nothing_when_its_terminal_is_closed(packed, tmp_path, monkeypatch, capsys):
    before = set(os.listdir(tmp_path))
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    signal.signal(signal.SIGHUP, lambda *_: None)
    monkeypatch.setattr(tarfile.TarFile, "addfile", lambda *_: os.kill(os.getpid(), signal.SIGHUP))
    monkeypatch.setattr(sys, "argv", ["", "--shard-mb=1", "--seed=0", str(packed[0]), str(tmp_path / "out")])
    try:
        with pytest.raises(SystemExit) as raised:
            pack.main()
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    assert raised.value.code == 1
    assert "SIGHUP" in capsys.readouterr().err
    assert set(os.listdir(tmp_path)) == before


def test_a_pipe_that_is_named_as_an_image_is_refused(packed, tmp_path):
    os.mkfifo(packed[0] / "train" / "cat" / "pipe.jpg")
    with pytest.raises(MusterError, match="is no file"):
        pack.pack(packed[0], tmp_path / "out", shard_mb=1, seed=3)


def test_a_pipe_that_is_named_as_a_shard_is_refused(packed):
    os.mkfifo(packed[1] / "train" / "pipe.tar")
    with pytest.raises(MusterError, match="no regular file"):
        shards.scan(options(packed[1]))


@pytest.mark.parametrize("content", [b"", b"text", None])
def test_a_file_that_is_no_image_is_not_packed(packed, tmp_path, content):
    """Otherwise a training's error would name a number in a shard, and not the file that the user has to repair."""
    path = packed[0] / "train" / "cat" / "003.jpg"
    path.unlink()
    if content is None:
        path.symlink_to("nowhere")
    else:
        path.write_bytes(content)
    with pytest.raises(MusterError) as error:
        pack.pack(packed[0], tmp_path / "out", shard_mb=1, seed=3)
    assert (error.value.code, error.value.seen) == (2, str(path))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("folder", ["none", "empty", "half", "~nobody-of-this-name/x"])
def test_a_folder_without_images_is_told_in_words_of_the_command(tmp_path, monkeypatch, folder):
    monkeypatch.chdir(tmp_path)
    for each in ("empty", "half/train"):
        Path(each).mkdir(parents=True)
    with pytest.raises(MusterError) as error:
        pack.pack(Path(folder), tmp_path / "out", shard_mb=1, seed=3)
    assert "--data" not in str(error.value)
    assert folder in error.value.seen


def test_a_shard_cut_off_while_training(packed):
    source = data.open_source(options(packed[1], on_bad_sample="skip"))
    os.truncate(packed[1] / "val/000000.tar", 0)
    _, valid = open_batches(source, options(packed[1], on_bad_sample="skip"), World())
    assert sum(int((labels >= 0).sum()) for _, labels in valid) == 0
    assert valid.num_bad == 10
    assert "shorter than it was" in next(iter(valid.bad.values()))


@pytest.mark.once
def test_webdataset_reads_ours_and_we_read_webdatasets(packed, tmp_path):
    import webdataset

    source = data.open_source(options(packed[1]))
    shard = str(packed[1] / "train/000000.tar")
    theirs = list(webdataset.WebDataset([shard], shardshuffle=False).decode("pil").to_tuple("jpg", "cls"))
    assert [label for _, label in theirs] == source.train.labels.tolist()
    ours = [source.train.content(number) for number in range(len(source.train))]
    for half in ("train", "val"):
        (tmp_path / half).mkdir()
        with webdataset.ShardWriter(str(tmp_path / half / "part-%03d.tar"), maxcount=15, verbose=0) as writer:
            for number, content in enumerate(ours):
                writer.write({"__key__": f"some/{number:04}", "jpg": content, "cls": number % 3})
    again = data.open_source(options(tmp_path))
    assert [again.train.content(number) for number in range(len(ours))] == ours
    assert again.train.labels.tolist() == [number % 3 for number in range(len(ours))]


@pytest.mark.process
def test_a_run_on_two_ranks_and_one_goes_on(packed, train, tmp_path, summary_of):
    common = ["--model=squeezenet1_1", "--no-bf16", f"--data=shards:{packed[1]}", "--image-size=32", "--batch-size=4"]
    common += ["--num-classes=2", "--epochs=1"]
    results = {}
    for name, parts in {"whole": [[]], "parts": [["--max-steps=2"], ["--resume"]]}.items():
        for more in parts:
            train(["ddp", *common, *more, f"--runs-dir={tmp_path}", f"--name={name}"], 2, ok=True)
        results[name] = summary_of(tmp_path / name)
    assert results["whole"]["step"] == results["parts"]["step"] == 5
    assert results["whole"]["final_valid_loss"] == results["parts"]["final_valid_loss"]
    [alone] = train(["single", *common, "--accumulate=2", f"--runs-dir={tmp_path}", "--name=alone"], ok=True)
    assert summary_of(tmp_path / "alone")["final_valid_loss"] == pytest.approx(
        results["whole"]["final_valid_loss"], rel=1e-5
    ), alone.out


def write(shard: Path, members: dict[str, bytes], format: int = tarfile.USTAR_FORMAT) -> Path:
    """A tar file with `members`."""
    with tarfile.open(shard, "w", format=format) as file:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            file.addfile(member, io.BytesIO(content))
    return shard


@pytest.mark.parametrize("format", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_every_format_of_tar_is_read(tmp_path, format):
    long = "a/" * 60 + "ü" * 40 if format != tarfile.USTAR_FORMAT else "a/" * 60 + "b"
    members = {f"{long}{number}.{end}": b"%d" % number for number in range(3) for end in ("jpg", "seg.png", "cls")}
    shard = write(tmp_path / "a.tar", {"__meta__": b"x", ".hidden.jpg": b"x", **members}, format)
    found = read_headers(shard)
    assert found["label"].tolist() == [0, 1, 2]
    with tarfile.open(shard) as file:
        expected = [(member.offset_data, member.size) for member in file if member.name.endswith("0.jpg")]
    assert (found["offset"][0], found["length"][0]) == expected[0]


PAIR = {"a/1.jpg": b"x" * 700, "a/1.cls": b"0"}
BROKEN = {
    "no image": ({**PAIR, "a/2.cls": b"1"}, "no image", "a/2"),
    "no class": ({"a/1.jpg": b"x", "a/2.jpg": b"x", "a/2.cls": b"1"}, "no class", "a/1"),
    "a word": ({"a/1.jpg": b"x", "a/1.cls": b"dog"}, "b'dog'", "a/1.cls"),
    "below zero": ({"a/1.jpg": b"x", "a/1.cls": b"-1"}, "b'-1'", "a/1.cls"),
    "json": ({"a/1.jpg": b"x", "a/1.json": b'{"label": 1}'}, "no class", "a/1"),
    "an underline": ({"a/1.jpg": b"x", "a/1.cls": b"1_0"}, "b'1_0'", "a/1.cls"),
    "beyond": ({"a/1.jpg": b"x", "a/1.cls": b"4294967297"}, "not a whole number", "a/1.cls"),
    "endless": ({"a/1.jpg": b"x", "a/1.cls": b"9" * 5000}, "not a whole number", "a/1.cls"),
    "twice": ({**PAIR, "a/1.JPG": b"x"}, "the same suffix", "a/1.JPG"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_sample_that_is_none_is_named(tmp_path, case):
    members, words, name = BROKEN[case]
    shard = write(tmp_path / "a.tar", members)
    with pytest.raises(MusterError, match=words) as raised:
        read_headers(shard)
    assert f"{shard}, {name}" in raised.value.seen
    assert raised.value.code == 2


def test_a_tar_file_of_all_images_and_then_all_classes_is_told_what_to_sort(tmp_path):
    members = {f"{number}.{end}": b"0" for end in ("jpg", "cls") for number in range(3)}
    with pytest.raises(MusterError, match="no class next to") as raised:
        read_headers(write(tmp_path / "a.tar", members))
    assert "tar --sort=name" in raised.value.fix


def test_names_with_a_dot_in_front_of_their_numbers_do_not_fill_the_screen(tmp_path):
    """All files of the shard are one sample then."""
    members = {f"image.{number:04}.{end}": b"0" for number in range(500) for end in ("jpg", "cls")}
    with pytest.raises(MusterError, match="no image") as raised:
        read_headers(write(tmp_path / "a.tar", members))
    assert "image.* (0000.cls, 0000.jpg, 0001.cls" in raised.value.seen
    assert len(raised.value.seen) < len(str(tmp_path)) + 200


@pytest.mark.parametrize("format", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_a_shard_cut_off_anywhere_or_overwritten_is_told(tmp_path, format):
    members = {f"{'long' * 40}{number}.{end}": b"%d" % number for number in range(3) for end in ("jpg", "cls")}
    whole = write(tmp_path / "a.tar", members, format).read_bytes()
    with tarfile.open(tmp_path / "a.tar") as file:
        end = max(member.offset_data for member in file) + 512
    for length in range(0, end, 256):
        (tmp_path / "a.tar").write_bytes(whole[:length])
        with pytest.raises(MusterError, match="damaged"):
            read_headers(tmp_path / "a.tar")
    (tmp_path / "a.tar").write_bytes(whole[:512] + b"\xff" * 512 + whole[1024:])
    with pytest.raises(MusterError):
        read_headers(tmp_path / "a.tar")


@pytest.mark.parametrize("format", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_tar_files_that_cat_has_put_into_one_are_told(tmp_path, format):
    """Otherwise the samples of all files but the first would be left out."""
    for size in (0, 8192):  # after 8192 bytes the zeros at the end take more than a record
        first = write(tmp_path / "a.tar", {"0.jpg": b"x" * size, "0.cls": b"0"}, format).read_bytes()
        assert len(read_headers(tmp_path / "a.tar")) == 1
        second = write(tmp_path / "a.tar", {"1.jpg": b"x", "1.cls": b"1"}, format).read_bytes()
        (tmp_path / "a.tar").write_bytes(first + second)
        with pytest.raises(MusterError, match="several tar files"):
            read_headers(tmp_path / "a.tar")


def test_folders_that_hold_no_shards(tmp_path):
    def error(root=tmp_path):
        with pytest.raises(MusterError) as raised:
            data.open_source(options(root))
        return str(raised.value)

    assert "does not exist" in error(tmp_path / "none")
    assert "no uncompressed tar files" in error()
    (tmp_path / "a.tar.gz").touch()
    assert "no uncompressed tar files" in error()
    write(tmp_path / "a.tar", {})
    assert "no samples" in error()
    write(tmp_path / "a.tar", PAIR)
    assert "only one class" in error()
    write(tmp_path / "a.tar", {**PAIR, "2.jpg": b"x", "2.cls": b"3"})
    assert "2 of 4 classes" in error()
    (tmp_path / "train").mkdir()
    assert "no val/" in error()


@pytest.mark.parametrize(
    ("names", "mixed"),
    [
        (["imagenet-train-000000", "imagenet-val-000000"], True),  # as webdataset's own script names them
        (["imagenet1k-train-0000", "imagenet1k-validation-00"], True),  # as on the Hugging Face Hub
        (["train_val-000000", "train_val-000001"], False),
        (["a-train-000000", "b-000000"], False),
    ],
)
def test_shards_of_both_halves_in_one_folder_are_not_split_by_chance(tmp_path, names, mixed):
    """Otherwise samples for validation would be trained on."""
    for name in names:
        write(tmp_path / f"{name}.tar", {**PAIR, "a/2.jpg": b"x", "a/2.cls": b"1"})
    if not mixed:
        assert len(data.open_source(options(tmp_path)).train) == 4 - 1
        return
    with pytest.raises(MusterError, match="would be mixed") as raised:
        data.open_source(options(tmp_path))
    assert all(name in raised.value.seen for name in names)
    for half, name in zip(("train", "val"), names, strict=True):
        (tmp_path / half).mkdir()
        (tmp_path / half / f"{name}.tar").symlink_to(tmp_path / f"{name}.tar")
    assert len(data.open_source(options(tmp_path)).valid) == 2


def test_files_that_are_not_packed_are_told(tmp_path, make_images, capsys):
    (make_images(tmp_path / "images") / "cat" / "loop.gif").touch()
    pack.pack(tmp_path / "images", tmp_path / "out", shard_mb=1, seed=3)
    assert "note: 1 file left out: not named as images, .gif" in capsys.readouterr().err


def test_compressed_shards_beside_the_others_are_counted(packed):
    out = packed[1]
    assert data.open_source(options(out)).notes == ()
    for name in ("000001.tar.gz", "000002.tgz", "000003.tar.zst", "000000.tar.idx", "000000.tar.md5", ".0.tar.gz"):
        (out / "train" / name).touch()
    assert data.open_source(options(out)).notes == ("3 files left out: compressed tar files",)


@pytest.fixture
def labels(tmp_path, monkeypatch):
    """Opens the folder's index; returns the labels in it, and the shards whose headers were read for it."""
    read: list[str] = []

    def note(shard):
        read.append(shard.name)
        return read_headers(shard)

    def open_():
        read.clear()
        return shards.open_index(tmp_path, "")[1]["label"].tolist(), list(read)

    monkeypatch.setattr(shards, "read_headers", note)
    return open_


def test_the_index_is_kept_until_shards_change(tmp_path, labels):
    write(tmp_path / "a.tar", PAIR)
    assert labels() == ([0], ["a.tar"])
    assert labels() == ([0], [])
    write(tmp_path / "b.tar", PAIR)  # another name
    assert (labels()[0], labels()[1]) == ([0, 0], [])
    time = os.stat(tmp_path / "a.tar").st_mtime_ns
    write(tmp_path / "a.tar", {**PAIR, "a/1.cls": b"7"})  # the same size
    os.utime(tmp_path / "a.tar", ns=(time + 1, time + 1))
    found, read = labels()
    assert (found, sorted(read)) == ([7, 0], ["a.tar", "b.tar"])
    assert labels() == ([7, 0], [])
    assert sorted(path.name for path in tmp_path.iterdir()) == [INDEX, "a.tar", "b.tar"]


class Harm:
    """An object whose pickle makes a file when it is read."""

    def __reduce__(self):
        return Path.touch, (Path("harm"),)


def index_with(path: Path, **others: np.ndarray) -> None:
    """Puts other arrays into the index at `path`."""
    with np.load(path) as file:
        arrays = {name: file[name] for name in file.files}
    with path.open("wb") as file:
        np.savez(file, **arrays | others)


def sample(**fields: int) -> dict[str, np.ndarray]:
    """The samples of an index: a single one, with `fields`."""
    usual = {"shard": 0, "label": 3, "offset": 512, "length": 700}
    return {"samples": np.array([tuple((usual | fields).values())], SAMPLE)}


FOREIGN = {
    "empty": lambda path: path.write_bytes(b""),
    "text": lambda path: path.write_text("no archive"),
    "half of it": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "a changed byte": lambda path: path.write_bytes(path.read_bytes().replace(b"label", b"lapel")),
    "an array": lambda path: path.write_bytes(np.arange(3).dumps()),
    "a pickle": lambda path: index_with(path, samples=np.array([Harm()], dtype=object)),
    "of a folder with other shards": lambda path: index_with(path, identity=np.array("another")),
    "a pipe": lambda path: (path.unlink(), os.mkfifo(path)),
    "of other columns": lambda path: index_with(path, samples=np.zeros((1, 4), np.int64)),
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", FOREIGN)
def test_an_index_that_does_not_fit_is_not_believed(tmp_path, labels, monkeypatch, kind):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "a.tar", PAIR)
    labels()
    index_with(tmp_path / INDEX, **sample())
    assert labels() == ([3], [])  # an index that fits is
    FOREIGN[kind](tmp_path / INDEX)
    assert labels() == ([0], ["a.tar"])
    assert labels() == ([0], [])
    assert not (tmp_path / "harm").exists()


@pytest.mark.parametrize(
    ("train", "valid", "wrong", "without"),
    [
        ([0, 2], [1], "1 of 3 classes", "1"),
        ([0, 1], [1_700_000_000], "1699999999 of 1700000001 classes", "2"),
        ([9], [0], "9 of 10 classes", "0"),
    ],
)
def test_classes_without_a_training_sample(train, valid, wrong, without):
    with pytest.raises(MusterError, match=wrong) as raised:
        shards.check_classes([np.array(train, np.int32), np.array(valid, np.int32)], "--data=shards:x")
    assert raised.value.seen.endswith(f"without: {without}")
