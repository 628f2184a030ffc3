"""The files of a run: versions of the software in its summary, numbers in JSON, and metrics.jsonl."""

import importlib.metadata
import json
import math
import os

import pytest

from muster.errors import MusterError
from muster.train.reporting.summary import Log, strict_json, versions


def test_a_torchvision_without_metadata_ends_no_run(monkeypatch):
    assert versions()["torchvision"] == importlib.metadata.version("torchvision")
    monkeypatch.setattr(importlib.metadata, "distributions", lambda **_: iter(()))
    assert versions()["torchvision"] is None


def test_a_loss_that_is_no_number_is_null_in_the_file():
    text = strict_json({"final_valid_loss": math.nan, "epochs": [{"valid_loss": math.inf, "step": 3}], "lr": 1e-05})
    assert json.loads(text) == {"final_valid_loss": None, "epochs": [{"valid_loss": None, "step": 3}], "lr": 1e-05}


def test_a_folder_in_place_of_metrics_is_reported_and_a_pipe_is_replaced(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.mkdir()
    with pytest.raises(MusterError, match="could not be written: Is a directory"):
        Log(tmp_path, 0)
    path.rmdir()
    os.mkfifo(path)  # a reader would wait for ever
    Log(tmp_path, 0).write({"step": 1})
    assert path.read_text() == '{"step": 1}\n'


def test_damaged_lines_of_metrics_are_left_out_and_an_unreadable_file_is_reported(tmp_path, request):
    path = tmp_path / "metrics.jsonl"
    kept = json.dumps({"kind": "steps", "step": 1, "seconds": 2.5})
    path.write_text("\n".join(["[" * 100_000, json.dumps({"kind": "steps", "step": 1, "seconds": 10**400}), kept]))
    assert Log(tmp_path, 1).seconds == 2.5
    assert path.read_text() == f"{kept}\n"
    path.chmod(0)
    request.getfixturevalue("as_other")
    with pytest.raises(MusterError, match="Permission denied"):
        Log(tmp_path, 1)
