import errno
import json
import os
import pickle
import resource
import shutil
import subprocess
import sys
import zlib
from pathlib import Path

import pytest
import torch

from muster.config import Options
from muster.errors import MusterError
from muster.train.checkpoint import manager as checkpoint, storage
from tests.train.comparing import save


def state(value, size=2000):
    return {"identity": {"model": "m"}, "model": {"w": torch.full((size,), float(value))}}


def weight(path):
    return checkpoint.load(path)["model"]["w"][0].item()


def names(run):
    return sorted(path.name for path in checkpoint.folder_of(run).iterdir())


def test_latest_names_the_last_and_older_ones_go(tmp_path):
    for step in (10, 20, 30):
        save(tmp_path, state(step), step=step, keep=2)
    assert names(tmp_path) == ["latest", "step-00000020", "step-00000030"]
    assert (tmp_path / "checkpoints/latest").read_text() == "step-00000030\n"
    path, loaded, notes = checkpoint.load_newest(tmp_path)
    assert (path.name, weight(path), notes) == ("step-00000030", 30, [])
    assert loaded["identity"] == {"model": "m"}


def test_continuing_an_older_one_keeps_what_is_ahead_of_it(tmp_path):
    for step in (10, 20, 30):
        save(tmp_path, state(step), step=step, keep=3)
    save(tmp_path, state(15), step=15, keep=3)
    assert [path.name for path in checkpoint.saved(tmp_path)] == ["step-00000015", "step-00000010"]
    assert "step-00000030" in names(tmp_path)


def test_what_a_killed_process_left_is_removed(tmp_path):
    folder = checkpoint.folder_of(tmp_path)
    (folder / ".step-00000005.partial").mkdir(parents=True)
    (folder / ".step-00000005.partial" / "rank-00000").write_bytes(b"half")
    (folder / ".latest.partial").write_text("st")
    save(tmp_path, state(10), step=10, keep=1)
    assert names(tmp_path) == ["latest", "step-00000010"]


@pytest.mark.parametrize("kept_by", ["its mode", "a link"])
def test_an_older_one_that_the_user_keeps_is_no_reason_to_end(tmp_path, request, kept_by):
    path = save(tmp_path, state(10), step=10, keep=1)
    if kept_by == "a link":
        kept = path.rename(tmp_path / "elsewhere")
        path.symlink_to(kept)
    else:
        kept = path.relative_to(tmp_path)
        tmp_path.chmod(0o777)
        checkpoint.folder_of(tmp_path).chmod(0o777)
        (path.parent / "latest").chmod(0o666)
        path.chmod(0o555)
        request.getfixturevalue("as_other")
        tmp_path = Path()
    save(tmp_path, state(20), step=20, keep=1)
    assert weight(kept) == 10
    assert checkpoint.load_newest(tmp_path)[0].name == "step-00000020"


def test_an_index_that_may_not_be_read_is_told_as_that(tmp_path, request):
    path = save(tmp_path, state(10), step=10, keep=1)
    (path / "index").chmod(0)
    request.getfixturevalue("as_other")
    with pytest.raises(MusterError, match="Permission denied"):
        checkpoint.load(path.relative_to(tmp_path))


def cut(path):
    file = path / "rank-00000"
    file.write_bytes(file.read_bytes()[:-400])


def flip(path, name="rank-00000"):
    content = bytearray((path / name).read_bytes())
    content[1001] ^= 0xFF
    (path / name).write_bytes(content)


def lose(path):
    (path / "rank-00000").unlink()


def flip_index(path):
    text = (path / "index").read_bytes()
    changed = text.replace(b'"start": 0', b'"start": 4')
    assert changed != text
    (path / "index").write_bytes(changed)


def cut_index(path):
    (path / "index").write_bytes((path / "index").read_bytes()[:-5])


HARMS = {cut: "rank-00000", flip: "rank-00000", lose: "rank-00000", flip_index: "index", cut_index: "index"}


@pytest.mark.parametrize(("harm", "named"), HARMS.items())
def test_a_damaged_one_is_refused_with_the_file_and_the_one_before_taken(tmp_path, harm, named):
    for step in (10, 20):
        save(tmp_path, state(step), step=step, keep=2)
    newest = checkpoint.saved(tmp_path)[0]
    harm(newest)
    with pytest.raises(MusterError) as raised:
        checkpoint.load(newest)
    assert str(newest) in raised.value.seen
    assert named in raised.value.wrong
    assert raised.value.code == 2
    path, _, notes = checkpoint.load_newest(tmp_path)
    assert path.name == "step-00000010"
    assert len(notes) == 1
    assert newest.name in notes[0]


def test_all_damaged(tmp_path):
    for step in (10, 20):
        cut(save(tmp_path, state(step), step=step, keep=2))
    with pytest.raises(MusterError, match="can't be read"):
        checkpoint.load_newest(tmp_path)


