"""The output of `muster fabric check`."""

import pytest

from muster.check import fabric


def test_what_a_file_or_the_environment_says_does_not_write_on_the_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NCCL_NET_PLUGIN", "/nowhere/\x1b[31m.so")
    monkeypatch.setattr(fabric, "ALL", (fabric.plugin,))
    assert fabric.main([]) == 1
    said = capsys.readouterr().out
    assert said.startswith("plugin    failed  /nowhere/")
    assert "\x1b" not in said
