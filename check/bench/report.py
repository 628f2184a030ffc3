"""What rank 0 says and writes: the table or the object, the files, the baseline; and its verdict."""

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime
from importlib import metadata
from pathlib import Path
from typing import Any

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
from train.errors import MusterError
from train.world import World


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
            MusterError: a file can't be written, or the baseline has none of these rows.
        """
        options = self.options
        slow = baseline.judge(rows, known) if known else []
        against = verdict.of_values(sweep.faults)
        if not used.is_expected:
            against.append(MusterError(used.wrong, seen=used.seen, fix=used.fix, code=1))
        against += baseline.told(slow, options.baseline or "")
        found = verdict.of(against, self.held(rows, known), sweep.num_checks)
        value = self.value(found) | {
            "transport": asdict(used),
            "rows": [row.figures() for row in rows],
            "faults": [asdict(fault) for fault in sweep.faults],
            "checks": sweep.num_checks,
            "slow": [_of_slow(one) for one in slow],
        }
        saved = self.keep(rows, found, used)
        if options.output is not None:
            self.write(Path(options.output), rows, value)
        if options.json:
            print(json.dumps(value))
            return found.code
        console = Console(highlight=False)
        show.header(console, [self.headline(), f"network: {used.says}", *used.notes, ""])
        show.table(console, rows)
        show.header(console, ["", *([saved] if saved else [])])
        show.answer(console, found)
        return found.code

    def of_pairs(self, pairs: Pairs) -> int:
        """The same for pairs of nodes."""
        against = [MusterError(each.wrong, seen=each.seen, fix=each.fix, code=1) for each in pairs.findings]
        found = verdict.of_pairs(against, len(self.world.nodes))
        value = self.value(found) | {"pairs": [asdict(row) for row in pairs.rows]}
        if self.options.output is not None:
            self.write(Path(self.options.output), [], value)
        if self.options.json:
            print(json.dumps(value))
        else:
            console = Console(highlight=False)
            show.header(console, [self.headline(), "", pairs.text, ""])
            show.answer(console, found)
        return found.code

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
        measured, held = sum(bool(row.passes) for row in rows), baseline.num_held(rows, known)
        if not held:
            raise MusterError(
                "the baseline has none of the collectives and sizes that were measured",
                seen=f"--baseline={self.options.baseline}",
                fix="give the same --collectives, --min-size, --max-size and --factor as for --save-baseline",
            )
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

    def write(self, folder: Path, rows: Sequence[Row], value: dict[str, Any]) -> None:
        """Writes bench.json into `folder`, and of `rows`, where there are any, bench.csv and bench.png.

        Raises:
            MusterError: it can't.
        """
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