def test_a_run_is_complete_once_its_last_step_is_validated():
    def complete(step, *validated):
        progress = checkpoint.Progress(step=step, history=[{"step": each} for each in validated])
        return checkpoint.is_complete(progress, Options(max_steps=20, epochs=9))

    assert not complete(19, 10)
    assert not complete(20)
    assert not complete(20, 10)  # a warning came before the end of the validation
    assert complete(20, 10, 20)
    assert complete(21, 10)


def test_without_the_pointer_the_newest_counts(tmp_path):
    for step in (10, 20):
        save(tmp_path, state(step), step=step, keep=2)
    (checkpoint.folder_of(tmp_path) / "latest").unlink()
    assert checkpoint.load_newest(tmp_path)[0].name == "step-00000020"


def test_what_is_no_checkpoint(tmp_path):
    (tmp_path / "file").write_text("weights")
    (tmp_path / "folder").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "index").write_text("an index of something else")
    for name in ("file", "folder", "other"):
        with pytest.raises(MusterError, match="no checkpoint of this program"):
            checkpoint.load(tmp_path / name)
    with pytest.raises(MusterError, match="no such checkpoint"):
        checkpoint.load(tmp_path / "none")


def test_any_tensor_and_value_comes_back(tmp_path):
    tensors = {
        "bf16": torch.randn(3, 5).bfloat16(),
        "number": torch.tensor(3.5, dtype=torch.float64),
        "count": torch.tensor(7),
        "empty": torch.empty(0, 4),
        "truth": torch.tensor([True, False]),
        "turned": torch.randn(4, 6).t(),
        "nhwc": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "parameter": torch.nn.Parameter(torch.randn(4)),
    }
    plain = {"progress": {"best": 0.1 + 0.2, "history": [{"epoch": 1}], "none": None}}
    loaded = checkpoint.load(save(tmp_path, {"model": tensors, **plain}, step=1, keep=1))
    assert loaded["progress"] == plain["progress"]
    assert loaded["model"].keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert loaded["model"][name].dtype == tensor.dtype
        assert torch.equal(loaded["model"][name], tensor)


def test_nothing_is_executed(tmp_path):
    class Evil:
        def __reduce__(self):
            return (os.mkdir, (str(tmp_path / "pwned"),))

    path = save(tmp_path, state(1), step=1, keep=1)
    evil = pickle.dumps({"format": 2, "model": Evil()})
    size = (path / "rank-00000").stat().st_size
    (path / ".metadata").write_bytes(evil)
    (path / "rank-00000").write_bytes(evil.ljust(size, b"\0"))
    with pytest.raises(MusterError, match="wrong checksum"):
        checkpoint.load(path)
    (path / "index").write_bytes(evil)
    with pytest.raises(MusterError, match="no checkpoint"):
        checkpoint.load(path)
    assert not (tmp_path / "pwned").exists()


CHUNK = {"offsets": [0], "sizes": [2], "file": "rank-00000", "start": 0, "length": 8, "crc32": 0}
ENTRY = {"dtype": "float32", "shape": [2], "chunks": [CHUNK]}


def index_of(entry=ENTRY, **chunk):
    return {"plain": {}, "tensors": {"model/w": {**entry, "chunks": [{**CHUNK, **chunk}]}}}


FORGED = {
    "a list": [],
    "no tensors": {"plain": {}},
    "a tensor that is none": {"plain": {}, "tensors": {"model/w": 1}},
    "a part without a place": {"plain": {}, "tensors": {"model/w": {**ENTRY, "chunks": [{"file": "rank-00000"}]}}},
    "no such type": index_of({**ENTRY, "dtype": "load"}),
    "a shape of another kind": index_of({**ENTRY, "shape": ["2"]}),
    "less than the tensor": index_of({**ENTRY, "shape": [2**40]}),
    "beyond the tensor": index_of(offsets=[1]),
    "of other dimensions": index_of(sizes=[2, 1]),
    "more bytes than numbers": index_of(length=2**40),
    "a negative place": index_of(start=-8),
    "a file that is none of its own": index_of(file="../../other/checkpoints/step-00000001/rank-00000"),
}


@pytest.mark.parametrize("forged", [*map(json.dumps, FORGED.values()), "[" * 100_000], ids=[*FORGED, "nested"])
def test_an_index_that_somebody_else_has_made_is_refused(tmp_path, forged):
    path = save(tmp_path, state(1), step=1, keep=1)
    (path / "index").write_text(f"muster checkpoint 2 {zlib.crc32(forged.encode()):08x}\n{forged}")
    with pytest.raises(MusterError, match="index was not written by this program") as raised:
        checkpoint.load(path)
    assert raised.value.code == 2


