"""The image under an engine, as `docker run` users start it: podman here, whose options are docker's."""

import re
import subprocess
from pathlib import Path

import pytest

from muster.config import STRATEGIES
from tests.clusters.deadline import wait_for
from tests.image.conftest import FIRST_TEST_S
from tests.image.podman import Podman

pytestmark = [pytest.mark.image, pytest.mark.timeout(FIRST_TEST_S)]

TRAIN = ("train", "ddp", "--epochs=1", "--max-steps=2", "--name=try")
COMMANDS = [("train",), *(("train", strategy) for strategy in STRATEGIES), ("muster",)]
COMMANDS += [("muster", name) for name in ("detect", "env", "version", "run")]


def assert_trained(done: subprocess.CompletedProcess[str]) -> None:
    assert done.returncode == 0, done.stderr
    assert "1 node x 2 = 2 ranks" in done.stderr
    assert "validation accuracy" in done.stdout


def test_every_command_has_help(podman: Podman, image: str) -> None:
    script = "; ".join(f"{' '.join(words)} --help || echo FAILED {' '.join(words)}" for words in COMMANDS)
    done = podman.run(image, "sh", "-c", script)
    assert done.returncode == 0, done.stderr
    assert "FAILED" not in done.stdout
    assert done.stdout.count("Usage:") == len(COMMANDS)
    assert "Usage: muster" in podman.run(image).stdout


@pytest.mark.parametrize(
    "options",
    [
        ["--read-only", "--user=65534:65534", "--network=none"],
        pytest.param(
            ["--user=1000710000:0", "--cap-drop=all", "--security-opt=no-new-privileges"], marks=pytest.mark.long
        ),
    ],
    ids=["read-only, nobody, no network", "OpenShift"],
)
def test_trains(podman: Podman, image: str, options: list[str]) -> None:
    """test_readme.py does it as root."""
    assert_trained(podman.run(image, *TRAIN, options=options))


ANYONE = ["--read-only", "--user=65534", "--network=none"]


def test_compiles_as_anyone(podman: Podman, image: str) -> None:
    """With the image's compiler, and the headers of its Python."""
    code = "import torch; print(torch.compile(lambda x: (x.sin() + x.cos()).sum())(torch.zeros(8)).item())"
    done = podman.run(image, "python", "-c", code, options=ANYONE)
    assert done.stdout == "8.0\n", done.stderr


@pytest.mark.long  # the compiler takes minutes
def test_trains_compiled_as_anyone(podman: Podman, image: str) -> None:
    small = ["--model=gpt-tiny", "--data=synthetic", "--seq-len=32", "--num-samples=64", "--batch-size=2"]
    words = ["train", "single", *small, "--epochs=1", "--max-steps=2", "--compile=default", "--name=try"]
    done = podman.run(image, *words, options=ANYONE, timeout=900)
    assert done.returncode == 0, done.stderr
    assert "compiles at the first step" in done.stdout
    assert "validation perplexity" in done.stdout


@pytest.mark.long
def test_trains_without_any_temporary_folder(podman: Podman, image: str) -> None:
    """As docker's --read-only leaves it, which gives no /tmp."""
    done = podman.run(image, *TRAIN, options=["--read-only", "--read-only-tmpfs=false", "--user=65534"])
    assert_trained(done)
    assert "TMPDIR=/dev/shm" in done.stderr


def test_files_on_a_bind_mount_belong_to_the_caller(podman: Podman, image: str, somebody: Path) -> None:
    options = ["--user=65534:65534", f"--volume={somebody}:/workspace"]
    assert_trained(podman.run(image, *TRAIN, options=options))
    made = [path for path in somebody.rglob("*")]
    assert (somebody / "runs/try/summary.json") in made
    assert {(path.stat().st_uid, path.stat().st_gid) for path in made} == {(65534, 65534)}


@pytest.mark.long
def test_a_folder_that_the_user_may_not_write_is_told(podman: Podman, image: str, tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    done = podman.run(image, *TRAIN, options=["--user=65534", f"--volume={tmp_path}:/workspace"])
    assert done.returncode == 2
    assert "Permission denied" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_script_beside_the_users_own_train_py(podman: Podman, image: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("raise SystemExit('the wrong one')")
    # In one piece: the lines of both ranks go through one pipe.
    (tmp_path / "mine.py").write_text("import os, helper; os.write(1, f'rank {helper.rank()}\\n'.encode())")
    (tmp_path / "helper.py").write_text("import os\ndef rank(): return os.environ['RANK']")
    mount = f"--volume={tmp_path}:/workspace"
    done = podman.run(image, "muster", "run", "--nproc-per-node=2", "mine.py", options=[mount])
    assert done.returncode == 0, done.stderr
    assert sorted(re.findall(r"rank (\d)", done.stdout)) == ["0", "1"]
    assert_trained(podman.run(image, *TRAIN, options=[mount]))


@pytest.mark.parametrize(
    ("strategy", "entrypoint"),
    [
        pytest.param("single", True, id="single-docker", marks=pytest.mark.long),
        pytest.param("single", False, id="single-kubernetes", marks=pytest.mark.long),
        pytest.param("ddp", True, id="ddp-docker"),
        pytest.param("ddp", False, id="ddp-kubernetes", marks=pytest.mark.long),
    ],
)
def test_a_signal_reaches_the_trainer(podman: Podman, image: str, strategy: str, entrypoint: bool) -> None:
    """`docker stop` ends it at once, without the KILL after ten seconds; process 1 is no shell."""
    words = ["train", strategy, "--data=synthetic", "--image-size=32", "--epochs=100000"]
    if not entrypoint:
        # As Kubernetes starts `command: [train, ...]`.
        options = [f"--entrypoint={words[0]}"]
        words = words[1:]
    else:
        options = []
    with podman.started(image, *words, options=options) as container:
        wait_for("the training to begin", lambda: re.search(r"run +runs/", podman.logs(container)), 120, interval_s=0.5)
        first = podman("top", container, "pid", "comm").stdout.splitlines()[1].split()
        assert first[0] == "1"
        assert first[1] == "tini"
        podman("kill", "--signal=TERM", container)
        assert podman.wait(container, timeout=30) != 137


def test_shared_memory_that_is_too_small_is_told_before_a_worker_dies(podman: Podman, image: str) -> None:
    words = [
        "train",
        "single",
        "--data=fake",
        "--image-size=224",
        "--batch-size=64",
        "--train-num-workers=4",
        "--max-steps=4",
    ]
    done = podman.run(image, *words, options=["--shm-size=1m"])
    assert done.returncode == 2, done.stdout + done.stderr
    assert "/dev/shm" in done.stderr
    assert "--shm-size" in done.stderr
    assert "bus error" not in (done.stdout + done.stderr).lower()


def test_a_gpu_that_is_asked_for_and_not_there(podman: Podman, image: str) -> None:
    done = podman.run(image, "train", "ddp", "--device=cuda")
    assert done.returncode == 2
    assert "--gpus all" in done.stderr
