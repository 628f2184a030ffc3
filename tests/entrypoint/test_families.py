"""A scheduler that is new: its file, its line in the list, a recording."""

import sys
from collections.abc import Generator
from dataclasses import replace
from pathlib import Path

import pytest

from muster.entrypoint import container, detect, recording
from muster.entrypoint.detect import families
from muster.entrypoint.detect.families import Family
from muster.entrypoint.environment import Environment
from muster.entrypoint.launch import start
from muster.entrypoint.options import LaunchOptions
from muster.errors import MusterError
from tests.entrypoint import recorded

FILE = """
from muster.entrypoint.detect.allocation import Job, Task
from muster.entrypoint.detect.reader import Reader

VARIABLES = ("DRUM_JOB", "DRUM_HOSTS", "DRUM_NODE", "DRUM_END")
PREFIXES = ("DRUM_",)
FIX = "start it by drum run"


def job(env):
    if "DRUM_JOB" not in env:
        return None
    read = Reader(env, FIX)
    hosts = read.hosts("DRUM_HOSTS", "hosts")
    return Job(
        scheduler="drum",
        job_id=str(read.identifier("DRUM_JOB", "job_id")),
        hosts=hosts,
        num_nodes=len(hosts),
        end_time=read.number("DRUM_END", most=10**12),
        launch="drum run {command}",
        sources={"scheduler": read.seen("DRUM_JOB"), "num_nodes": read.seen("DRUM_HOSTS"), **read.sources},
    )


def task(env, job):
    if "DRUM_NODE" not in env:
        return None
    read = Reader(env, FIX)
    node = read.number("DRUM_NODE", "node_rank")
    sources = {"launcher": read.seen("DRUM_NODE"), "num_nodes": job.sources["num_nodes"], **read.sources}
    return Task("drum run", node, 0, node, (1,) * len(job.hosts), job.hosts, sources=sources)


TASKS = {"drum run": task}
"""

RECORDING = """\
# host: b2
DRUM_JOB=71
DRUM_HOSTS=b[1-3]
DRUM_NODE=1
DRUM_END=1900000000
DRUM_COLOUR=red
"""


@pytest.fixture
def task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Generator[Environment]:
    """The recording of a task of that scheduler, which is known now."""
    (tmp_path / "drum.py").write_text(FILE)
    (tmp_path / "task.env").write_text(RECORDING)
    monkeypatch.setattr(detect, "__path__", [*detect.__path__, str(tmp_path)])
    monkeypatch.setattr(families, "FAMILIES", [Family("drum", ("DRUM_",), True), *families.FAMILIES])
    yield recording.load(tmp_path / "task.env")
    sys.modules.pop("muster.entrypoint.detect.drum", None)


def test_a_task_of_it_is_found_with_the_source_of_each_value(task: Environment) -> None:
    found = recorded.detect(task)
    assert (found.scheduler, found.launcher, found.job_id, found.node_rank) == ("drum", "drum run", "71", 1)
    assert found.hosts == ("b1", "b2", "b3")
    assert found.sources["node_rank"] == "DRUM_NODE=1"


def test_its_job_script_is_told_how_to_start_on_all_nodes(task: Environment) -> None:
    script = replace(task, variables={name: value for name, value in task.items() if name != "DRUM_NODE"})
    with pytest.raises(MusterError) as refusal:
        recorded.detect(script)
    assert refusal.value.fix == "drum run train ddp"


def test_training_is_told_when_its_job_ends(task: Environment) -> None:
    assert start.of_the_job(recorded.detect(task), task)["MUSTER_SCHEDULER_END_TIME"] == "1900000000"


def test_containers_and_recordings_get_its_variables(task: Environment) -> None:
    assert {"DRUM_JOB", "DRUM_HOSTS", "DRUM_NODE", "DRUM_END", "DRUM_COLOUR"} <= set(container.docker(task).words)
    assert "DRUM_COLOUR=red" in recording.as_recording(task)
    assert recorded.detect(task, LaunchOptions(nproc_per_node="2")).world_size == 6
