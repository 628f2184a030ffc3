"""The output of `muster version`, compared with torch's own versions, and with libraries that come from no wheel."""

import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from muster.check import versions
from muster.entrypoint import version
from muster.errors import MusterError
from muster.paths import installed
from tests.entrypoint import standins
from tests.entrypoint.conftest import clean_environment
from tests.entrypoint.test_cli import three_lines

Run = Callable[..., "subprocess.CompletedProcess[str]"]

KEYS = {
    *("image", "version", "revision", "lock_sha256", "python", "torch", "torchvision", "cuda", "nccl", "cudnn"),
    *("driver", "glibc", "machine"),
}
IMAGE = {
    "version": "1.2.3",
    "revision": "0123456789abcdef0123456789abcdef01234567",
    "lock": "requirements-cuda12.lock",
    "lock_sha256": "ab" * 32,
    "base": "docker.io/nvidia/cuda:12.8.1-base-ubuntu24.04",
    "created": "2026-11-20T11:00:00Z",
}
TORCHS_OWN = """
import json, platform, torch, torchvision
print(json.dumps({
    "python": platform.python_version(), "torch": torch.__version__, "cuda": torch.version.cuda,
    "torchvision": torchvision.__version__.partition("+")[0], "machine": platform.machine(),
}))
"""


@cache
def told() -> dict[str, Any]:
    """The output of `muster version --json` on this machine."""
    env = {name: value for name, value in clean_environment().items() if name != "HOME"}
    answer = subprocess.run(
        [str(Path(sys.executable).parent / "muster"), "version", "--json"], env=env, cwd="/", capture_output=True,
        text=True, timeout=240, check=True,
    )  # fmt: skip
    return json.loads(answer.stdout)


@pytest.mark.process
def test_the_versions_are_those_that_torch_tells() -> None:
    assert set(told()) == KEYS
    answer = subprocess.run(
        [sys.executable, "-c", TORCHS_OWN],
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=240,
        check=True,
    )
    own = json.loads(answer.stdout)
    assert {name: told()[name] for name in own} == own
    assert told()["version"] == installed("muster")


@pytest.mark.process
def test_the_nccl_is_the_file_that_this_torch_brings() -> None:
    nccl = told()["nccl"]
    if told()["cuda"] is None:
        assert nccl is None
        return
    path = Path(nccl["path"])
    assert path.is_file()
    torch = importlib.util.find_spec("torch")
    assert torch is not None
    assert torch.origin is not None
    assert path.is_relative_to(Path(torch.origin).resolve().parent.parent)
    # The file itself contains the version too: "NCCL version 2.30.7+cuda13.2".
    assert f"NCCL version {nccl['version']}+cuda".encode() in path.read_bytes()


@pytest.mark.process
def test_an_nccl_put_before_torchs_own_is_the_one_that_is_told(command: Run, tmp_path: Path) -> None:
    if told()["nccl"] is None:
        pytest.skip("needs a torch with NCCL")
    library = standins.libnccl(tmp_path / "site" / "libnccl.so.2", 21905)
    answer = command("muster", "version", "--json", env={"LD_PRELOAD": str(library)})
    assert answer.returncode == 0, answer.stderr
    assert json.loads(answer.stdout)["nccl"] == {"version": "2.19.5", "path": str(library)}


@pytest.mark.parametrize(("number", "text"), [(23007, "2.30.7"), (21905, "2.19.5"), (91002, "9.10.2")])
def test_an_nccls_number_is_a_version(number: int, text: str) -> None:
    assert versions.dotted(number) == text


@pytest.mark.process
def test_the_driver_that_programs_here_will_find(command: Run, tmp_path: Path) -> None:
    folder = standins.libcuda(tmp_path / "driver", 12040).parent
    answer = command("muster", "version", "--json", env={"LD_LIBRARY_PATH": str(folder)})
    assert json.loads(answer.stdout)["driver"]["cuda"] == "12.4"


@pytest.mark.process
def test_a_person_sees_a_line_for_each(command: Run) -> None:
    answer = command("muster", "version", env={"COLUMNS": "40"})
    assert (answer.returncode, answer.stderr) == (0, "")
    names = ["muster", "image", "lock", "python", "torch", "torchvision", "NCCL", "cuDNN", "driver", "glibc", "machine"]
    assert [line.split()[0] for line in answer.stdout.splitlines()] == names
    # The values are in one column, and none is wrapped.
    assert {line[11:13] for line in answer.stdout.splitlines()} == {"  "}
    assert f"torch        {told()['torch']}, " in answer.stdout


@pytest.mark.process
def test_a_torch_that_does_not_load_is_told_in_three_lines(command: Run, tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('libcudart.so.13: cannot open shared object file')\n")
    answer = command("muster", "version", env={"PYTHONPATH": str(tmp_path)})
    assert (answer.returncode, answer.stdout) == (1, "")
    assert three_lines(answer.stderr)[1] == "ImportError: libcudart.so.13: cannot open shared object file"


def test_an_unknown_option_is_refused_as_everywhere(command: Run) -> None:
    answer = command("muster", "version", "--jsn")
    assert answer.returncode == 2
    assert "--json" in three_lines(answer.stderr)[2]


def test_a_torch_that_takes_too_long_is_told_by_its_deadline() -> None:
    with pytest.raises(MusterError, match="torch can't be loaded") as late:
        version.values(timeout_s=0.001)
    assert "no answer within 0.001 s" in late.value.seen


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> Mapping[str, Any]:
    """Replaces the process that loads torch, in tests of the other values."""
    found = {"torch": "2.15.0+cu132", "nccl": None, "cuda": None, "cudnn": None, "torchvision": None}
    found |= {"python": "3.11.2", "glibc": "2.36", "machine": "x86_64"}
    monkeypatch.setattr(version, "_loaded", lambda timeout_s: found)
    return found


def test_in_an_image_its_own_description_wins(loaded: Mapping[str, Any], tmp_path: Path) -> None:
    (tmp_path / "image.json").write_text(json.dumps(IMAGE))
    found = version.values(tmp_path)
    assert found["image"] == IMAGE
    assert [found[name] for name in ("version", "revision", "lock_sha256")] == ["1.2.3", IMAGE["revision"], "ab" * 32]
    lines = version.text(found).splitlines()
    assert lines[:3] == [
        "muster       1.2.3, revision 0123456789ab",
        "image        made 2026-11-20T11:00:00Z on docker.io/nvidia/cuda:12.8.1-base-ubuntu24.04",
        f"lock         requirements-cuda12.lock, sha256 {'ab' * 32}",
    ]
