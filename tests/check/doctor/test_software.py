"""Software that differs between nodes, and the files from which its versions are read."""

from pathlib import Path

import pytest

from muster.check.doctor import software
from muster.check.options import DoctorOptions
from muster.train.distributed.world import World
from tests.check.doctor.healthy import healthy, only, with_node


def test_an_image_tells_its_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(software, "ROOT", tmp_path)
    for text, told in (
        ('{"version": "1.2.0", "revision": "abc"}', "1.2.0 (abc)"),
        ('{"version": "1.2.0", "revision": null}', "1.2.0"),
        ("{", "none"),
    ):
        (tmp_path / "image.json").write_text(text)
        found = software.gather(World(host="a", hosts=("a",)), DoctorOptions(device="cpu"))
        assert found is not None
        assert found.image == told


def test_a_checkout_tells_its_own_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(software, "ROOT", tmp_path)
    before = software.code()
    (tmp_path / "muster").mkdir()
    (tmp_path / "muster" / "x.py").write_text("1")
    assert software.code() != before


def test_of_two_nodes_none_is_called_the_right_one() -> None:
    finding = only(with_node(healthy(2), "node02", code="d" * 12))
    assert finding.host == "node01, node02"
    assert finding.wrong == "not all nodes have the same code of this project"
    assert finding.seen == "cccccccccccc on node01, dddddddddddd on node02"


def test_among_64_nodes_two_odd_ones_are_named_and_the_text_stays_short() -> None:
    told = with_node(with_node(healthy(64, 8), "node17", torch="2.9.1"), "node40", torch="2.9.1")
    finding = only(told)
    assert finding.host == "node17, node40"
    assert finding.seen.endswith("on node01, node02, node03, node04 and 58 more")
