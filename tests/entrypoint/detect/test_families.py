"""A new scheduler, which needs only a file, a line in the list of families, and a recording."""

import sys
from collections.abc import Generator
from dataclasses import replace
from pathlib import Path

import pytest

from muster.entrypoint import container, detect, recording
from muster.entrypoint.detect import families
from muster.entrypoint.detect.families import Family
from muster.entrypoint.environment import Environment
from muster.entrypoint.jobs import making
from muster.entrypoint.jobs.script import Wanted
from muster.entrypoint.launch import job, start
from muster.entrypoint.launch.program import Program
from muster.entrypoint.options import LaunchOptions
from muster.errors import MusterError
from tests.entrypoint import recorded

FILE = '''
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

JOB_SCRIPT = """#!/bin/bash
{{ about }}
#DRUM nodes={{ wanted.nodes }} time={{ wanted.time_s | clock }}
{{ prepare }}
export MUSTER_JOB_LIMIT="$(date +%s)+$DRUM_LIMIT"
drum run {{ start }} {{ wanted.command | words }} "$@"
"""
'''

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
    """The recording of a task of the new scheduler, whose family is added to the list."""
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


def test_its_job_script_is_made_by_the_command_for_all_of_them(task: Environment) -> None:
    text = making.make("drum", Wanted(nodes=3, command=("train", "fsdp", "--name", "a b")))
    lines = text.splitlines()
    assert "#DRUM nodes=3 time=01:00:00" in lines
    assert lines[-2:] == [
        "drum run apptainer exec --nv --bind /:/host:ro \\",
        '  "${MUSTER_IMAGE:-muster.sif}" train fsdp --name \'a b\' "$@"',
    ]
    assert "MUSTER_MAX_REQUEUES" in text


def test_a_script_of_it_names_resumes_and_ends_the_run(task: Environment) -> None:
    own = {"MUSTER_MAX_REQUEUES": "3", "MUSTER_ATTEMPT": "1", "MUSTER_JOB_LIMIT": "1800000000+0:30:00"}
    env = replace(task, variables={**task, **own})
    program = Program("module", ("muster.train", "ddp"), is_ours=True)
    changed, more = job.find(program, recorded.detect(env), env)
    assert changed.words == ("muster.train", "ddp", "--name=muster-71", "--resume=auto")
    assert more.variables["MUSTER_ATTEMPT"] == "1"


def test_training_is_told_when_its_job_ends(task: Environment) -> None:
    context = start.find(task, LaunchOptions(site="off"), [])
    assert start.for_ours(context, [])["MUSTER_SCHEDULER_END_TIME"] == "1900000000"


def test_containers_and_recordings_get_its_variables(task: Environment) -> None:
    assert {"DRUM_JOB", "DRUM_HOSTS", "DRUM_NODE", "DRUM_END", "DRUM_COLOUR"} <= set(container.docker(task).words)
    assert "DRUM_COLOUR=red" in recording.as_recording(task)
    assert recorded.detect(task, LaunchOptions(nproc_per_node="2")).world_size == 6
