"""`--debug-distributed`: what it sets, what it leaves, and that trainings go on with it."""

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from muster.entrypoint.launch import debugging
from muster.errors import MusterError

Run = Callable[..., "subprocess.CompletedProcess[str]"]


def test_all_of_it_is_set_and_nothing_of_the_users() -> None:
    folder = debugging.folder_of("9.0", Path("/work 100%"))
    assert folder == Path("/work 100%/runs/debug-9.0")
    variables, notes = debugging.plan({"NCCL_DEBUG": "WARN"}, folder, has_gpus=True)
    assert variables["TORCH_DISTRIBUTED_DEBUG"] == "DETAIL"
    assert variables["NCCL_DEBUG_FILE"] == "/work 100%%/runs/debug-9.0/nccl.%h.%p.log"
    assert variables["TORCH_FR_DUMP_TEMP_FILE"].startswith("/work 100%/")
    assert "NCCL_DEBUG" not in variables
    assert "NCCL_DEBUG=WARN is yours: it was kept" in notes
    assert str(folder) in notes[0]


def test_what_crashes_over_gloo_is_not_asked_for() -> None:
    assert debugging.plan({}, Path("/a"), has_gpus=False)[0]["TORCH_DISTRIBUTED_DEBUG"] == "INFO"


def test_the_launch_is_one_word() -> None:
    assert debugging.folder_of("../a b", Path("/a")) == Path("/a/runs/debug-a-b")


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "runs").touch()
    with pytest.raises(MusterError, match="can't be made"):
        debugging.make(tmp_path / "runs" / "debug-1")


@pytest.mark.parametrize(("name", "arguments"), [("train", ["ddp"]), ("muster", ["doctor"]), ("muster", ["bench"])])
def test_dry_run_shows_it_and_makes_nothing(command: Run, tmp_path: Path, name: str, arguments: list[str]) -> None:
    answer = command(name, *arguments, "--dry-run", "--debug-distributed", cwd=tmp_path)
    assert answer.returncode == 0, answer.stderr
    assert "export NCCL_DEBUG=INFO" in answer.stdout
    assert "export TORCH_LOGS=distributed" in answer.stdout
    assert not os.listdir(tmp_path)


@pytest.mark.process
@pytest.mark.parametrize(("strategy", "given"), [("ddp", "DETAIL"), pytest.param("fsdp", "", marks=pytest.mark.full)])
def test_trainings_go_on(command: Run, tmp_path: Path, strategy: str, given: str) -> None:
    """Over gloo also where the user asks for what makes DistributedDataParallel crash."""
    small = ["--data=synthetic", "--num-samples=16", "--batch-size=4", "--image-size=8", "--max-steps=2"]
    env = {"OMP_NUM_THREADS": "1"} | ({"TORCH_DISTRIBUTED_DEBUG": given} if given else {})
    answer = command("train", strategy, *small, "--debug-distributed", cwd=tmp_path, env=env, timeout=240)
    assert answer.returncode == 0, answer.stderr
    assert "validation accuracy" in answer.stdout
    (folder,) = tmp_path.glob("runs/debug-*")
    assert f"goes to {folder}" in answer.stderr
