"""The storage for checkpoints."""

import errno
import shutil
import subprocess
from pathlib import Path

import pytest

from muster import processes
from muster.check.doctor import storage, storage_probe
from muster.check.doctor.storage import Space
from muster.check.options import DoctorOptions
from muster.train.distributed.world import World
from tests.check.doctor.healthy import healthy, only, with_node


def test_the_room_in_a_folder(tmp_path: Path) -> None:
    found = storage_probe.measure(str(tmp_path / "new" / "folder"))
    assert found["path"] == str(tmp_path)
    assert 0 < found["free"] <= found["size"]
    assert found["free"] == pytest.approx(shutil.disk_usage(tmp_path).free, rel=0.2)  # others write there too
    assert "trouble" not in found
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").touch()
    assert storage.measure(str(tmp_path / "file" / "runs")).trouble == "Not a directory"


def test_a_file_system_that_does_not_answer_is_not_waited_for(tmp_path: Path) -> None:
    assert storage.measure(str(tmp_path), limit_s=0).trouble == "the file system did not answer within 0 s"


def test_a_rank_that_waits_for_a_file_system_is_not_missed_by_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(command: list[str], *, timeout_s: float) -> None:
        raise subprocess.TimeoutExpired(command, timeout_s)

    monkeypatch.setattr(processes, "run", run)
    told = storage.gather(World(host="a", hosts=("a",)), DoctorOptions(timeout_s=10))
    assert told is not None
    assert told.checkpoints.trouble == "the file system did not answer within 5 s"


def test_a_probe_that_can_not_be_started_costs_only_its_own_fact(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*_: object, **__: object) -> None:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")  # the user has too many processes

    monkeypatch.setattr(processes, "run", run)
    assert storage.measure("/dev/shm").trouble == "the check ended without an answer"


def test_where_checkpoints_go() -> None:
    full = Space(path="/scratch", size=10**12, free=0, trouble="No space left on device")
    finding = only(with_node(healthy(), "node02", checkpoints=full))
    assert (finding.host, finding.about, finding.level) == ("node02", "checkpoints", "failed")
    assert finding.seen == "/scratch: No space left on device, 0 free"
    nearly = Space(path="/scratch", size=10**12, free=500 * 2**20)
    assert only(with_node(healthy(), "node02", checkpoints=nearly)).level == "warning"
    gone = Space(path="/scratch", trouble="the file system did not answer within 5 s")
    assert "did not answer" in only(with_node(healthy(), "node02", checkpoints=gone)).seen
