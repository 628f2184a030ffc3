"""What rank 0 says and writes: the table or the object, the files, the baseline; and its verdict."""

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

import torch
from rich.console import Console

from check import versions
from check.bench import baseline, plot, results, show, verdict
from check.bench.baseline import Baseline, Setting, Slow
from check.bench.pairwise import Pairs
from check.bench.results import Row
from check.bench.sweep import Sweep
from check.bench.transport import Transport
from check.bench.verdict import Verdict
from check.options import BenchOptions
from train import console
from train.errors import MusterError
from train.world import World

T = TypeVar("T")


@dataclass
class Report:
    """The answer of a measurement, on rank 0.

    Attributes:
        here: where it was measured.
        started: when, with the distance from UTC.
    """

    options: BenchOptions
    world: World
    here: Setting
    started: str = field(default_factory=lambda: datetime.now().astimezone().isoformat(timespec="seconds"))

    def of_sweep(self, rows: Sequence[Row], sweep: Sweep, used: Transport, known: Baseline | None) -> int:
        """Says and writes what was measured; returns the exit code.

        Raises:
            MusterError: all was said, but a file can't be written, or the baseline has none of these rows.
        """
        options = self.options
        slow = baseline.judge(rows, known) if known else []
        against = verdict.of_values(sweep.faults)
        if not used.is_expected:
            against.append(MusterError(used.wrong, seen=used.seen, fix=used.fix, code=1))
        against += baseline.told(slow, options.baseline or "")
        problems: list[MusterError] = []
        held = _tried(lambda: self.held(rows, known), problems)
        found = verdict.of(against, held, sweep.num_checks)
        value = self.value(found) | {
            "transport": asdict(used),
            "rows": [row.figures() for row in rows],
            "faults": [asdict(fault) for fault in sweep.faults],
            "checks": sweep.num_checks,
            "slow": [_of_slow(one) for one in slow],
        }
        # What took long to measure is shown before a file is written: a disk may be full.
        screen = Console(highlight=False)
        if options.json:
            print(json.dumps(value), flush=True)
        else:
            show.header(screen, [self.headline(), f"network: {used.says}", *used.notes, ""])
            show.table(screen, rows)
            show.header(screen, [""])
        saved = _tried(lambda: self.keep(rows, found, used), problems)
        _tried(lambda: self.write(rows, value), problems)
        if not options.json:
            show.header(screen, [saved] if saved else [])
            show.answer(screen, found)
        return _code(found, problems)

    def of_pairs(self, pairs: Pairs) -> int:
        """The same for pairs of nodes."""
        against = [MusterError(each.wrong, seen=each.seen, fix=each.fix, code=1) for each in pairs.findings]
        found = verdict.of_pairs(against, len(self.world.nodes), pairs.differ)
        value = self.value(found) | {"pairs": [asdict(row) for row in pairs.rows]}
        if self.options.json:
            print(json.dumps(value), flush=True)
        else:
            screen = Console(highlight=False)
            show.header(screen, [self.headline(), "", pairs.text, ""])
            show.answer(screen, found)
        problems: list[MusterError] = []
        _tried(lambda: self.write([], value), problems)
        return _code(found, problems)

    def headline(self) -> str:
        """Who speaks to whom, by what."""
        here, each = self.here, set(self.here.ranks)
        a_node = f"{each.pop()} each" if len(each) == 1 else " + ".join(map(str, here.ranks))
        places = f"{_number(self.world.world_size, 'rank')} on {_number(here.nodes, 'node')} ({a_node})"
        devices = ", ".join(here.gpus) or here.device
        return (
            f"{places}, {here.backend} on {devices}, torch {torch.__version__}{f', {here.site}' if here.site else ''}"
        )

    def held(self, rows: Sequence[Row], known: Baseline | None) -> str | None:
        """What the figures were held against, in words; None without a baseline.

        Raises:
            MusterError: it has none of these rows.
        """
        if known is None:
            return None
        keys = [(row.collective, row.size) for row in rows if row.passes]
        # It was asked before; but what the backend has not is known only now.
        baseline.check_held(keys, known, self.options.baseline or "")
        measured, held = len(keys), baseline.num_held(rows, known)
        worth = f"half of them would be found if they took {baseline.least_found(known):.2f} times as long"
        return f"{held} of {measured} rows are as fast as in {self.options.baseline}; {worth}"

    def value(self, found: Verdict) -> dict[str, Any]:
        """What is said of any measurement, for programs."""
        return {
            "verdict": found.word,
            "code": found.code,
            "says": found.held,
            "against": [{"wrong": each.wrong, "seen": each.seen, "fix": each.fix} for each in found.against],
            "setting": asdict(self.here),
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
            "command": os.environ.get("MUSTER_COMMAND", ""),
        }

    def keep(self, rows: Sequence[Row], found: Verdict, used: Transport) -> str:
        """Writes the baseline that is wanted; returns what became of it."""
        if self.options.save_baseline is None:
            return ""
        path = Path(self.options.save_baseline)
        if found.word == "FAIL":
            return f"{path} was not written: a run that fails is no baseline"
        about = self.about() | {"network": used.network, "gpudirect": used.gpudirect, "nodes": self.world.nodes}
        baseline.write(path, self.here, rows, about)
        return f"baseline: {path}"

    def write(self, rows: Sequence[Row], value: dict[str, Any]) -> None:
        """Writes bench.json where --output wants it, and of `rows`, where there are any, bench.csv and bench.png.

        Raises:
            MusterError: it can't.
        """
        if self.options.output is None:
            return
        folder = Path(self.options.output)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "bench.json").write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
            if rows:
                (folder / "bench.csv").write_text(results.to_csv(rows), encoding="utf-8")
                plot.write(folder / "bench.png", rows, self.headline())
        except OSError as error:
            raise MusterError(
                "the results can't be written", seen=str(error), fix="--output with a folder of yours"
            ) from None


def _tried(function: Callable[[], T], problems: list[MusterError]) -> T | None:
    """What `function` returns; None where it can't, which is added to `problems`."""
    try:
        return function()
    except MusterError as error:
        problems.append(error)
        return None


def _code(found: Verdict, problems: Sequence[MusterError]) -> int:
    """The exit code of the verdict.

    Raises:
        MusterError: the last of `problems`, unless the verdict is worse than they are; the others are told.
    """
    for each in problems if found.code else problems[:-1]:
        console.tell(str(each))
    if problems and not found.code:
        raise problems[-1]
    return found.code


def _of_slow(one: Slow) -> dict[str, Any]:
    return {
        "collective": one.row.collective,
        "figure": one.figure,
        "size": one.row.size,
        "now_us": one.now_s * 1e6,
        "slowest_us": one.slowest_s * 1e6,
        "factor": one.factor,
    }


def _number(number: int, word: str) -> str:
    return f"{number} {word}{'s' if number > 1 else ''}"
