"""What the summary of a run says of the software."""

import importlib.metadata

from muster.train.reporting.summary import versions


def test_a_torchvision_without_metadata_ends_no_run(monkeypatch):
    assert versions()["torchvision"] == importlib.metadata.version("torchvision")
    monkeypatch.setattr(importlib.metadata, "distributions", lambda **_: iter(()))
    assert versions()["torchvision"] is None
