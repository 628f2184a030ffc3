"""The recordings, each with the answer that detection must give.

A folder of tests/recordings takes part if it has an expected.toml. A recording's scenario is the table there with the
longest name that the file's name starts with. The host is in the recording; the rank, if any, in the file's name:
SCENARIO.HOST.RANK.env, SCENARIO.rankR.HOST.env, SCENARIO.HOST.taskR.env. The keys of a scenario:

    hosts       the job's nodes in order; empty where the environment doesn't name them
    nodes       the same by the hosts' own names, where `hosts` is empty or has other names
    mode        agent, worker
    scheduler   and `launcher`: those that detection finds
    nproc_per_node, note (part of one), rejected (the start of each line that must be there)
    launch      nothing started the process as a task, and several nodes are allocated: refused, with this launch line
    refusal     the process can't be started in this way: words of the reason
"""

import re
import tomllib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from muster.entrypoint import recording
from muster.entrypoint.detect import resolve
from muster.entrypoint.detect.allocation import Allocation
from muster.entrypoint.environment import Environment
from muster.entrypoint.options import LaunchOptions
from muster.errors import MusterError

FOLDERS = Path(__file__).resolve().parent.parent / "recordings"


@dataclass(frozen=True)
class Recording:
    """A recording and the answer that is expected for it."""

    file: Path
    scenario: str
    expected: dict[str, Any]

    @cached_property
    def environment(self) -> Environment:
        return recording.load(self.file)

    @property
    def host(self) -> str:
        assert self.environment.host
        return self.environment.host

    @property
    def rank(self) -> int | None:
        match = re.search(r"\.(?:rank|task)?([0-9]{1,3})(?:\.[^.]+)?$", self.file.stem)
        return int(match[1]) if match else None

    @property
    def nodes(self) -> list[str]:
        return self.expected.get("nodes", self.expected["hosts"])

    def __str__(self) -> str:
        return f"{self.file.parent.name}/{self.file.stem}"


def load(*folders: str) -> list[Recording]:
    """The recordings of all folders that have an expected.toml, or of `folders`."""
    found: list[Recording] = []
    for table in sorted(FOLDERS.glob("*/expected.toml")):
        expected = tomllib.loads(table.read_text())
        if folders and table.parent.name not in folders:
            continue
        for file in sorted(table.parent.glob("*.env")):
            scenarios = [name for name in expected if file.stem == name or file.stem.startswith(f"{name}.")]
            assert scenarios, f"{file} is in no scenario of {table}"
            scenario = max(scenarios, key=len)
            found.append(Recording(file, scenario, expected[scenario]))
    return found


ALL = load()
TASKS = [recording for recording in ALL if "hosts" in recording.expected]
SHELLS = [recording for recording in ALL if "launch" in recording.expected]
REFUSED = [recording for recording in ALL if "refusal" in recording.expected]


def ranks_by_host(recording: Recording) -> dict[str, list[int | None]]:
    """The ranks of a recording's scenario by host, from all files of the scenario."""
    ranks: dict[str, list[int | None]] = {}
    for other in ALL:
        if other.file.parent == recording.file.parent and other.scenario == recording.scenario:
            ranks.setdefault(other.host, []).append(other.rank)
    return {host: sorted(found, key=lambda rank: rank or 0) for host, found in ranks.items()}


def detect(env: Environment, options: LaunchOptions | None = None) -> Allocation:
    """The allocation that `train ddp` finds in `env`."""
    return resolve.resolve(env, options or LaunchOptions(), ["train", "ddp"])


def find(env: Environment) -> Allocation | None:
    """The same as `detect`, or None for a refusal; any other exception is a crash."""
    try:
        return detect(env)
    except MusterError:
        return None
