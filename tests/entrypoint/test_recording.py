"""What a recording holds, and what it must not."""

from pathlib import Path

import pytest

from muster.entrypoint import environment
from muster.entrypoint.environment import Environment
from muster.errors import MusterError

SECRETS = {
    "SLURM_JWT": "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiJ1In0.c2ln",
    "PBS_JOBCOOKIE": "abcdef",
    "WANDB_API_KEY": "hidden",
    "HF_TOKEN": "hidden",
    "HTTPS_PROXY": "http://user:hidden@proxy:3128",
    "OMPI_MCA_orte_precondition_transports": "0011223344556677-8899aabbccddeeff",
    "APPTAINER_DOCKER_PASSWORD": "hidden",
    "MUSTER_URL": "https://user:hidden@host/",
    "SLURM_COMMENT": "line\nhidden",
    "AWS_SECRET_ACCESS_KEY": "hidden",
    "SSH_AUTH_SOCK": "/tmp/hidden",
    "JOB_PASSWD": "hidden",
    "OLDPWD": "/home/hidden",
    "PERL5LIB": "/home/hidden",
}


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
    environment.save(env, file)
    read = environment.load(file)
    assert dict(read) == variables
    assert (read.host, read.files) == ("n2", {"PBS_NODEFILE": "n1\nn2\n", "PALS_APINFO": "0100ff\n"})


def test_no_secret_is_in_it() -> None:
    text = environment.as_recording(Environment(SECRETS, host="n2"))
    assert not [name for name, value in SECRETS.items() if name in text or value in text]
    assert "# left out: 7" in text


def test_a_file_is_never_written_over(tmp_path: Path) -> None:
    file = tmp_path / "job.env"
    file.write_text("mine")
    with pytest.raises(MusterError, match="File exists"):
        environment.save(Environment({}), file)
    assert file.read_text() == "mine"
