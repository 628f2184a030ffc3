"""Software that is not the same on all nodes, and where it is read."""

import hashlib
from pathlib import Path

import torch

from muster.check.doctor import software
from tests.check.doctor.healthy import healthy, only, with_node


def test_an_image_tells_its_version_and_lock(tmp_path: Path) -> None:
    (tmp_path / "image.json").write_text('{"version": "1.2.0", "revision": "abc", "lock_sha256": "d"}')
    found = software.gather_from(tmp_path)
    assert (found.image, found.revision, found.lock) == ("1.2.0", "abc", "d")
    (tmp_path / "image.json").write_text("{")
    assert software.gather_from(tmp_path).image is None


def test_a_checkout_tells_the_lock_of_its_torch_and_its_own_files(tmp_path: Path) -> None:
    lock = f"torch==0.1 \\\n\ntorch=={torch.__version__.partition('+')[0]} \\\n"
    (tmp_path / "requirements.lock").write_text(lock)
    assert software.gather_from(tmp_path).lock == hashlib.sha256(lock.encode()).hexdigest()
    (tmp_path / "requirements.lock").write_text("torch==0.1 \\\n")
    assert software.lock(tmp_path) is None
    before = software.code(tmp_path)
    (tmp_path / "muster").mkdir()
    (tmp_path / "muster" / "x.py").write_text("1")
    assert software.code(tmp_path) != before


def test_of_two_nodes_none_is_called_the_right_one() -> None:
    finding = only(with_node(healthy(2), "node02", lock="d" * 64))
    assert finding.host == "node01, node02"
    assert finding.wrong == "not all nodes have the same lock"
    assert finding.seen == "aaaaaaaaaaaa on node01, dddddddddddd on node02"


def test_among_64_nodes_two_odd_ones_are_named_and_the_text_stays_short() -> None:
    told = with_node(with_node(healthy(64, 8), "node17", torch="2.9.1"), "node40", torch="2.9.1")
    finding = only(told)
    assert finding.host == "node17, node40"
    assert finding.seen.endswith("on node01, node02, node03, node04 and 58 more")
