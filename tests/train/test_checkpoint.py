import os
import pickle
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from train import checkpoint
from train.errors import MusterError


def state(value, size=2000):
    return {"identity": {"model": "m"}, "model": {"w": torch.full((size,), float(value))}}


def weight(path):
    return checkpoint.load(path)["model"]["w"][0].item()


def names(run):
    return sorted(path.name for path in checkpoint.folder_of(run).iterdir())


def test_latest_names_the_last_and_older_ones_go(tmp_path):
    for step in (10, 20, 30):
        checkpoint.save(tmp_path, state(step), step=step, keep=2)
    assert names(tmp_path) == ["latest", "step-00000020.pt", "step-00000030.pt"]
    assert (tmp_path / "checkpoints/latest").read_text() == "step-00000030.pt\n"
    path, loaded, notes = checkpoint.load_newest(tmp_path)
    assert (path.name, weight(path), notes) == ("step-00000030.pt", 30, [])
    assert loaded["identity"] == {"model": "m"}


def test_continuing_an_older_one_keeps_what_is_ahead_of_it(tmp_path):
    for step in (10, 20, 30):
        checkpoint.save(tmp_path, state(step), step=step, keep=3)
    checkpoint.save(tmp_path, state(15), step=15, keep=3)
    assert [path.name for path in checkpoint.saved(tmp_path)] == ["step-00000015.pt", "step-00000010.pt"]
    assert "step-00000030.pt" in names(tmp_path)


def test_what_a_killed_process_left_is_removed(tmp_path):
    folder = checkpoint.folder_of(tmp_path)
    folder.mkdir()
    (folder / ".step-00000005.pt.partial").write_bytes(b"half")
    checkpoint.save(tmp_path, state(10), step=10, keep=1)
    assert names(tmp_path) == ["latest", "step-00000010.pt"]


def cut(path):
    path.write_bytes(path.read_bytes()[:-400])


def flip(path):
    content = bytearray(path.read_bytes())
    place = content.find(torch.full((8,), 20.0).numpy().tobytes())
    content[place + 1000] ^= 0xFF
    path.write_bytes(content)


@pytest.mark.parametrize("harm", [cut, flip, lambda path: path.write_bytes(b""), lambda path: path.write_text("x")])
def test_a_damaged_one_is_refused_and_the_one_before_taken(tmp_path, harm):
    for step in (10, 20):
        checkpoint.save(tmp_path, state(step), step=step, keep=2)
    newest = checkpoint.saved(tmp_path)[0]
    harm(newest)
    with pytest.raises(MusterError) as raised:
        checkpoint.load(newest)
    assert str(newest) in raised.value.seen
    assert raised.value.code == 2
    path, _, notes = checkpoint.load_newest(tmp_path)
    assert path.name == "step-00000010.pt"
    assert len(notes) == 1
    assert newest.name in notes[0]


def test_all_damaged(tmp_path):
    for step in (10, 20):
        cut(checkpoint.save(tmp_path, state(step), step=step, keep=2))
    with pytest.raises(MusterError, match="can't be read"):
        checkpoint.load_newest(tmp_path)


def test_without_the_pointer_the_newest_counts(tmp_path):
    for step in (10, 20):
        checkpoint.save(tmp_path, state(step), step=step, keep=2)
    (checkpoint.folder_of(tmp_path) / "latest").unlink()
    assert checkpoint.load_newest(tmp_path)[0].name == "step-00000020.pt"


def test_files_that_are_no_checkpoints(tmp_path):
    torch.save({"weights": 1}, tmp_path / "other.pt")
    with pytest.raises(MusterError, match="no checkpoint of this program"):
        checkpoint.load(tmp_path / "other.pt")
    with pytest.raises(MusterError, match="no such checkpoint"):
        checkpoint.load(tmp_path / "none.pt")


def test_nothing_is_executed(tmp_path):
    class Evil:
        def __reduce__(self):
            return (os.mkdir, (str(tmp_path / "pwned"),))

    torch.save({"format": 1, "model": Evil()}, tmp_path / "zip.pt")
    (tmp_path / "plain.pt").write_bytes(pickle.dumps({"format": 1, "model": Evil()}))
    for name in ("zip.pt", "plain.pt"):
        with pytest.raises(MusterError, match="can't be read"):
            checkpoint.load(tmp_path / name)
    assert not (tmp_path / "pwned").exists()


def save_beyond_the_limit(tmp_path, size):
    """Saves with files limited to 1 MB: as on a full disk, writing fails midway."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, hard))
    try:
        checkpoint.save(tmp_path, state(20, size), step=20, keep=2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


# Fails in the middle of a tensor, in the zip's directory at the end.
@pytest.mark.parametrize("size", [1_000_000, 249_700])
def test_a_file_that_may_not_grow_leaves_the_last_good_one(tmp_path, size):
    checkpoint.save(tmp_path, state(10), step=10, keep=2)
    with pytest.raises(MusterError, match="could not be written") as raised:
        save_beyond_the_limit(tmp_path, size)
    assert raised.value.code == 1
    assert "step-00000010.pt" in raised.value.seen
    assert len(str(raised.value).splitlines()) == 3
    assert names(tmp_path) == ["latest", "step-00000010.pt"]
    assert weight(checkpoint.load_newest(tmp_path)[0]) == 10


FULL_DISK = """
import subprocess, sys
from pathlib import Path
import torch
from train import checkpoint
from train.errors import MusterError
run = Path(sys.argv[1])
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", run], check=True)
state = lambda value, size: {"model": {"w": torch.full((size,), value)}}
checkpoint.save(run, state(10.0, 2000), step=10, keep=2)
try:
    checkpoint.save(run, state(20.0, 1_000_000), step=20, keep=2)
except MusterError as error:
    print(error, sorted(path.name for path in checkpoint.folder_of(run).iterdir()), sep="\\n")
"""


def test_a_full_disk_leaves_the_last_good_one(tmp_path):
    # A mount namespace of its own: the small disk is gone with the process.
    command = ["unshare", "--map-root-user", "--mount", sys.executable, "-c", FULL_DISK, str(tmp_path)]
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    ended = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    if "unshare failed" in ended.stderr or "permission denied" in ended.stderr:
        pytest.skip(f"needs leave to mount a small disk: {ended.stderr.strip().splitlines()[-1]}")
    assert ended.returncode == 0, ended.stderr
    wrong, *_, listing = ended.stdout.splitlines()
    assert "No space left on device" in wrong
    assert listing == "['latest', 'step-00000010.pt']"
