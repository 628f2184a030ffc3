"""What rank 0 says and writes: the table or the object, the baseline; and the verdict, last."""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from muster.check import versions
from muster.check.bench import baseline
from muster.check.bench.baseline import Baseline, Setting, Slow
from muster.check.bench.pairwise import TIMES, Pairs
from muster.check.bench.sweep import Fault, Row, Sweep, shown
from muster.check.bench.transport import Transport
from muster.check.options import BenchOptions
from muster.check.ranks import plural
from muster.errors import ExitCode, MusterError
from muster.train import console
from muster.train.world import World
from muster.variables import LaunchVariable

Word = Literal["PASS", "FAIL", "NO BASELINE"]
COLOURS: dict[Word, str] = {"PASS": "green", "FAIL": "red", "NO BASELINE": "yellow"}

NONE = "N/A"
COLUMNS = ("collective", "size", "algbw", "busbw", "time", "p50", "p99", "values")
UNITS = "algbw and busbw in 10^9 bytes/s, as by nccl-tests; times in us"


@dataclass(frozen=True)
class Verdict:
    """The answer.

    Attributes:
        held: what was held against what, in words.
        against: each thing that makes it a FAIL.
    """

    word: Word
    held: str
    against: tuple[MusterError, ...] = ()

    @property
    def code(self) -> int:
        """The exit code of all ranks."""
        return ExitCode.FAILED if self.word == "FAIL" else ExitCode.DONE

    def __str__(self) -> str:
        return f"{self.word}: {self.held}"


def verdict_of(against: Sequence[MusterError], held: str | None, otherwise: str) -> Verdict:
    """The verdict.

    Args:
        against: what speaks against the run.
        held: what it was held against, in words; None where there was nothing.
        otherwise: what to say then.
    """
    if against:
        more = f", and {len(against) - 1} more" if len(against) > 1 else ""
        return Verdict("FAIL", against[0].wrong + more, tuple(against))
    return Verdict("NO BASELINE", otherwise) if held is None else Verdict("PASS", held)


def verdict_of_pairs(pairs: Pairs, num_nodes: int) -> Verdict:
    """The verdict on pairs of nodes, which are held against each other."""
    if num_nodes < 2:
        return verdict_of(pairs.errors, None, "one node: nothing was measured")
    if num_nodes == 2:
        only = "two nodes: their link was held against nothing but its own two directions"
        return verdict_of(pairs.errors, None, only)
    # Where most links are slow, as those between two racks may be, none stands out: that is no PASS.
    held = "no link is slow" if pairs.differ <= TIMES else None
    says = f"links differ {pairs.differ:.1f}-fold, and no node or single link stands out: see which are the slow ones"
    return verdict_of(pairs.errors, held, says)


def wrong_values(faults: Sequence[Fault]) -> list[MusterError]:
    """What to say of wrong values: one for each collective and rank, with the smallest message."""
    found: dict[tuple[str, int], list[Fault]] = {}
    for fault in sorted(faults, key=lambda each: each.size):
        found.setdefault((fault.collective, fault.rank), []).append(fault)
    return [_wrong_values_of_rank(several) for several in found.values()]


def _wrong_values_of_rank(several: Sequence[Fault]) -> MusterError:
    first = several[0]
    sizes = ", ".join(dict.fromkeys(shown(fault.size) for fault in several))
    return MusterError(
        f"{first.collective} gave wrong values to rank {first.rank} on {first.host}, at {sizes}",
        seen=f"element {first.index} of {shown(first.size)} was {first.found}, not {first.expected:.0f}; "
        f"{first.count} elements are wrong",
        fix=f"don't train here: try again without {first.host}; if it is that node's, its GPU, memory or network is "
        "broken; if not, another version of the backend",
        code=ExitCode.FAILED,
    )


