"""The whole check: gathers the facts of each subject from all ranks, asks the subject for its findings, prints them.

`train --preflight` runs the quick part, before the ranks of a training open their process group.
"""

import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec
import torch.distributed as dist
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from muster.check import ranks
from muster.check.doctor import clock, collectives, gpus, memory, names, network, ports, software, storage
from muster.check.doctor.finding import DIED, Finding, code_of, worst
from muster.check.options import DoctorOptions
from muster.errors import ExitCode, MusterError, one_line
from muster.train.distributed.world import RanksMissing, World
from muster.train.health.faults import SharedFault
from muster.train.reporting import console
from muster.units import listed, plural

Subject = Any
"""A module with the functions that the `__init__` of this package describes."""

STEPS: tuple[tuple[str, tuple[Subject, ...]], ...] = (
    ("asking each node for its software, devices and limits", (software, gpus, memory, storage, network)),
    ("trying names, ports and clocks between the nodes", (names, ports, clock)),
    ("trying collectives between the ranks", (collectives,)),
)
"""The subjects in order; the facts of a step are exchanged together, and `--quick` leaves out the last step."""

HARMLESS = {"shm", "checkpoints"}
"""`Finding.about` of failures that do not stop ranks from communicating: the collectives are tried nonetheless."""

MAX_SHOWN = 20
"""The most findings that are printed: of a problem on hundreds of nodes the first ones are enough."""


@dataclass(frozen=True)
class Part:
    """The result for one subject.

    Attributes:
        says: the result in one line, for when there are no findings.
        is_seen: False where the subject was not checked, for the reason in `says`.
    """

    name: str
    says: str = ""
    findings: Sequence[Finding] = ()
    is_seen: bool = True


@dataclass
class Report:
    """The results so far: rank 0 has all of them, other ranks only the reason why the check ended early.

    Attributes:
        facts: the facts of each subject, by rank.
        why: the findings that ended the check early.
        seconds: the duration, from when all ranks were connected.
    """

    facts: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    parts: list[Part] = field(default_factory=list[Part])
    why: list[Finding] = field(default_factory=list[Finding])
    seconds: float | None = None

    @property
    def findings(self) -> list[Finding]:
        """The findings of all parts, then those that ended the check early."""
        return [*(finding for part in self.parts for finding in part.findings), *self.why]

    @property
    def code(self) -> int:
        return code_of(self.findings)


def run(options: DoctorOptions) -> None:
    """Checks all nodes, prints the report, and ends this process: all ranks with the same exit code."""
    report, world, is_cut_off = Report(), None, False
    try:
        print_step("waiting for all ranks")
        world = ranks.join(options.timeout_s)
        started = time.monotonic()
        check(world, options, report, prints_steps=True)
        code = world.gather(report.code)[0]
        report.seconds = time.monotonic() - started
    except RanksMissing as missing:
        world, is_cut_off = missing.world, missing.is_reporter
        report.why.append(absence(missing))
        code = report.code
    except MusterError as error:
        code, is_cut_off = ExitCode.USER_MUST_CHANGE, world is None
        report.why.append(Finding("failed", "launch", "", error.wrong, error.seen, error.fix))
    except dist.DistError as error:
        code, is_cut_off = ExitCode.FAILED, True
        wrong = f"rank {os.environ.get('RANK', '0')} lost the other ranks: rank 0, its agent or the network is gone"
        seen, fix = str(error).strip().partition("\n")[0], "look at the output of the other nodes, then try again"
        report.why.append(Finding("failed", DIED, "" if world is None else world.host, wrong, seen, fix))
    if os.environ.get("RANK", "0") == "0":
        code = ranks.print_answer(lambda: show(options, report, world))
    elif is_cut_off:
        # No other rank knows of it, or rank 0 is the missing one.
        console.notify("\n".join(map(str, report.why)))
    ranks.leave(world, code)


def preflight(world: World, device: Literal["auto", "cuda", "cpu"], checkpoint_dir: str) -> None:
    """Runs the quick checks, and returns if a training may start; rank 0 prints the findings.

    Args:
        world: with its hosts.

    Raises:
        SharedFault: on all ranks: a training would fail, hang or be wrong.
        RanksMissing: a rank died or did not answer.
    """
    options = DoctorOptions(quick=True, device=device, checkpoint_dir=checkpoint_dir, timeout_s=world.timeout_s)
    report = Report()
    check(world, options, report)
    verdict = f"{worst(report.findings)}: {conclusion(report.findings)}"
    code, verdict = world.gather([report.code, verdict])[0]
    if world.main:
        for finding in report.findings:
            console.notify(str(finding))
    if code != ExitCode.DONE:
        fix = (
            "correct what is named above; `muster doctor` in place of `train` checks more; without --preflight the "
            "training starts nonetheless"
        )
        raise SharedFault("the nodes are not fit to train on", seen=verdict, fix=fix, code=ExitCode.USER_MUST_CHANGE)


