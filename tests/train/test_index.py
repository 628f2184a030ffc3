"""Where samples lie in tar files: read from their headers, kept beside them, checked."""

import io
import os
import tarfile
from pathlib import Path

import numpy as np
import pytest

from train import data
from train.data import index, shards
from train.data.encoded import Names
from train.data.index import KEPT, samples_of
from train.errors import MusterError
from train.options import Options


def write(shard: Path, members: dict[str, bytes], format: int = tarfile.USTAR_FORMAT) -> Path:
    """A tar file with `members`."""
    with tarfile.open(shard, "w", format=format) as file:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            file.addfile(member, io.BytesIO(content))
    return shard


def options(root: Path, **more) -> Options:
    return Options(data=f"shards:{root}", image_size=24, batch_size=4, **more)


@pytest.mark.parametrize("format", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_every_format_of_tar_is_read(tmp_path, format):
    long = "a/" * 60 + "ü" * 40 if format != tarfile.USTAR_FORMAT else "a/" * 60 + "b"
    members = {f"{long}{number}.{end}": b"%d" % number for number in range(3) for end in ("jpg", "seg.png", "cls")}
    shard = write(tmp_path / "a.tar", {"__meta__": b"x", ".hidden.jpg": b"x", **members}, format)
    found = samples_of(shard)
    assert [sample.label for sample in found] == [0, 1, 2]
    with tarfile.open(shard) as file:
        expected = [(member.offset_data, member.size) for member in file if member.name.endswith("0.jpg")]
    assert (found[0].offset, found[0].length) == expected[0]


@pytest.mark.parametrize(("text", "label"), [('{"label": 3}', 3), ('{"cls": 0, "a": 1}', 0), ("4", 4)])
def test_classes_in_json(tmp_path, text, label):
    shard = write(tmp_path / "a.tar", {"a.PNG": b"x", "a.json": text.encode() + b" " * 5000})
    assert [sample.label for sample in samples_of(shard)] == [label]


PAIR = {"a/1.jpg": b"x" * 700, "a/1.cls": b"0"}
BROKEN = {
    "no image": ({**PAIR, "a/2.cls": b"1"}, "no image", "a/2"),
    "no class": ({"a/1.jpg": b"x", "a/2.jpg": b"x", "a/2.cls": b"1"}, "no class", "a/1"),
    "a word": ({"a/1.jpg": b"x", "a/1.cls": b"dog"}, "b'dog'", "a/1.cls"),
    "below zero": ({"a/1.jpg": b"x", "a/1.cls": b"-1"}, "b'-1'", "a/1.cls"),
    "true": ({"a/1.jpg": b"x", "a/1.json": b'{"label": true}'}, "no number", "a/1.json"),
    "beyond": ({"a/1.jpg": b"x", "a/1.cls": b"4294967297"}, "no number", "a/1.cls"),
    "endless": ({"a/1.jpg": b"x", "a/1.cls": b"9" * 5000}, "no number", "a/1.cls"),
    "twice": ({**PAIR, "a/1.JPG": b"x"}, "one name", "a/1.JPG"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_sample_that_is_none_is_named(tmp_path, case):
    members, words, name = BROKEN[case]
    shard = write(tmp_path / "a.tar", members)
    with pytest.raises(MusterError, match=words) as raised:
        samples_of(shard)
    assert f"{shard}, {name}" in raised.value.seen
    assert raised.value.code == 2


@pytest.mark.parametrize("format", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_a_shard_cut_off_anywhere_or_overwritten_is_told(tmp_path, format):
    members = {f"{'long' * 40}{number}.{end}": b"%d" % number for number in range(3) for end in ("jpg", "cls")}
    whole = write(tmp_path / "a.tar", members, format).read_bytes()
    with tarfile.open(tmp_path / "a.tar") as file:
        end = max(member.offset_data for member in file) + 512
    for length in range(0, end, 256):
        (tmp_path / "a.tar").write_bytes(whole[:length])
        with pytest.raises(MusterError, match="damaged"):
            samples_of(tmp_path / "a.tar")
    (tmp_path / "a.tar").write_bytes(whole[:512] + b"\xff" * 512 + whole[1024:])
    with pytest.raises(MusterError):
        samples_of(tmp_path / "a.tar")


def test_folders_that_hold_no_shards(tmp_path):
    def error(root=tmp_path):
        with pytest.raises(MusterError) as raised:
            data.open_source(options(root))
        return str(raised.value)

    assert "does not exist" in error(tmp_path / "none")
    assert "no shards" in error()
    (tmp_path / "a.tar.gz").touch()
    assert "compressed" in error()
    write(tmp_path / "a.tar", {})
    assert "no samples" in error()
    write(tmp_path / "a.tar", PAIR)
    assert "one class alone" in error()
    write(tmp_path / "a.tar", {**PAIR, "2.jpg": b"x", "2.cls": b"3"})
    assert "2 of 4 classes" in error()
    (tmp_path / "train").mkdir()
    assert "no val/" in error()


@pytest.fixture
def walks(monkeypatch):
    """The shards whose headers are read."""
    read = []

    def note(shard):
        read.append(shard.name)
        return samples_of(shard)

    monkeypatch.setattr(index, "samples_of", note)
    return read


def test_the_index_is_kept_until_shards_change(tmp_path, walks):
    def labels():
        walks.clear()
        return index.index_of(tmp_path, "")[0]["label"].tolist()

    write(tmp_path / "a.tar", PAIR)
    assert (labels(), walks) == ([0], ["a.tar"])
    assert (labels(), walks) == ([0], [])
    write(tmp_path / "b.tar", PAIR)  # another name
    assert (labels(), len(walks)) == ([0, 0], 2)
    time = os.stat(tmp_path / "a.tar").st_mtime_ns
    write(tmp_path / "a.tar", {**PAIR, "a/1.cls": b"7"})  # the same size
    os.utime(tmp_path / "a.tar", ns=(time + 1, time + 1))
    assert (labels(), len(walks)) == ([7, 0], 2)
    kept = (tmp_path / KEPT).read_bytes()
    for damage in (b"", b"no archive", kept[: len(kept) // 2], kept.replace(b"label", b"lapel")):
        (tmp_path / KEPT).write_bytes(damage)
        assert (labels(), len(walks)) == ([7, 0], 2)
    assert labels() == [7, 0]
    assert walks == []
    assert sorted(path.name for path in tmp_path.iterdir()) == [KEPT, "a.tar", "b.tar"]


def test_an_index_is_no_pickle(tmp_path, walks):
    class Harm:
        def __reduce__(self):
            return Path.touch, (tmp_path / "harm",)

    write(tmp_path / "a.tar", PAIR)
    found, _ = index.index_of(tmp_path, "")
    evil = {**found, "label": np.array([Harm()], dtype=object)}
    with (tmp_path / KEPT).open("wb") as file:
        np.savez(file, **evil)
    assert index.index_of(tmp_path, "")[0]["label"].tolist() == [0]
    assert not (tmp_path / "harm").exists()


@pytest.mark.parametrize("foreign", ["an array", "a flipped bit"])
def test_an_index_that_is_none_is_made_anew(tmp_path, walks, foreign):
    write(tmp_path / "a.tar", PAIR)
    index.index_of(tmp_path, "")
    if foreign == "an array":
        with (tmp_path / KEPT).open("wb") as file:
            np.save(file, np.arange(3))
    else:
        content = bytearray((tmp_path / KEPT).read_bytes())
        content[6] |= 1  # the first file's flags: encrypted
        (tmp_path / KEPT).write_bytes(content)
    assert index.index_of(tmp_path, "")[0]["label"].tolist() == [0]


def test_names_in_one_array():
    texts = [b"a", b"", b"c/d \xff"]
    names = Names(index.joined(texts))
    assert [names[number] for number in range(len(names))] == texts


@pytest.mark.parametrize(
    ("train", "valid", "wrong", "without"),
    [
        ([0, 2], [1], "1 of 3 classes", "1"),
        ([0, 1], [1_700_000_000], "1699999999 of 1700000001 classes", "2, 3, 4, 5, 6 ..."),
        ([9], [0], "9 of 10 classes", "0, 1, 2, 3, 4 ..."),
    ],
)
def test_classes_without_a_training_sample(train, valid, wrong, without):
    with pytest.raises(MusterError, match=wrong) as raised:
        shards.check_classes([np.array(train, np.int32), np.array(valid, np.int32)], "--data=shards:x")
    assert raised.value.seen.endswith(f"without: {without}")


def test_a_pax_header_without_a_size(tmp_path):
    shard = tmp_path / "a.tar"
    with tarfile.open(shard, "w", format=tarfile.PAX_FORMAT) as file:
        member = tarfile.TarInfo("a.jpg")
        member.pax_headers = {"size": "many"}
        file.addfile(member)
    with pytest.raises(MusterError, match="no size: 'many'"):
        samples_of(shard)
