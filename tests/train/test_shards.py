"""Tar shards: ours, webdataset's, and those that are not what they should be."""

import json
import os
import pickle
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

import pytest
import torch

from train import data, pack
from train.data.index import KEPT
from train.data.loader import open_batches
from train.data.shards import Descriptors
from train.errors import MusterError
from train.options import Options
from train.world import World

ROOT = Path(__file__).parents[2]


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
    folder, shards = packed
    one, other = data.open_source(Options(data=f"imagefolder:{folder}")), data.open_source(options(shards))
    assert contents(one.train) == contents(other.train)
    assert contents(one.valid) == contents(other.valid)
    assert (other.num_classes, len(other.train), len(other.valid)) == (2, 40, 10)
    labels = other.train.labels.tolist()
    assert labels != sorted(labels)
    assert json.loads((shards / "classes.json").read_text()) == ["bird", "cat"]


def test_packing_again_gives_the_same_bytes_and_another_seed_another_order(packed, tmp_path):
    folder, shards = packed
    for seed, equal in ((3, True), (4, False)):
        again = tmp_path / f"again{seed}"
        pack.pack(folder, again, shard_mb=1, seed=seed)
        assert ((again / "train/000000.tar").read_bytes() == (shards / "train/000000.tar").read_bytes()) == equal


def test_shards_stay_below_their_size(tmp_path, make_images):
    root = make_images(tmp_path / "images", per_class=200, size=96)
    pack.pack(root, tmp_path / "out", shard_mb=1, seed=0)
    sizes = [path.stat().st_size for path in sorted((tmp_path / "out").glob("*.tar"))]
    assert len(sizes) > 1
    assert max(sizes) <= 10**6 + tarfile.RECORDSIZE  # what tar fills up at its end
    source = data.open_source(options(tmp_path / "out"))
    assert (len(source.train), len(source.valid)) == (360, 40)


def test_nothing_is_overwritten_and_nothing_half_made_is_left(packed, tmp_path, monkeypatch):
    folder, shards = packed
    with pytest.raises(MusterError, match="nothing is overwritten"):
        pack.pack(folder, shards, shard_mb=1, seed=0)

    def fail(path):
        raise OSError(5, "Input/output error", os.fsdecode(path))

    monkeypatch.setattr(pack, "read", fail)  # a stand-in for a disk that fails
    with pytest.raises(MusterError, match="Input/output error"):
        pack.pack(folder, tmp_path / "other", shard_mb=1, seed=0)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["images", "shards"]


@pytest.mark.process
def test_the_command(packed, tmp_path, monkeypatch, capsys):
    folder, shards = packed
    command = [str(Path(sys.executable).parent / "train"), "pack", str(folder), str(tmp_path / "a b")]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "50 images" in done.stdout
    monkeypatch.setattr(sys, "argv", ["train pack", str(folder), str(shards)])
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
            (folder / half / KEPT).unlink()
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
    place, length = int(source.train.offset[5]), int(source.train.length[5])
    with shard.open("r+b") as file:
        file.seek(place)
        file.write(bytes(length))
    train, _ = open_batches(source, options(packed[1]), World())
    with pytest.raises(MusterError) as raised:
        list(train)
    assert raised.value.seen == f"{shard}, 000000005.jpg"


def test_a_shard_cut_off_while_training(packed):
    source = data.open_source(options(packed[1], on_bad_sample="skip"))
    os.truncate(packed[1] / "val/000000.tar", 0)
    _, valid = open_batches(source, options(packed[1], on_bad_sample="skip"), World())
    assert sum(int((labels >= 0).sum()) for _, labels in valid) == 0
    assert valid.num_bad == 10
    assert "shorter than it was" in next(iter(valid.bad.values()))


def test_descriptors_are_few_and_of_one_process(tmp_path):
    files = Descriptors()
    files.most = 3
    paths = [os.fsencode(tmp_path / f"{number}") for number in range(8)]
    for number, path in enumerate(paths):
        Path(os.fsdecode(path)).write_bytes(b"%d" % number)
    for number in (0, 1, 2, 3, 0, 7, 6, 5, 4, 0):
        assert os.pread(files[paths[number]], 1, 0) == b"%d" % number
        assert len(files.open) <= 3
    assert not pickle.loads(pickle.dumps(files)).open
    held = list(files.open.values())
    del files
    for descriptor in held:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(descriptor)


@pytest.mark.once
def test_webdataset_reads_ours_and_we_read_webdatasets(packed, tmp_path):
    import webdataset

    source = data.open_source(options(packed[1]))
    shards = [str(packed[1] / "train/000000.tar")]
    theirs = list(webdataset.WebDataset(shards, shardshuffle=False).decode("pil").to_tuple("jpg", "cls"))
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
