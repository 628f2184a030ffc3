"""Lines that tell the user what is being done while it takes long."""

import time

import pytest

from muster.errors import notify_if_slow


def test_what_takes_long_is_printed_once_and_by_one_rank(capsys: pytest.CaptureFixture[str]) -> None:
    with notify_if_slow("loading a model"):
        pass
    said, deadline = "", time.monotonic() + 20
    with notify_if_slow("loading PyTorch"), notify_if_slow("loading PyTorch", is_shown=False):
        while not said and time.monotonic() < deadline:
            time.sleep(0.2)
            said = capsys.readouterr().err
        time.sleep(0.2)  # in which the others could print a line
    assert said + capsys.readouterr().err == "muster: loading PyTorch ...\n"
