"""`train export`: the weights of a checkpoint in one file that torch and torchvision read."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torchvision

from muster.errors import MusterError
from muster.train.checkpoint import manager as checkpoint, storage
from muster.train.export import export, main
from tests.train.comparing import DIGITS, save

ROOT = Path(__file__).parents[2]


@pytest.mark.process
def test_torchvision_reads_what_fsdp_has_trained(train, tmp_path):
    argv = ["fsdp", *DIGITS, "--no-bf16", "--max-steps=2", "--name=run", f"--runs-dir={tmp_path}"]
    train(argv, 2, ok=True)
    argv = ["train", "export", str(tmp_path / "run")]
    code = f"import sys; sys.argv = {argv}; from muster.entrypoint.cli import train; train()"
    env = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"}
    ended = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=240
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "weights.pt" in ended.stdout
    weights = torch.load(tmp_path / "run" / "weights.pt", weights_only=True)
    model = torchvision.models.resnet18(num_classes=10)
    model.load_state_dict(weights)
    _, state, _ = checkpoint.load_newest(tmp_path / "run")
    assert all(torch.equal(tensor, state["model"][name]) for name, tensor in model.state_dict().items())


def test_export_finds_checkpoints_and_refuses_the_rest(tmp_path):
    for name in ("run", "step-7", "checkpoints"):
        (tmp_path / name).mkdir()
    path = save(tmp_path / "run", {"model": {"w": torch.ones(3)}}, step=1, keep=1)
    assert export(path, tmp_path / "a.pt") == (path, tmp_path / "a.pt")
    assert export(path.parent, None) == (path, tmp_path / "run" / "weights.pt")
    within = save(tmp_path / "checkpoints", {"model": {"w": torch.ones(3)}}, step=1, keep=1)  # a run of that name
    assert export(tmp_path / "checkpoints", None) == (within, tmp_path / "checkpoints" / "weights.pt")
    named = save(tmp_path / "step-7", {"model": {"w": torch.ones(3)}}, step=1, keep=1)
    assert export(named.parent.parent, None) == (named, tmp_path / "step-7" / "weights.pt")
    copied = shutil.copytree(path, tmp_path / "best")
    assert export(copied, tmp_path / "best.pt") == (copied, tmp_path / "best.pt")
    with pytest.raises(MusterError, match="no checkpoint") as raised:
        export(tmp_path, None)
    assert "--resume" not in raised.value.fix
    assert torch.equal(torch.load(tmp_path / "a.pt", weights_only=True)["w"], torch.ones(3))
    with pytest.raises(MusterError, match="already"):
        export(tmp_path / "run", tmp_path / "a.pt")
    for name in ("none", "n" * 300):  # the second name is too long for any file system
        with pytest.raises(MusterError, match="no such run"):
            export(tmp_path / name, None)
    for name in ("no/folder.pt", "n" * 300):
        with pytest.raises(MusterError, match="could not be written") as raised:
            export(tmp_path / "run", tmp_path / name)
        assert raised.value.code == 1
    (path / "rank-00000").write_bytes(b"x" * 12)
    with pytest.raises(MusterError, match="wrong checksum") as raised:
        export(path, tmp_path / "b.pt")
    assert "run's folder" in raised.value.fix
    assert "--resume" not in raised.value.fix


@pytest.mark.parametrize(
    ("inside", "typed", "written"),
    [
        (".", ".", "weights.pt"),
        ("checkpoints", ".", "weights.pt"),
        ("checkpoints", "..", "weights.pt"),
        ("checkpoints/step-00000001", ".", "checkpoints/weights.pt"),
        ("checkpoints/step-00000001", "..", "weights.pt"),
    ],
)
def test_paths_relative_to_the_current_folder(tmp_path, monkeypatch, inside, typed, written):
    run = tmp_path / "run"
    run.mkdir()
    path = save(run, {"model": {"w": torch.ones(3)}}, step=1, keep=1)
    files = sorted(path.iterdir())
    monkeypatch.chdir(run / inside)
    found, file = export(Path(typed), None)
    assert (found.resolve(), file.resolve()) == (path, run / written)
    assert sorted(path.iterdir()) == files


def test_a_run_of_another_user_that_is_closed_is_told(tmp_path, request):
    (tmp_path / "run").mkdir()
    path = save(tmp_path / "run", {"model": {"w": torch.ones(3)}}, step=1, keep=1).relative_to(tmp_path)
    for closed in (tmp_path / path, tmp_path / "run"):
        closed.chmod(0)
    request.getfixturevalue("as_other")
    for given, reason in ((Path("run"), "Permission denied"), (path, "no access")):
        with pytest.raises(MusterError, match=reason) as raised:
            export(given, Path("a.pt"))
        assert raised.value.seen == str(given)


def test_a_newer_checkpoint_that_is_gone_is_told(tmp_path, capsys):
    for step in (1, 2):
        newest = save(tmp_path, {"model": {"w": torch.ones(3)}}, step=step, keep=2)
    (newest / storage.INDEX).unlink()
    path, _ = export(tmp_path, None)
    assert path.name == "step-00000001"
    assert "note: checkpoint step-00000002 is skipped: it is gone, or has no index" in capsys.readouterr().err


def test_a_file_with_escape_codes_in_its_name_changes_no_terminal(tmp_path, monkeypatch, capsys):
    (tmp_path / "run").mkdir()
    save(tmp_path / "run", {"model": {"w": torch.ones(3)}}, step=1, keep=1)
    file = tmp_path / "a\x1b[31m\udcff.pt"
    monkeypatch.setattr("sys.argv", ["train export", str(tmp_path / "run"), "--to", str(file)])
    main()
    assert file.exists()
    assert "a\\x1b[31m\\udcff.pt: the weights" in capsys.readouterr().out
