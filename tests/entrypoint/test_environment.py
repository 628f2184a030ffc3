"""Recorded environments: the format, and files that are none."""

from pathlib import Path

import pytest

from muster.entrypoint import environment
from muster.errors import MusterError


def test_comments_variables_and_files(tmp_path: Path) -> None:
    file = tmp_path / "job.env"
    file.write_text(
        "# source: OpenPBS\n# host: n2\n#host of nothing\nA=1=2\nEMPTY=\n\n--- file PBS_NODEFILE\nn1\nn2\n--- file X\n"
    )
    env = environment.load(file)
    assert dict(env) == {"A": "1=2", "EMPTY": ""}
    assert env.host == "n2"
    assert env.files == {"PBS_NODEFILE": "n1\nn2\n", "X": ""}
    assert not env.is_live


def test_a_recording_without_a_host(tmp_path: Path) -> None:
    file = tmp_path / "job.env"
    file.write_text("A=1\n")
    assert environment.load(file).host is None


@pytest.mark.parametrize("content", [b"no equals sign\n", b"=value\n", b"A=\xff\xfe\n"])
def test_a_file_that_is_no_recording(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "job.env"
    file.write_bytes(content)
    with pytest.raises(MusterError) as refusal:
        environment.load(file)
    assert str(file) in refusal.value.seen


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(MusterError, match="can't be read"):
        environment.load(tmp_path / "none")
