"""What was found: a table for a person, an object for programs."""

import json
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from muster.check.doctor.facts import Facts, Finding, Part, code_of, size
from muster.check.doctor.gpus import number_given
from muster.check.options import DoctorOptions
from muster.check.ranks import listed, plural
from muster.errors import one_line
from muster.train.world import World

WIDTH, WIDEST = 80, 110
MOST_SHOWN = 20
"""So many findings are printed in full: of what is wrong on all of hundreds of nodes the first ones tell enough."""

FEW_NODES = 16
"""So many get a row each."""

MARKS = {"ok": ("ok", "green"), "warning": ("warning", "yellow"), "fault": ("FAULT", "bold red"), "-": ("-", "dim")}
"""The word and the style of each state."""


@dataclass
class Report:
    """What is known so far, on rank 0.

    Attributes:
        facts: None until all have told.
        why: why the check ended early.
        seconds: how long it took, from when all ranks had met.
    """

    facts: Facts | None = None
    parts: list[Part] = field(default_factory=list[Part])
    why: list[Finding] = field(default_factory=list[Finding])
    seconds: float | None = None

    @property
    def findings(self) -> list[Finding]:
        """All that was found: faults first."""
        found = [*self.why, *(finding for part in self.parts for finding in part.findings)]
        return sorted(found, key=lambda finding: finding.level != "fault")

    @property
    def code(self) -> int:
        return code_of(self.findings)


def show(report: Report, world: World | None, options: DoctorOptions) -> None:
    """Prints it."""
    if options.json:
        print(json.dumps(as_object(report, world), indent=2), flush=True)
        return
    console = Console(width=None if sys.stdout.isatty() else WIDTH, highlight=False)
    console.width = min(console.width, WIDEST)
    print_all(console, report, world)


def as_object(report: Report, world: World | None) -> dict[str, Any]:
    """What `--json` prints."""
    return {
        "verdict": verdict(report.findings),
        "code": report.code,
        "seconds": None if report.seconds is None else round(report.seconds, 3),
        "nodes": [] if world is None else world.nodes,
        "ranks": 0 if world is None else world.world_size,
        "findings": msgspec.to_builtins(report.findings),
        "parts": msgspec.to_builtins(report.parts),
        "facts": [] if report.facts is None else msgspec.to_builtins(report.facts.ranks),
    }


def print_all(console: Console, report: Report, world: World | None) -> None:
    """The header, a row for each part, the findings, the verdict."""
    console.print(Text("muster doctor", style="bold").append(_header(world), style="not bold"))
    if report.parts:
        console.print(_parts_table(report.parts))
    if report.facts is not None and 1 < len(report.facts.nodes) <= FEW_NODES:
        console.print(_nodes_table(report.facts, report.findings))
    findings = report.findings
    for finding in findings[:MOST_SHOWN]:
        console.print(_entry(finding))
    if len(findings) > MOST_SHOWN:
        console.print(Text(f"and {len(findings) - MOST_SHOWN} more: --json has them all", style="dim"))
    style = "bold green" if not findings else "bold red" if report.code == 2 else "bold yellow"
    console.print(Text(verdict(findings), style=style))


def _header(world: World | None) -> str:
    """How many nodes and ranks, and which nodes."""
    if world is None or not world.hosts:
        return ""
    nodes = world.nodes
    counts = sorted({world.hosts.count(host) for host in nodes})
    a_node = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    shape = f"{plural(len(nodes), 'node')} x {a_node} = {plural(world.world_size, 'rank')}"
    return f"  {shape}\n               {one_line(listed(nodes))}"


def _parts_table(parts: Sequence[Part]) -> Table:
    """A row for each part: its answer, or where something was found."""
    table = Table(box=box.ROUNDED, show_header=False, padding=(0, 1), expand=True)
    table.add_column(style="dim", no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(ratio=1, overflow="fold")
    for part in parts:
        word, style = MARKS[_state(part.findings, "ok" if part.is_seen else "-")]
        table.add_row(Text(part.name), Text(word, style=style), Text(one_line(_answer(part))))
    return table


def _state(findings: Sequence[Finding], healthy: str) -> str:
    levels = {finding.level for finding in findings}
    return "fault" if "fault" in levels else "warning" if levels else healthy


def _answer(part: Part) -> str:
    if not part.findings:
        return part.says
    hosts = list(dict.fromkeys(finding.host for finding in part.findings if finding.host))
    more = f", and {len(part.findings) - 1} more" if len(part.findings) > 1 else ""
    return (f"{listed(hosts)}: " if hosts else "") + part.findings[0].wrong + more


def _nodes_table(facts: Facts, findings: Sequence[Finding]) -> Table:
    """A row for each node: what its ranks have to share."""
    table = Table(box=box.ROUNDED, padding=(0, 1), expand=True, header_style="dim")
    for name in ("node", "ranks", "GPUs", "cores", "memory free", "/dev/shm", "checkpoints"):
        table.add_column(name, justify="left" if name == "node" else "right", overflow="fold")
    for node in facts.nodes:
        ranks = facts.on(node.host)
        own = [finding for finding in findings if node.host in re.split(r", | -> | and ", finding.host)]
        rooms = (node.memory_free, node.shm and node.shm.free, node.checkpoints and node.checkpoints.free)
        table.add_row(
            Text(one_line(node.host), style=MARKS[_state(own, "-")][1] if own else ""),
            str(len(ranks)),
            str(number_given(ranks) or "-"),
            str(len({core for rank in ranks for core in rank.cores}) or "-"),
            *("-" if room is None else size(room) for room in rooms),
        )
    return table


def _entry(finding: Finding) -> Text:
    """A finding in three lines, as `plain` has it, with the level in colour."""
    _, _, rest = plain(finding).partition(":")
    return Text.assemble(MARKS[finding.level], " ", rest)


def plain(finding: Finding) -> str:
    """A finding in three lines, for a log."""
    where = f"{finding.host}: " if finding.host else ""
    lines = (f"{finding.level}: {where}{finding.wrong}", f" seen: {finding.seen}", f"  fix: {finding.fix}")
    return "\n".join(map(one_line, lines))


def verdict(findings: Sequence[Finding]) -> str:
    """All in one line."""
    faults = sum(finding.level == "fault" for finding in findings)
    warnings = len(findings) - faults
    if not findings:
        return "healthy: nothing was found that would stop, slow or falsify a training"
    counts = [plural(number, word) for number, word in ((faults, "fault"), (warnings, "warning")) if number]
    return ", ".join(counts) + (": a training may run, look first" if not faults else "")
