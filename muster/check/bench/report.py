"""What rank 0 says and writes: the table or the object, the files, the baseline; and the verdict, last."""

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import torch
from rich.console import Console
from rich.text import Text

from muster.check import versions
from muster.check.bench import baseline, table
from muster.check.bench.baseline import Baseline, Setting, Slow
from muster.check.bench.pairwise import TIMES, Pairs
from muster.check.bench.sizes import shown
from muster.check.bench.sweep import Fault, Sweep
from muster.check.bench.table import Row
from muster.check.bench.transport import Transport
from muster.check.options import BenchOptions
from muster.errors import ExitCode, MusterError
from muster.train import console
from muster.train.world import World

Word = Literal["PASS", "FAIL", "NO BASELINE"]
COLOURS: dict[Word, str] = {"PASS": "green", "FAIL": "red", "NO BASELINE": "yellow"}


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
    if first.size == 0:
        return MusterError(
            f"{first.collective} let rank {first.rank} on {first.host} go on before all had come",
            seen=f"{first.found} of {first.expected:.0f} ranks had come",
            fix="another version of the backend; muster doctor shows which one is loaded",
            code=ExitCode.FAILED,
        )
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

    def of_sweep(self, rows: Sequence[Row], sweep: Sweep, used: Transport, known: Baseline | None) -> int:
        """Says and writes what was measured; returns the exit code.

        Raises:
            MusterError: all was said, but a file can't be written, or the baseline has none of these rows.
        """
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

        def show(screen: Console) -> None:
            _say(screen, [self.headline(), f"network: {used.says}", *used.notes, ""])
            table.print_rows(screen, rows)

        keys = [(row.collective, row.size) for row in rows if row.passes]
        return self._end(
            verdict,
            value,
            show,
            [
                lambda: self.save_baseline(rows, verdict, used),
                lambda: self.write(value),
                # It was asked before; but what the backend has not is known only now.
                lambda: baseline.check_held(keys, known, self.options.baseline or "") if known else None,
            ],
        )

    def of_pairs(self, pairs: Pairs) -> int:
        """The same for pairs of nodes."""
        verdict = verdict_of_pairs(pairs, len(self.world.nodes))
        value = self.value(verdict) | {"pairs": list(pairs.rows)}
        lines = [self.headline(), "", pairs.text]
        return self._end(verdict, value, lambda screen: _say(screen, lines), [lambda: self.write(value)])

    def _end(
        self,
        verdict: Verdict,
        value: dict[str, Any],
        show: Callable[[Console], None],
        writers: Sequence[Callable[[], None]],
    ) -> int:
        """Says what was measured, calls the `writers`, and says the verdict; returns the exit code.

        Raises:
            MusterError: of the last of the `writers` that failed, unless the verdict is worse; others are told.
        """
        screen = Console(highlight=False)
        if self.options.json:
            print(json.dumps(value), flush=True)
        else:
            show(screen)
        problems: list[MusterError] = []
        for write in writers:
            try:
                write()
            except MusterError as error:
                problems.append(error)
        if not self.options.json:
            _say(screen, ["", *map(str, verdict.against)])
            screen.print(Text(str(verdict), style=f"bold {COLOURS[verdict.word]}"), soft_wrap=True)
        for each in problems if verdict.code else problems[:-1]:
            console.tell(str(each))
        if problems and not verdict.code:
            raise problems[-1]
        return verdict.code

    def headline(self) -> str:
        """How many ranks are where, on which devices, by which backend."""
        setting, each = self.setting, set(self.setting.ranks)
        a_node = f"{each.pop()} each" if len(each) == 1 else " + ".join(map(str, setting.ranks))
        places = f"{_number(self.world.world_size, 'rank')} on {_number(setting.nodes, 'node')} ({a_node})"
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
            "command": os.environ.get("MUSTER_COMMAND", ""),
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
        if not self.options.json:
            _say(Console(highlight=False), ["", said])

    def write(self, value: dict[str, Any]) -> None:
        """Writes bench.json where --output wants it.

        Raises:
            MusterError: it can't.
        """
        if self.options.output is None:
            return
        folder = Path(self.options.output)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "bench.json").write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            fix = "--output with a folder of yours"
            raise MusterError("the results can't be written", seen=str(error), fix=fix) from None


def _say(screen: Console, lines: Sequence[str]) -> None:
    for line in lines:
        screen.print(Text(line), soft_wrap=True)


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
