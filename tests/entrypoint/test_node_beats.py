"""What a node's agent tells the others of its workers' ends."""

from types import SimpleNamespace

import pytest

from muster.entrypoint.node_beats import cause_of


@pytest.mark.parametrize(
    ("codes", "rank"),
    [
        ({4: -9}, 4),
        # torchrun ends the others by SIGTERM, and counts them as failures too.
        ({4: -15, 5: -9}, 5),
        ({4: -15, 5: 1}, 5),
        ({4: 1, 5: -9, 6: -15}, 5),
        ({4: -15, 5: 2}, 5),
        # A scheduler's warning.
        ({4: -15, 5: -15}, None),
        ({4: -10}, None),
        ({4: 75, 5: -9}, None),
    ],
)
def test_the_first_failure_is_none_of_a_warning(
    codes: dict[int, int], rank: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MUSTER_COMMAND", "train ddp")
    failures = {rank: SimpleNamespace(exitcode=code, timestamp=7) for rank, code in codes.items()}
    assert cause_of(failures) == rank
