"""Recorded environments: their format, what a recording contains and must not, and files that are no recordings."""

import os
from pathlib import Path

import pytest

from muster.entrypoint import recording
from muster.entrypoint.environment import Environment
from muster.errors import MusterError
from tests.entrypoint.conftest import Run

SECRETS = {
    "SLURM_JWT": "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiJ1In0.c2ln",
    "PBS_JOBCOOKIE": "abcdef",
    "WANDB_API_KEY": "hidden",
    "HF_TOKEN": "hidden",
    "HTTPS_PROXY": "http://user:hidden@proxy:3128",
    "OMPI_MCA_orte_precondition_transports": "0011223344556677-8899aabbccddeeff",
    "APPTAINER_DOCKER_PASSWORD": "hidden",
    "MUSTER_URL": "https://user:hidden@host/",
    "MUSTER_ARGS": "--epochs 3 --api-key hidden",
    "MUSTER_APIKEY": "hidden",
    "MUSTER_REMOTE": "https://hidden@host/repository",
    "MUSTER_DATA": "https://host/file?version=1&token=hidden",
    "MUSTER_FILE": "https://account.blob.core.windows.net/data?sv=2024&sr=c&sig=hidden%3D",
    "MUSTER_HEADER": "Authorization: Bearer hidden",
    "LSB_JOBNAME": "HF_TOKEN=hidden train ddp",
    "MUSTER_HUB": "--hub hf_hiddenHIDDENhidden0123",
    "MUSTER_MORE": "--http-auth hidden --db-passwd=hidden",
    "MUSTER_LONG": f"eyJ{'a' * 2000}.{'z' * 2000}.c",
    "SLURM_COMMENT": "line\nhidden",
    "SLURM_JOB_NAME": "\x1b]0;hidden\x07",
    "PBS_JOBNAME": "hidden\udcff",
    "AWS_SECRET_ACCESS_KEY": "hidden",
    "SSH_AUTH_SOCK": "/tmp/hidden",
    "JOB_PASSWD": "hidden",
    "OLDPWD": "/home/hidden",
    "PERL5LIB": "/home/hidden",
}


def test_comments_variables_and_files(tmp_path: Path) -> None:
    file = tmp_path / "job.env"
    file.write_text(
        "# source: OpenPBS\n# host: n2\n#host of nothing\nA=1=2\nEMPTY=\n\n--- file PBS_NODEFILE\nn1\nn2\n--- file X\n"
    )
    env = recording.load(file)
    assert dict(env) == {"A": "1=2", "EMPTY": ""}
    assert env.host == "n2"
    assert env.files == {"PBS_NODEFILE": "n1\nn2\n", "X": ""}
    assert not env.is_live


def test_a_recording_without_a_host(tmp_path: Path) -> None:
    file = tmp_path / "job.env"
    file.write_text("A=1\n")
    assert recording.load(file).host is None


def test_what_env_prints_is_read_where_environment_modules_are(tmp_path: Path) -> None:
    """Functions of bash, values of several lines, and bytes that are no UTF-8."""
    file = tmp_path / "job.env"
    file.write_bytes(
        b'A=1\nBASH_FUNC_module%%=() {  local x=1;\nSLURM_JOB_ID=7\n if [ -n "$a" ]; then\n    x=2\n fi\n}\n'
        b"TEXT=first\n second = x\n}\nthird\nB=2\nwith.a.dot=3\nPET_$(touch /tmp/owned)=4\n"
        b"SEPARATED=a\xe2\x80\xa8b\x0bc\nLATIN=\xe4\nCRLF=x\r\n"
        b"BASH_FUNC_which%%=() {  ( alias;\n eval ${which_declare} )\n}\nSLURM_PROCID=3\n"
    )
    assert dict(recording.load(file)) == {
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
        recording.load(file)


@pytest.mark.parametrize("content", [b"no equals sign\n", b"=value\n", b"\xff\xfe\n"])
def test_a_file_that_is_no_recording(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "job.env"
    file.write_bytes(content)
    with pytest.raises(MusterError) as refusal:
        recording.load(file)
    assert str(file) in refusal.value.seen


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(MusterError, match="can't be read"):
        recording.load(tmp_path / "none")


def test_what_was_recorded_is_detected_alike(tmp_path: Path) -> None:
    nodes = tmp_path / "nodes"
    nodes.write_text("n1\nn2\n")
    apinfo = tmp_path / "apinfo"
    apinfo.write_bytes(b"\x01\x00\xff")
    variables = {
        "PALS_APINFO": str(apinfo),
        "PBS_JOBID": "4.head",
        "PBS_NODEFILE": str(nodes),
        "PMI_RANK": "1",
        "RANK": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    env = Environment({**variables, **SECRETS, "HOME": "/home/x", "PATH": "/bin"}, host="n2", is_live=True)
    file = tmp_path / "job.env"
    recording.save(env, file)
    read = recording.load(file)
    assert dict(read) == variables
    assert (read.host, read.files) == ("n2", {"PBS_NODEFILE": "n1\nn2\n", "PALS_APINFO": "0100ff\n"})


def test_what_was_recorded_elsewhere_can_be_recorded_again(tmp_path: Path) -> None:
    """The new recording has the files of the first one, not those that this host has at the same paths."""
    here, first, second = tmp_path / "nodes", tmp_path / "first.env", tmp_path / "second.env"
    here.write_text("here\n")
    first.write_bytes(
        os.fsencode(f"# host: n2\nPBS_NODEFILE={here}\nPBS_TOKEN=x\n--- file PBS_NODEFILE\nn1\nn\udce9\n")
    )
    recording.save(recording.load(first), second)
    read = recording.load(second)
    assert (read.host, read.files) == ("n2", {"PBS_NODEFILE": "n1\nn?\n"})
    assert "PBS_TOKEN" not in second.read_text()


def test_no_secret_is_in_it() -> None:
    text = recording.as_recording(Environment(SECRETS, host="n2"))
    assert not [name for name, value in SECRETS.items() if name in text or value in text]
    assert "# left out: 19" in text


@pytest.mark.parametrize(
    "value", ["-" * 120_000, "eyJaaaaaaaaaa-" * 8_000, "f" * 120_000 + "g", "-key" * 30_000, "hf_" * 40_000]
)
def test_a_long_value_takes_no_hours(command: Run, tmp_path: Path, value: str) -> None:
    """A recording may come from anybody. The time for these values once grew with the square of their length."""
    file = tmp_path / "job.env"
    file.write_text(f"MUSTER_TEXT={value}\n" + "BASH_FUNC_x%%=() {\n" * 200_000)
    answer = command("muster", "detect", "--env-file", str(file), "--record", str(tmp_path / "again.env"))
    assert answer.returncode == 0
    assert f"MUSTER_TEXT={value}\n" in (tmp_path / "again.env").read_text()


def test_a_file_is_never_written_over(tmp_path: Path) -> None:
    file = tmp_path / "job.env"
    file.write_text("mine")
    with pytest.raises(MusterError, match="File exists"):
        recording.save(Environment({}), file)
    assert file.read_text() == "mine"
