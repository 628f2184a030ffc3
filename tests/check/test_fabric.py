"""The output of `muster fabric check`."""

import pytest

from muster.check import fabric


def test_control_characters_in_a_path_do_not_reach_the_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NCCL_NET_PLUGIN", "/nowhere/\x1b[31m.so")
    monkeypatch.setattr(fabric, "ALL", (fabric.plugin,))
    assert fabric.main([]) == 1
    said = capsys.readouterr().out
    assert said.startswith("plugin    failed  /nowhere/")
    assert "\x1b" not in said
