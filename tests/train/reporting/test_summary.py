"""What the summary of a run says of the software, and how it is written."""

import importlib.metadata
import json
import math

from muster.train.reporting.summary import strict_json, versions


def test_a_torchvision_without_metadata_ends_no_run(monkeypatch):
    assert versions()["torchvision"] == importlib.metadata.version("torchvision")
    monkeypatch.setattr(importlib.metadata, "distributions", lambda **_: iter(()))
    assert versions()["torchvision"] is None


def test_a_loss_that_is_no_number_is_null_in_the_file():
    text = strict_json({"final_valid_loss": math.nan, "epochs": [{"valid_loss": math.inf, "step": 3}], "lr": 1e-05})
    assert json.loads(text) == {"final_valid_loss": None, "epochs": [{"valid_loss": None, "step": 3}], "lr": 1e-05}
