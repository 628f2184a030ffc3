"""`--debug-distributed`: the variables that it sets, those of the user that it keeps, and trainings with it."""

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from muster.entrypoint.launch import start
from muster.errors import MusterError

Run = Callable[..., "subprocess.CompletedProcess[str]"]


def test_all_variables_are_set_except_those_of_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    work = tmp_path / "work 100%"
    work.mkdir()
    monkeypatch.chdir(work)
    found = start.debug_settings({"NCCL_DEBUG": "WARN"}, "9.0", has_gpus=True)
    assert found.variables["TORCH_DISTRIBUTED_DEBUG"] == "DETAIL"
    assert found.variables["NCCL_DEBUG_FILE"] == f"{tmp_path}/work 100%%/runs/debug-9.0/nccl.%h.%p.log"
    assert found.variables["TORCH_FR_DUMP_TEMP_FILE"].startswith(f"{work}/runs/debug-9.0/")
    assert "NCCL_DEBUG" not in found.variables
    assert "NCCL_DEBUG=WARN is yours: it was kept" in found.notes
    assert str(work / "runs" / "debug-9.0") in found.notes[0]


def test_what_crashes_over_gloo_is_not_asked_for() -> None:
    assert start.debug_settings({}, "1", has_gpus=False).variables["TORCH_DISTRIBUTED_DEBUG"] == "INFO"


def test_the_folder_stays_below_this_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (folder,) = start.debug_settings({}, "../a b", has_gpus=False).folders
    assert folder.path == tmp_path / "runs" / "debug-a-b"
    for _ in range(2):  # the ranks of a node share it
        folder.make()
    assert folder.path.is_dir()


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").touch()
    (folder,) = start.debug_settings({}, "1", has_gpus=False).folders
    with pytest.raises(MusterError, match="can't be made"):
        folder.make()


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
    """Over gloo even where the user sets DETAIL, with which DistributedDataParallel would crash."""
    small = ["--data=synthetic", "--num-samples=16", "--batch-size=4", "--image-size=8", "--max-steps=2"]
    env = {"OMP_NUM_THREADS": "1"} | ({"TORCH_DISTRIBUTED_DEBUG": given} if given else {})
    answer = command("train", strategy, *small, "--debug-distributed", cwd=tmp_path, env=env, timeout=240)
    assert answer.returncode == 0, answer.stderr
    assert "validation accuracy" in answer.stdout
    (folder,) = tmp_path.glob("runs/debug-*")
    assert f"files are written to {folder}" in answer.stderr
