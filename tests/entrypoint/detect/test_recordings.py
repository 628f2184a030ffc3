"""All of detection, on recorded and documented environments."""

import re

import pytest

from muster.errors import MusterError
from tests.entrypoint import recorded
from tests.entrypoint.recorded import Recording


def test_every_scenario_has_recordings() -> None:
    for folder in {recording.file.parent for recording in recorded.ALL}:
        text = (folder / "expected.toml").read_text()
        tables = [name.strip('"') for name in re.findall(r"^\[(.+)\]$", text, re.MULTILINE)]
        assert {recording.scenario for recording in recorded.ALL if recording.file.parent == folder} == set(tables)
    assert recorded.TASKS
    assert recorded.SHELLS
    assert recorded.REFUSED


@pytest.mark.parametrize("recording", recorded.TASKS, ids=str)
def test_a_task_knows_its_place(recording: Recording) -> None:
    expected, ranks = recording.expected, recorded.ranks_by_host(recording)
    node_rank = recording.nodes.index(recording.host)
    found = recorded.detect(recording.environment)
    assert list(found.hosts) == expected["hosts"]
    assert found.num_nodes == len(recording.nodes)
    assert found.node_rank == node_rank
    assert found.tasks_on_node == len(ranks[recording.host])
    assert found.mode == expected["mode"]
    assert found.scheduler == expected.get("scheduler", recording.file.parent.name.partition("_own")[0])
    assert found.launcher == expected.get("launcher", found.launcher)
    if found.mode == "worker":
        assert found.local_rank == ranks[recording.host].index(recording.rank)
        assert found.rank == recording.rank
        assert found.ranks_per_node == tuple(len(ranks[name]) for name in recording.nodes)
    else:
        assert found.local_rank == 0
        assert found.nproc_per_node == expected.get("nproc_per_node", 2)
        assert found.rank == node_rank * found.nproc_per_node


@pytest.mark.parametrize("recording", recorded.TASKS, ids=str)
def test_a_task_reports_its_assumptions_and_what_was_rejected(recording: Recording) -> None:
    found = recorded.detect(recording.environment)
    assert recording.expected.get("note", "") in "\n".join(found.notes)
    for start in recording.expected.get("rejected", []):
        assert [line for line in found.rejected if line.startswith(start)], found.rejected
    # These values have sources; the rank of a node's only process needs none.
    for name in ("scheduler", "launcher", "hosts", "num_nodes", "nproc_per_node"):
        assert found.sources[name], name


@pytest.mark.parametrize("recording", recorded.SHELLS, ids=str)
def test_what_is_no_task_of_several_nodes_is_refused_with_the_launch_line(recording: Recording) -> None:
    with pytest.raises(MusterError) as refusal:
        recorded.detect(recording.environment)
    assert refusal.value.code == 2
    assert refusal.value.fix == recording.expected["launch"]


@pytest.mark.parametrize("recording", recorded.REFUSED, ids=str)
def test_what_cannot_be_started_is_refused_with_the_reason(recording: Recording) -> None:
    with pytest.raises(MusterError, match=re.escape(recording.expected["refusal"])):
        recorded.detect(recording.environment)


def test_a_documented_environment_says_which_document() -> None:
    for recording in recorded.load("documented"):
        assert re.match(r"# source: documented: https://\S+\n", recording.file.read_text().replace(", ", "\n")), (
            recording
        )