@pytest.mark.parametrize("name", ["rank-00000", "index", "../latest"])
@pytest.mark.timeout(60)
def test_a_pipe_in_the_place_of_a_file_holds_nobody(tmp_path, name):
    path = save(tmp_path, state(1), step=1, keep=1)
    (path / name).unlink()
    os.mkfifo(path / name)
    if name == "../latest":  # without the pointer the newest counts
        assert checkpoint.saved(tmp_path) == [path]
        return
    with pytest.raises(MusterError) as raised:
        checkpoint.load(path)
    assert name in raised.value.wrong


def test_what_is_saved_again_takes_the_place_of_the_first(tmp_path):
    for value in (1, 2):
        save(tmp_path, state(value), step=10, keep=2)
    assert names(tmp_path) == ["latest", "step-00000010"]
    assert weight(checkpoint.saved(tmp_path)[0]) == 2


def test_a_checkpoint_whose_replacement_is_missing_gets_its_name_back(tmp_path):
    path = save(tmp_path, state(1), step=10, keep=2)
    path.rename(path.with_name(f".{path.name}.old.partial"))
    assert checkpoint.saved(tmp_path) == []
    checkpoint.put_back(tmp_path)
    assert [weight(path) for path in checkpoint.saved(tmp_path)] == [1]


def test_the_remains_of_a_replaced_checkpoint_do_not_stop_the_next_save(tmp_path):
    path = save(tmp_path, state(2), step=10, keep=2)
    shutil.copytree(path, path.with_name(f".{path.name}.old.partial"))
    checkpoint.put_back(tmp_path)
    assert [weight(path) for path in checkpoint.saved(tmp_path)] == [2]
    save(tmp_path, state(3), step=10, keep=2)
    assert weight(path) == 3
    assert names(tmp_path) == ["latest", "step-00000010"]


def test_a_pointer_that_is_no_text(tmp_path):
    save(tmp_path, state(1), step=10, keep=2)
    (checkpoint.folder_of(tmp_path) / "latest").write_bytes(b"\xff\xfe\x00")
    assert [path.name for path in checkpoint.saved(tmp_path)] == ["step-00000010"]


def save_beyond_the_limit(tmp_path, size):
    """Saves with files limited to 1 MB: as on a full disk, writing fails midway."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, hard))
    try:
        save(tmp_path, state(20, size), step=20, keep=2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("size", [1_000_000, 250_001])
def test_a_file_that_may_not_grow_leaves_the_last_good_one(tmp_path, size):
    save(tmp_path, state(10), step=10, keep=2)
    with pytest.raises(MusterError, match="could not be written") as raised:
        save_beyond_the_limit(tmp_path, size)
    assert raised.value.code == 1
    assert "step-00000010" in raised.value.seen
    assert "--resume" in raised.value.fix
    assert len(str(raised.value).splitlines()) == 3
    assert names(tmp_path) == ["latest", "step-00000010"]
    assert weight(checkpoint.load_newest(tmp_path)[0]) == 10


def test_a_folder_that_cannot_be_made_is_told(tmp_path):
    (tmp_path / "checkpoints").write_text("in the way")
    with pytest.raises(MusterError, match="could not be written") as raised:
        save(tmp_path, state(10), step=10, keep=2)
    assert "the last good one is none" in raised.value.seen
    assert "--resume" not in raised.value.fix


FULL_DISK = """
import subprocess, sys
from pathlib import Path
import torch
from muster.train.checkpoint import manager as checkpoint
from muster.train.distributed.world import World
from tests.train.comparing import save
from muster.errors import MusterError
run = Path(sys.argv[1])
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", run], check=True)
state = lambda value, size: {"model": {"w": torch.full((size,), value)}}
save(run, state(10.0, 2000), step=10, keep=2)
try:
    save(run, state(20.0, 1_000_000), step=20, keep=2)
except MusterError as error:
    print(error, sorted(path.name for path in checkpoint.folder_of(run).iterdir()), sep="\\n")
"""


def test_a_full_disk_leaves_the_last_good_one(tmp_path):
    # A mount namespace of its own: the small disk is gone with the process.
    command = ["unshare", "--map-root-user", "--mount", sys.executable, "-c", FULL_DISK, str(tmp_path)]
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    ended = subprocess.run(command, env=env, capture_output=True, text=True, timeout=240)
    if "unshare failed" in ended.stderr or "permission denied" in ended.stderr:
        pytest.skip(f"needs leave to mount a small disk: {ended.stderr.strip().splitlines()[-1]}")
    assert ended.returncode == 0, ended.stderr
    wrong, *_, listing = ended.stdout.splitlines()
    assert "No space left on device" in wrong
    assert listing == "['latest', 'step-00000010']"


def test_a_disk_that_fails_at_the_very_end_is_told_as_it_is(tmp_path, monkeypatch):
    def fail(folder):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(storage, "sync_folder", fail)
    with pytest.raises(OSError, match="Input/output error"):
        storage.write_text(tmp_path / "latest", "step-00000010")