def print_step(step: str) -> None:
    """Prints the next step on stderr, on rank 0 alone: a check of many nodes takes minutes."""
    if os.environ.get("RANK", "0") == "0":
        console.notify(f"muster doctor: {step} ...")


def check(world: World, options: DoctorOptions, report: Report, *, prints_steps: bool = False) -> None:
    """Runs all steps and adds their results to `report`; to be called on all ranks."""
    *quick, (last, subjects) = STEPS
    for step, of_step in quick:
        if prints_steps:
            print_step(step)
        examine(world, options, of_step, report)
    if options.quick:
        return
    is_stopped = any(one.level == "failed" and one.about not in HARMLESS for one in report.findings)
    if world.gather(is_stopped)[0]:
        report.parts += [Part(one.NAME, "not tried: first correct what failed", is_seen=False) for one in subjects]
        return
    if prints_steps:
        print_step(last)
    examine(world, options, subjects, report)


def examine(world: World, options: DoctorOptions, subjects: Sequence[Subject], report: Report) -> None:
    """Gathers the facts of `subjects` from all ranks, and adds the results to the `report` of rank 0."""
    own = {subject.NAME: subject.gather(world, options) for subject in subjects}
    answers = world.gather(msgspec.to_builtins(own), to_all=False)
    if not world.main:
        return
    if not report.facts:
        report.facts = [{"rank": rank, "host": host} for rank, host in enumerate(world.hosts)]
    for subject in subjects:
        by_host: dict[str, list[Any]] = {}
        for of_rank, facts in zip(answers, report.facts, strict=True):
            facts[subject.NAME] = of_rank[subject.NAME]
            if of_rank[subject.NAME] is not None:
                by_host.setdefault(facts["host"], []).append(msgspec.convert(of_rank[subject.NAME], subject.Facts))
        report.parts.append(Part(subject.NAME, subject.summary(by_host), subject.findings(by_host)))


def absence(missing: RanksMissing) -> Finding:
    about = DIED if missing.has_died else "absent"
    return Finding("failed", about, missing.host, missing.wrong, missing.seen, missing.fix)


def show(options: DoctorOptions, report: Report, world: World | None) -> int:
    """Prints the report, as a JSON object or as tables; returns the exit code."""
    if options.json:
        print(json.dumps(as_object(report, world), indent=2))
    else:
        print_all(Console(highlight=False), report, world)
    return report.code


def as_object(report: Report, world: World | None) -> dict[str, Any]:
    return {
        "verdict": worst(report.findings),
        "says": conclusion(report.findings),
        "code": report.code,
        "seconds": None if report.seconds is None else round(report.seconds, 3),
        "nodes": [] if world is None else world.nodes,
        "ranks": 0 if world is None else world.world_size,
        "findings": msgspec.to_builtins(report.findings),
        "parts": msgspec.to_builtins(report.parts),
        "facts": report.facts,
    }


def print_all(screen: Console, report: Report, world: World | None) -> None:
    """Prints the header, a row for each part, the findings and the verdict."""
    header = Text("muster doctor", style="bold")
    if world is not None and world.hosts:
        header.append(f"  {ranks.shape(world)}\n               {one_line(listed(world.nodes))}", style="not bold")
    screen.print(header)
    if report.parts:
        screen.print(_table(report.parts))
    findings = report.findings
    for finding in findings[:MAX_SHOWN]:
        _, _, rest = str(finding).partition(":")
        screen.print(Text.assemble((finding.level, ranks.STYLES[finding.level]), ":", rest))
    if len(findings) > MAX_SHOWN:
        screen.print(Text(f"and {len(findings) - MAX_SHOWN} more: --json has them all", style="dim"))
    word = worst(findings)
    screen.print(Text(f"{word}: {conclusion(findings)}", style=f"bold {ranks.STYLES[word]}"))


def _table(parts: Sequence[Part]) -> Table:
    """A table with a row for each part: its summary, or the hosts of its findings and the first of them."""
    table = Table(box=box.ROUNDED, show_header=False, padding=(0, 1))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(ratio=1, overflow="fold")
    for part in parts:
        word, answer = worst(part.findings) if part.is_seen else "-", part.says
        if part.findings:
            hosts = listed(finding.host for finding in part.findings)
            more = f", and {len(part.findings) - 1} more" if len(part.findings) > 1 else ""
            answer = (f"{hosts}: " if hosts else "") + part.findings[0].wrong + more
        table.add_row(Text(part.name), Text(word, style=ranks.STYLES[word]), Text(one_line(answer)))
    return table


def conclusion(findings: Sequence[Finding]) -> str:
    if not findings:
        return "nothing was found that would stop a training, slow it down or make it wrong"
    num_failed = sum(finding.level == "failed" for finding in findings)
    num_warnings = len(findings) - num_failed
    warnings = plural(num_warnings, "warning")
    if not num_failed:
        return f"{warnings}: see above; a training can run"
    return f"{plural(num_failed, 'finding')} to correct first" + (f", {warnings}" if num_warnings else "")
