"""The output of doctor: the text, and the JSON object."""

import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import pytest
from rich.console import Console

from muster.check.doctor import run
from muster.check.doctor.finding import Finding
from muster.check.doctor.run import Part, Report
from muster.check.options import DoctorOptions
from muster.train.distributed.world import World
from tests.check.doctor.healthy import SUBJECTS, Told, healthy, with_node


def found_at(told: Told) -> tuple[Report, World]:
    """The report on the Facts `told`, and their world."""
    hosts = tuple(host for host, ranks in told["memory"].items() for _ in ranks)
    facts = [{"rank": rank, "host": host} for rank, host in enumerate(hosts)]
    of_subjects = [(subject, told[subject.NAME]) for subject in SUBJECTS]
    parts = [Part(subject.NAME, subject.summary(own), subject.findings(own)) for subject, own in of_subjects]
    return Report(facts, parts), World(world_size=len(hosts), host=hosts[0], hosts=hosts)


def printed(found: Report, world: World | None, width: int = 80) -> str:
    out = io.StringIO()
    run.print_all(Console(file=out, width=width, highlight=False), found, world)
    return out.getvalue()


@pytest.mark.parametrize("width", [80, 120])
def test_nothing_is_wider_than_the_terminal(width: int) -> None:
    told = with_node(healthy(64, 8), "node17", code="d" * 12, open_files=10)
    text = printed(*found_at(told), width=width)
    assert max(map(len, text.splitlines())) <= width
    assert "64 nodes x 8 = 512 ranks\n               node01, node02, node03, node04 and 60 more\n" in text
    assert "failed: node17: not all nodes have the same code of this project" in text
    assert text.endswith("failed: 1 finding to correct first, 1 warning\n")
    assert "\x1b" not in text


def test_healthy_nodes_get_one_line_more_than_the_table() -> None:
    lines = printed(*found_at(healthy(2))).splitlines()
    assert lines[:2] == ["muster doctor  2 nodes x 2 = 4 ranks", "               node01, node02"]
    assert lines[-1].startswith("ok: ")
    assert not [line for line in lines if "seen:" in line or "failed" in line]


def test_a_row_says_what_was_found_and_where() -> None:
    first, second = (Finding("warning", "x", host, f"{host} is slow", "seen", "fix") for host in ("n1", "n2"))
    parts = [
        Part("memory", "enough"),
        Part("clocks", "", [first]),
        Part("names", "", [first, second]),
        Part("software", "", [Finding("failed", "x", "", "it is old", "seen", "fix")]),
        Part("ports", "not tried", is_seen=False),
    ]
    lines = printed(Report([], parts), None).splitlines()
    assert [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines if line.startswith("│")] == [
        ["memory", "ok", "enough"],
        ["clocks", "warning", "n1: n1 is slow"],
        ["names", "warning", "n1, n2: n1 is slow, and 1 more"],
        ["software", "failed", "it is old"],
        ["ports", "-", "not tried"],
    ]


def test_of_many_findings_the_first_are_shown() -> None:
    found = [Finding("warning", "x", f"n{number}", "wrong", "seen", "fix") for number in range(30)]
    text = printed(Report([], [Part("x", "", found)]), None)
    assert "and 10 more: --json has them all" in text
    assert "warning: 30 warnings" in text


def test_what_a_program_gets() -> None:
    found, world = found_at(with_node(healthy(), "node02", torch="2.9.1"))
    told = json.loads(json.dumps(run.as_object(found, world)))
    assert (told["code"], told["verdict"], told["nodes"]) == (2, "failed", ["node01", "node02", "node03"])
    assert told["says"] == "1 finding to correct first"
    assert (told["ranks"], len(told["facts"])) == (6, 6)
    (finding,) = told["findings"]
    assert (finding["host"], finding["about"]) == ("node02", "torch")
    assert finding in next(part for part in told["parts"] if part["name"] == "software")["findings"]


def test_control_characters_from_a_node_do_not_reach_the_terminal() -> None:
    found = [Finding("failed", "x", "n\x1b[2J", "wrong\nline", "a\x1b[31mb", "[bold]fix[/bold]")]
    text = printed(Report([], [Part("x", "", found)]), None)
    assert "\x1b" not in text
    assert "[bold]fix[/bold]" in text


@dataclass(frozen=True)
class Kernel:
    """The Facts of an invented subject."""

    release: str


class KernelSubject:
    """An invented subject with the interface of all subjects; its findings have this `level` and `about`."""

    Facts = Kernel

    def __init__(self, level: Literal["warning", "failed"] = "warning", about: str = "kernel") -> None:
        self.NAME = self.about = about
        self.level: Literal["warning", "failed"] = level

    def gather(self, world: World, options: DoctorOptions) -> Kernel:
        return Kernel("6.1")

    def findings(self, by_host: Mapping[str, Sequence[Kernel]]) -> list[Finding]:
        return [Finding(self.level, self.about, host, "old", facts[0].release, "-") for host, facts in by_host.items()]

    def summary(self, by_host: Mapping[str, Sequence[Kernel]]) -> str:
        return "new"


def test_a_new_subject_needs_only_the_interface() -> None:
    found = Report()
    run.examine(World(host="a", hosts=("a",)), DoctorOptions(), [KernelSubject()], found)
    assert [finding.about for finding in found.findings] == ["kernel"]
    assert found.facts == [{"rank": 0, "host": "a", "kernel": {"release": "6.1"}}]


@pytest.mark.parametrize(
    ("level", "about", "is_tried"), [("failed", "kernel", False), ("failed", "shm", True), ("warning", "kernel", True)]
)
def test_collectives_are_tried_but_where_ranks_may_not_reach_each_other(
    monkeypatch: pytest.MonkeyPatch, level: Literal["warning", "failed"], about: str, is_tried: bool
) -> None:
    """They would wait for their timeout, and tell less than the findings before them."""
    first, last = KernelSubject(level, about), KernelSubject("warning", "collectives")
    monkeypatch.setattr(run, "STEPS", (("the nodes", (first,)), ("collectives", (last,))))
    found = Report()
    run.check(World(host="a", hosts=("a",)), DoctorOptions(), found)
    assert ("collectives" in found.facts[0]) == is_tried
    assert (found.parts[-1].name, found.parts[-1].is_seen) == ("collectives", is_tried)
