"""What a look found: a table for a person, an object for programs."""

import json
import re
import sys
import textwrap
from collections.abc import Sequence
from typing import Any

import msgspec
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from check.doctor.facts import Facts
from check.doctor.findings import Finding, Part
from check.doctor.judge_gpus import number_given
from check.doctor.judge_room import size
from check.doctor.looked import Looked
from check.doctor.odd import named
from check.options import DoctorOptions
from train.errors import one_line
from train.world import World

WIDTH, WIDEST = 80, 110
MOST_SHOWN = 20
"""So many findings are printed in full: of what is wrong on all of hundreds of nodes the first ones tell enough."""

FEW_NODES = 16
"""So many get a row each."""

MARKS = {"ok": ("ok", "green"), "warning": ("warning", "yellow"), "fault": ("FAULT", "bold red"), "-": ("-", "dim")}


def show(looked: Looked, world: World | None, options: DoctorOptions) -> None:
    """Prints it."""
    if options.json:
        print(json.dumps(as_object(looked, world), indent=2), flush=True)
        return
    console = Console(width=None if sys.stdout.isatty() else WIDTH, highlight=False)
    if console.width > WIDEST:
        console.width = WIDEST
    print_all(console, looked, world)


def as_object(looked: Looked, world: World | None) -> dict[str, Any]:
    """What `--json` prints."""
    return {
        "verdict": verdict(looked.findings),
        "code": looked.code,
        "seconds": None if looked.seconds is None else round(looked.seconds, 3),
        "nodes": [] if world is None else world.nodes,
        "ranks": 0 if world is None else world.world_size,
        "findings": msgspec.to_builtins(looked.findings),
        "parts": msgspec.to_builtins(looked.parts),
        "facts": [] if looked.facts is None else msgspec.to_builtins(looked.facts.ranks),
    }


def print_all(console: Console, looked: Looked, world: World | None) -> None:
    """The header, a row for each part, the findings, the verdict."""
    console.print(Text("muster doctor", style="bold").append(head(looked, world), style="not bold"))
    if looked.parts:
        console.print(table(looked.parts))
    if looked.facts is not None and 1 < len(looked.facts.nodes) <= FEW_NODES:
        console.print(nodes_table(looked.facts, looked.findings))
    findings = looked.findings
    for finding in findings[:MOST_SHOWN]:
        console.print(entry(finding, console.width))
    if len(findings) > MOST_SHOWN:
        console.print(Text(f"and {len(findings) - MOST_SHOWN} more: --json has them all", style="dim"))
    style = "bold green" if not findings else "bold red" if looked.code == 2 else "bold yellow"
    console.print(Text(verdict(findings), style=style))


def head(looked: Looked, world: World | None) -> str:
    """What was looked at: how many nodes and ranks, and which nodes."""
    if world is None or not world.hosts:
        return ""
    nodes = world.nodes
    counts = sorted({world.hosts.count(host) for host in nodes})
    a_node = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    shape = f"{plural(len(nodes), 'node')} x {a_node} = {plural(world.world_size, 'rank')}"
    return f"  {shape}\n               {one_line(named(nodes))}"


def table(parts: Sequence[Part]) -> Table:
    """A row for each part."""
    shown = Table(box=box.ROUNDED, show_header=False, padding=(0, 1), expand=True)
    shown.add_column(style="dim", no_wrap=True)
    shown.add_column(no_wrap=True)
    shown.add_column(ratio=1, overflow="fold")
    for part in parts:
        state = state_of(part)
        word, style = MARKS[state]
        shown.add_row(Text(part.name), Text(word, style=style), Text(one_line(says(part))))
    return shown


def nodes_table(facts: Facts, findings: Sequence[Finding]) -> Table:
    """A row for each node: what its ranks have to share."""
    shown = Table(box=box.ROUNDED, padding=(0, 1), expand=True, header_style="dim")
    for name in ("node", "ranks", "GPUs", "cores", "memory free", "/dev/shm", "checkpoints"):
        shown.add_column(name, justify="left" if name == "node" else "right", overflow="fold")
    for node in facts.nodes:
        own = facts.on(node.host)
        levels = {finding.level for finding in findings if node.host in re.split(r", | -> | and ", finding.host)}
        style = MARKS["fault" if "fault" in levels else "warning" if levels else "-"][1] if levels else ""
        cores = {core for rank in own for core in rank.cores}
        shown.add_row(
            Text(one_line(node.host), style=style),
            str(len(own)),
            str(number_given(own) or "-"),
            str(len(cores) or "-"),
            room(node.memory_free),
            room(node.shm and node.shm.free),
            room(node.checkpoints and node.checkpoints.free),
        )
    return shown


def room(number: int | None) -> str:
    """Bytes in words; - where they are not known, or have no limit."""
    return "-" if number is None else size(number)


def state_of(part: Part) -> str:
    """ok, warning or fault; - of what was not looked at."""
    if not part.is_seen:
        return "-"
    levels = {finding.level for finding in part.findings}
    return "fault" if "fault" in levels else "warning" if levels else "ok"


def says(part: Part) -> str:
    """The part's answer, or where something was found."""
    if not part.findings:
        return part.says
    hosts = list(dict.fromkeys(finding.host for finding in part.findings if finding.host))
    first = part.findings[0].wrong
    more = f", and {len(part.findings) - 1} more" if len(part.findings) > 1 else ""
    return f"{named(hosts)}: {first}{more}" if hosts else f"{first}{more}"


def entry(finding: Finding, width: int) -> Text:
    """A finding in three lines, longer ones folded."""
    word, style = MARKS[finding.level]
    where = f"{one_line(finding.host)}: " if finding.host else ""
    said = fold(where + one_line(finding.wrong), width, " " * (len(word) + 2))
    text = Text.assemble((word, style), "  ", (said[: len(where)], "bold"), said[len(where) :], "\n")
    for label, value in (("  seen: ", finding.seen), ("   fix: ", finding.fix)):
        text.append(label, style="dim").append(fold(one_line(value), width, " " * len(label))).append("\n")
    return text


def fold(text: str, width: int, before: str) -> str:
    """`text` in lines of `width`, of which the first begins after `before`, and the others with it."""
    lines = textwrap.wrap(text, max(20, width - len(before)), break_on_hyphens=False)
    return f"\n{before}".join(lines)


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


def plural(number: int, word: str) -> str:
    """ "1 node", "2 nodes"."""
    return f"{number} {word}{'' if number == 1 else 's'}"
