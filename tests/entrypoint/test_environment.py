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


def test_what_env_prints_is_read_where_environment_modules_are(tmp_path: Path) -> None:
    """Functions of bash, values of several lines, and bytes that are no UTF-8."""
    file = tmp_path / "job.env"
    file.write_bytes(
        b'A=1\nBASH_FUNC_module%%=() {  local x=1;\nSLURM_JOB_ID=7\n if [ -n "$a" ]; then\n    x=2\n fi\n}\n'
        b"TEXT=first\n second = x\n}\nthird\nB=2\nwith.a.dot=3\nPET_$(touch /tmp/owned)=4\n"
        b"SEPARATED=a\xe2\x80\xa8b\x0bc\nLATIN=\xe4\nCRLF=x\r\n"
        b"BASH_FUNC_which%%=() {  ( alias;\n eval ${which_declare} )\n}\nSLURM_PROCID=3\n"
    )
    assert dict(environment.load(file)) == {
        "A": "1",
        "TEXT": "first\n second = x\n}\nthird",
        "B": "2",
        "SEPARATED": "a\u2028b\x0bc",
        "LATIN": "\udce4",
        "CRLF": "x",
        "SLURM_PROCID": "3",
    }


def test_a_file_too_large_for_an_environment(tmp_path: Path) -> None:
    file = tmp_path / "job.env"
    file.write_bytes(b"A=1\n" * (5 << 20))
    with pytest.raises(MusterError, match="can't be read"):
        environment.load(file)


@pytest.mark.parametrize("content", [b"no equals sign\n", b"=value\n", b"\xff\xfe\n"])
def test_a_file_that_is_no_recording(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "job.env"
    file.write_bytes(content)
    with pytest.raises(MusterError) as refusal:
        environment.load(file)
    assert str(file) in refusal.value.seen


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(MusterError, match="can't be read"):
        environment.load(tmp_path / "none")