@dataclass
class Report:
    """The answer of a measurement, on rank 0.

    What took long to measure is shown before a file is written, as a disk may be full.

    Attributes:
        setting: where it was measured.
        started: when, with the distance from UTC.
    """

    options: BenchOptions
    world: World
    setting: Setting
    started: str = field(default_factory=lambda: datetime.now().astimezone().isoformat(timespec="seconds"))
    screen: Console = field(default_factory=lambda: Console(highlight=False))

    def of_sweep(self, rows: Sequence[Row], sweep: Sweep, used: Transport, known: Baseline | None) -> int:
        """Says and writes what was measured; returns the exit code."""
        slow = baseline.find_slow(rows, known) if known else []
        against = wrong_values(sweep.faults)
        if used.error is not None:
            against.append(used.error)
        against += baseline.errors(slow, self.options.baseline or "")
        otherwise = f"values were right in {sweep.num_checks} checks; "
        otherwise += "--save-baseline FILE keeps such figures for the next time"
        verdict = verdict_of(against, self.held(rows, known), otherwise)
        value = self.value(verdict) | {
            "transport": {"network": used.network, "gpudirect": used.gpudirect, "says": used.says, "notes": used.notes},
            "rows": [row.figures() for row in rows],
            "faults": [asdict(fault) for fault in sweep.faults],
            "checks": sweep.num_checks,
            "slow": [_of_slow(one) for one in slow],
        }
        self._show(value, [self.headline(), f"network: {used.says}", *used.notes, ""], rows)
        code = verdict.code
        try:
            self.save_baseline(rows, verdict, used)
            if known is not None:
                baseline.check_held(rows, known, self.options.baseline or "")
        except MusterError as error:
            console.tell(str(error))
            code = code or error.code
        self._conclude(verdict)
        return code

    def of_pairs(self, pairs: Pairs) -> int:
        """The same for pairs of nodes."""
        verdict = verdict_of_pairs(pairs, len(self.world.nodes))
        self._show(self.value(verdict) | {"pairs": list(pairs.rows)}, [self.headline(), "", pairs.text])
        self._conclude(verdict)
        return verdict.code

    def _show(self, value: Mapping[str, Any], lines: Sequence[str], rows: Sequence[Row] = ()) -> None:
        if self.options.json:
            print(json.dumps(value), flush=True)
            return
        self._say(lines)
        if rows:
            print_rows(self.screen, rows)

    def _conclude(self, verdict: Verdict) -> None:
        self._say(["", *map(str, verdict.against)])
        if not self.options.json:
            self.screen.print(Text(str(verdict), style=f"bold {COLOURS[verdict.word]}"), soft_wrap=True)

    def _say(self, lines: Sequence[str]) -> None:
        """Prints the lines, but where an object for programs has it all."""
        for line in () if self.options.json else lines:
            self.screen.print(Text(line), soft_wrap=True)

    def headline(self) -> str:
        """How many ranks are where, on which devices, by which backend."""
        setting, each = self.setting, set(self.setting.ranks)
        a_node = f"{each.pop()} each" if len(each) == 1 else " + ".join(map(str, setting.ranks))
        places = f"{plural(self.world.world_size, 'rank')} on {plural(setting.nodes, 'node')} ({a_node})"
        devices = ", ".join(setting.gpus) or setting.device
        site = f", {setting.site}" if setting.site else ""
        return f"{places}, {setting.backend} on {devices}, torch {torch.__version__}{site}"

    def held(self, rows: Sequence[Row], known: Baseline | None) -> str | None:
        """What the figures were held against, in words; None where there was nothing."""
        keys = [(row.collective, row.size) for row in rows if row.passes]
        held = sum(key in known.passes for key in keys) if known else 0
        if known is None or not held:
            return None
        worth = f"half of them would be found if they took {baseline.least_found(known):.2f} times as long"
        return f"{held} of {len(keys)} rows are as fast as in {self.options.baseline}; {worth}"

    def value(self, verdict: Verdict) -> dict[str, Any]:
        """What is said of any measurement, for programs."""
        return {
            "verdict": verdict.word,
            "code": verdict.code,
            "says": verdict.held,
            "against": [{"wrong": each.wrong, "seen": each.seen, "fix": each.fix} for each in verdict.against],
            "setting": asdict(self.setting),
            "hosts": self.world.hosts,
            "about": self.about(),
            "options": asdict(self.options),
        }

    def about(self) -> dict[str, Any]:
        """Versions and date."""
        return {
            "muster": metadata.version("muster"),
            "torch": str(torch.__version__),
            "nccl": versions.nccl(),
            "date": self.started,
            "command": os.environ.get(LaunchVariable.COMMAND, ""),
        }

    def save_baseline(self, rows: Sequence[Row], verdict: Verdict, used: Transport) -> None:
        """Writes the baseline that is wanted, and says so."""
        if self.options.save_baseline is None:
            return
        path = Path(self.options.save_baseline)
        said = f"baseline: {path}"
        if verdict.word == "FAIL":
            said = f"{path} was not written: a run that fails is no baseline"
        else:
            about = self.about() | {"network": used.network, "gpudirect": used.gpudirect, "nodes": self.world.nodes}
            baseline.write(path, self.setting, rows, about)
        self._say(["", said])


def print_rows(console: Console, rows: Sequence[Row]) -> None:
    """Prints a line for each row, with a gap between collectives."""
    console.print(Text(UNITS), soft_wrap=True)
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for name in COLUMNS:
        table.add_column(name, justify="left" if name in ("collective", "values") else "right", no_wrap=True)
    for number, row in enumerate(rows):
        if number and row.collective != rows[number - 1].collective:
            table.add_row()
        table.add_row(*cells(row))
    console.print(table)


def cells(row: Row) -> list[str]:
    """A row of the table, by COLUMNS."""
    middle = row.middle
    if middle is None:
        return [row.collective, *["-"] * (len(COLUMNS) - 2), row.note]
    times = [f"{each * 1e6:.1f}" for each in (middle.mean_s, middle.p50_s, middle.p99_s)]
    values = {True: "ok", False: "WRONG", None: NONE}[row.is_right]
    size = shown(row.size) if row.size else "-"
    return [row.collective, size, _bandwidth(row.algbw), _bandwidth(row.busbw), *times, values]


def _bandwidth(value: float | None) -> str:
    return NONE if value is None else f"{value:.4g}" if value < 1000 else f"{value:.0f}"


def _of_slow(one: Slow) -> dict[str, Any]:
    return {
        "collective": one.row.collective,
        "figure": one.figure,
        "size": one.row.size,
        "now_us": one.now_s * 1e6,
        "slowest_us": one.slowest_s * 1e6,
        "factor": one.factor,
    }
