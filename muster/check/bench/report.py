"""What rank 0 prints and writes: the table or the object, the baseline; and the verdict, last."""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

import torch
from rich.console import Console
from rich.text import Text

from muster.check import versions
from muster.check.bench import baseline, pairwise
from muster.check.bench.baseline import Baseline, Setting
from muster.check.bench.collectives import BY_NAME, ELEMENT, WrongValues, shown
from muster.check.bench.sweep import NONE, Row, Sweep, bandwidth
from muster.check.bench.transport import Transport
from muster.check.options import BenchOptions
from muster.check.ranks import STYLES, shape
from muster.errors import ExitCode, MusterError, one_line
from muster.paths import installed
from muster.train.distributed.world import World
from muster.train.reporting import console
from muster.units import listed
from muster.variables import LaunchVariable

HEADER = (
    "#      size      count  type redop root       time   algbw   busbw #wrong        p50        p99",
    "#       (B) (elements)                        (us)  (GB/s)  (GB/s)              (us)       (us)",
)


@dataclass(frozen=True)
class Verdict:
    """The answer.

    Attributes:
        against: each thing that makes it fail.
        otherwise: the answer where there is none: what was held against what.
        is_sure: False where that means little.
    """

    against: Sequence[MusterError]
    otherwise: str
    is_sure: bool = True

    @property
    def word(self) -> Literal["ok", "warning", "failed"]:
        return "failed" if self.against else "ok" if self.is_sure else "warning"

    @property
    def says(self) -> str:
        more = f", and {len(self.against) - 1} more" if len(self.against) > 1 else ""
        return self.against[0].wrong + more if self.against else self.otherwise

    @property
    def code(self) -> int:
        return ExitCode.FAILED if self.against else ExitCode.DONE


def verdict_of_pairs(rows: Sequence[pairwise.Row], hosts: Sequence[str], used: Transport) -> Verdict:
    """The verdict on pairs of the nodes `hosts`, which are held against each other."""
    against = [*([used.error] if used.error else []), *pairwise.errors(rows)]
    if len(hosts) < 2:
        says = "one node: nothing was measured"
    elif len(hosts) == 2:
        says = "two nodes: their link was held against nothing but its own two directions"
    elif (times := pairwise.differ(rows)) > pairwise.TIMES:
        # Where most links are slow, as those between two racks may be, none stands out.
        says = f"links differ {times:.1f}-fold, and no node or single link stands out: see which are slow"
    else:
        return Verdict(against, "no link is slow")
    return Verdict(against, says, is_sure=False)


def wrong_values(faults: Sequence[WrongValues]) -> list[MusterError]:
    """The errors for wrong values: one for each collective and rank, with the smallest message."""
    by_rank: dict[tuple[str, int], list[WrongValues]] = {}
    for fault in sorted(faults, key=lambda each: each.size):
        by_rank.setdefault((fault.collective, fault.rank), []).append(fault)
    found: list[MusterError] = []
    for first, *others in by_rank.values():
        sizes = listed((shown(fault.size) for fault in (first, *others)), 8)
        wrong = f"{first.collective} gave wrong values to rank {first.rank} on {first.host}, at {sizes}"
        fix = (
            f"don't train here: try again without {first.host}; if it is that node's, its GPU, memory or network is "
            "broken; if not, another version of the backend"
        )
        found.append(MusterError(wrong, seen=str(first), fix=fix, code=ExitCode.FAILED))
    return found


@dataclass
class Report:
    """The answer of a measurement, on rank 0.

    What took long to measure is shown before a file is written, as a disk may be full.
    """

    options: BenchOptions
    world: World
    setting: Setting

    def of_sweep(self, rows: Sequence[Row], sweep: Sweep, used: Transport, known: Baseline | None) -> int:
        """Prints and writes what was measured; returns the exit code."""
        options = self.options
        slow = baseline.find_slow(rows, known) if known else []
        against = wrong_values(sweep.faults)
        if used.error is not None:
            against.append(used.error)
        against += baseline.errors(slow, options.baseline or "")
        num_rows = sum(bool(row.passes) for row in rows)
        num_held = sum((row.collective, row.size) in known.passes for row in rows) if known else 0
        held = "held against no baseline: --save-baseline FILE keeps one for the next time"
        if known and num_held:
            worth = f"half of them would be found if they took {baseline.least_found(known):.2f} times as long"
            held = f"{num_held} of {num_rows} rows are as fast as in {options.baseline}; {worth}"
        right = f"values were right in {sweep.num_checks} checks; {held}"
        verdict = Verdict(against, right if num_rows else "nothing was measured", is_sure=num_rows > 0)
        more = {
            "transport": {"network": used.network, "gpudirect": used.gpudirect, "says": used.says, "notes": used.notes},
            "rows": [row.figures() for row in rows],
            "faults": [asdict(fault) for fault in sweep.faults],
            "checks": sweep.num_checks,
            "slow": [asdict(one) for one in slow],
        }
        self._show(verdict, more, [f"network: {used.says}", *used.notes, "", table(rows, sweep.faults)])
        code = verdict.code
        try:
            if options.save_baseline is not None:
                self._save(Path(options.save_baseline), rows, verdict, used)
            if known is not None and not num_held:
                raise MusterError(
                    "the baseline has none of the collectives and sizes that were measured",
                    seen=f"--baseline={options.baseline}",
                    fix="give the same --collectives, --min-size, --max-size and --factor as for --save-baseline",
                )
        except MusterError as error:
            console.notify(str(error))
            code = code or error.code
        self._conclude(verdict)
        return code

    def of_pairs(self, rows: Sequence[pairwise.Row], used: Transport) -> int:
        hosts = self.world.nodes
        verdict = verdict_of_pairs(rows, hosts, used)
        lines = ["", f"network: {used.says}", *used.notes]
        if rows:
            lines += ["", pairwise.matrix(rows, hosts), "", pairwise.about(rows)]
        self._show(verdict, {"pairs": [asdict(row) for row in rows]}, lines)
        self._conclude(verdict)
        return verdict.code

    def _show(self, verdict: Verdict, more: Mapping[str, Any], lines: Sequence[str]) -> None:
        """Prints the object for programs, or what was measured for people."""
        value = {
            "verdict": verdict.word,
            "code": verdict.code,
            "says": verdict.says,
            "against": [{"wrong": each.wrong, "seen": each.seen, "fix": each.fix} for each in verdict.against],
            "setting": asdict(self.setting),
            "hosts": self.world.hosts,
            "about": self.about(),
            "options": asdict(self.options),
        }
        if self.options.json:
            print(json.dumps(value | dict(more)), flush=True)
        devices = ", ".join(self.setting.gpus) or self.setting.device
        site = f", {self.setting.site}" if self.setting.site else ""
        where = f"{shape(self.world)}, {self.setting.backend} on {devices}, torch {torch.__version__}{site}"
        self._print([where, *lines])

    def _conclude(self, verdict: Verdict) -> None:
        self._print(["", *map(str, verdict.against)])
        self._print([f"{verdict.word}: {verdict.says}"], f"bold {STYLES[verdict.word]}")

    def _print(self, lines: Sequence[str], style: str = "") -> None:
        """Prints the lines, but where an object for programs has it all."""
        screen = Console(highlight=False, quiet=self.options.json)
        for line in "\n".join(lines).split("\n"):  # names of hosts, and NCCL's own words, may hold escape codes
            screen.print(Text(one_line(line), style=style), soft_wrap=True)

    def about(self) -> dict[str, Any]:
        return {
            "muster": installed("muster"),
            "torch": str(torch.__version__),
            "nccl": versions.nccl(),
            "date": datetime.now().astimezone().isoformat(timespec="seconds"),
            "command": os.environ.get(LaunchVariable.COMMAND, ""),
        }

    def _save(self, path: Path, rows: Sequence[Row], verdict: Verdict, used: Transport) -> None:
        """Writes the baseline of a run that does not fail, and prints where."""
        line = f"{path} was not written: a run that fails is no baseline"
        if not verdict.against:
            about = self.about() | {"network": used.network, "gpudirect": used.gpudirect, "nodes": self.world.nodes}
            baseline.write(path, self.setting, rows, about)
            line = f"baseline: {path}"
        self._print(["", line])


def table(rows: Sequence[Row], faults: Sequence[WrongValues]) -> str:
    """A table of each collective as nccl-tests prints it, with the latencies behind its columns.

    Args:
        faults: all wrong values; those at sizes that have no row are counted below the rows.

    Source: https://github.com/NVIDIA/nccl-tests/blob/master/src/common.cu
    """
    blocks: list[str] = []
    for name, group in groupby(rows, key=lambda row: row.collective):
        of_collective = list(group)
        if not of_collective[0].passes:
            blocks.append(f"# {name}: {of_collective[0].note}")
            continue
        lines = [f"# {name}", *HEADER, *map(line, of_collective)]
        num_wrong = sum(fault.count for fault in faults if fault.collective == name)
        if of_collective[0].size:
            lines.append(f"# Out of bounds values : {num_wrong} {'FAILED' if num_wrong else 'OK'}")
            known = [row.busbw for row in of_collective if row.busbw is not None]
            lines.append(f"# Avg bus bandwidth    : {bandwidth(sum(known) / len(known) if known else None)}")
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks)


def line(row: Row) -> str:
    middle, count, kind, redop, root = row.middle, 0, "none", "none", -1
    assert middle is not None
    if row.size:
        collective = BY_NAME[row.collective]
        count = row.size // ELEMENT // collective.num_parts(row.num_ranks)
        kind, redop, root = "float", "none" if collective.giver else "sum", collective.root
    mean, p50, p99 = (f"{each * 1e6:.1f}" for each in (middle.mean_s, middle.p50_s, middle.p99_s))
    wrong = NONE if row.num_wrong is None else row.num_wrong
    return (
        f"{row.size:>11} {count:>10} {kind:>5} {redop:>5} {root:>4} {mean:>10} {bandwidth(row.algbw):>7} "
        f"{bandwidth(row.busbw):>7} {wrong:>6} {p50:>10} {p99:>10}"
    )
