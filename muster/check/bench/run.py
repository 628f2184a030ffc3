"""One rank of a measurement, from connecting to the exit code; rank 0 prints the report and saves a baseline."""

import json
import os
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from rich.console import Console
from rich.text import Text

from muster.check import ranks, versions
from muster.check.bench import baseline, collectives, pairwise, transport
from muster.check.bench.sweep import NONE, Row, Sweep, bandwidth, chosen_sizes
from muster.check.options import BenchOptions
from muster.errors import ExitCode, MusterError, one_line
from muster.paths import installed
from muster.train.distributed.backends import compare_fabrics, open_group
from muster.train.distributed.world import RanksMissing, World, close_group
from muster.train.health import faults, memory
from muster.train.reporting import console
from muster.units import listed
from muster.variables import LaunchVariable

WAIT_S = 10
"""Seconds that ranks which can't go on wait for each other: the error names those that do not report."""

HEADER = (
    "#      size      count  type redop root       time   algbw   busbw #wrong        p50        p99",
    "#       (B) (elements)                        (us)  (GB/s)  (GB/s)              (us)       (us)",
)


def run(options: BenchOptions) -> None:
    """Measures, prints the verdict on rank 0, and ends the process."""
    world, sweep, doing = None, None, "the start"
    try:
        world = ranks.join(options.timeout_s)
        watch = faults.Watch(world)
        world = ranks.with_device(world, options.device, options.backend)
        names = faults.agree(world, lambda: collectives.chosen(options.collectives))
        sizes = faults.agree(world, lambda: chosen_sizes(options, world.backend or ""))
        setting = baseline.Setting.of(world)
        known = baseline.load(world, options, setting)
        if world.backend == "nccl":
            transport.request_log(os.environ)
            compare_fabrics(world)
        faults.agree(world, lambda: open_group(world))
        report = Report(options, world, setting)
        if options.pairwise:
            doing = "the measurement of pairs of nodes"
            links = pairwise.run(world, options)
            answer = partial(report.of_pairs, links, transport.used(world, options))
        else:
            sweep = Sweep(world, options, sizes, names)
            rows, used = measure(sweep, known)
            answer = partial(report.of_sweep, rows, sweep, used, known)
        code = world.gather(ranks.print_answer(answer) if world.main else 0)[0]
        close_group()
        watch.close()
    except Exception as error:
        if os.environ.get("MUSTER_DEBUG"):
            traceback.print_exc()
        code = report_failure(world, error, sweep.doing if sweep else doing)
        if isinstance(error, RanksMissing):
            ranks.leave(error.world, code)  # the connected ranks have yet to read it from the store
    ranks.leave(world, code)


def measure(sweep: Sweep, known: baseline.Baseline | None) -> tuple[list[Row], transport.Transport]:
    """All rows, with the passes that saving them or comparing them with `known` needs; and the network they used."""
    rows = sweep.rows()
    used = transport.used(sweep.world, sweep.options)
    if sweep.options.save_baseline is not None:
        for _ in range(baseline.PASSES - 1):
            rows = [sweep.again(row) if row.passes else row for row in rows]
    for _ in range(baseline.PASSES):
        slow = baseline.find_slow(rows, known) if known else []
        doubted = {(one.collective, one.size) for one in slow if one.num_passes < baseline.PASSES}
        # Only slow rows are measured again: the cause may be temporary.
        rows = [sweep.again(row) if (row.collective, row.size) in doubted else row for row in rows]
    return rows, used


def report_failure(world: World | None, error: Exception, doing: str) -> int:
    """Reports `error`, once for all ranks; returns the exit code.

    Args:
        world: None where the ranks are not connected.
    """
    if isinstance(error, faults.SharedFault) or (world is None and isinstance(error, RanksMissing)):
        # All ranks know of it, and one reports it.
        if getattr(error, "is_reporter", os.environ.get("RANK", "0") == "0"):
            console.notify(str(error))
        return error.code
    if world is None and isinstance(error, dist.DistError):
        wrong = f"rank {os.environ.get('RANK', '0')} lost rank 0 before all ranks had connected"
        fix = "look at the output of rank 0, and how its process ended"
        error = MusterError(wrong, seen=str(error).partition("\n")[0], fix=fix, code=ExitCode.FAILED)
    if world is None:
        console.notify(str(error) if isinstance(error, MusterError) else "".join(traceback.format_exception(error)))
        return error.code if isinstance(error, MusterError) else ExitCode.FAILED
    if (found := explain(world, error, doing)) is None:
        return ExitCode.FAILED
    fault = faults.Fault(world.rank, world.host, found.code, found.wrong)
    if faults.publish(world, fault, world.store).rank == world.rank:
        console.notify(str(found))
    return found.code


def explain(world: World, error: Exception, doing: str) -> MusterError | None:
    """The error to report for this rank's `error`; None where another rank reports it."""
    this = f"rank {world.rank} on {world.host}"
    if isinstance(error, MusterError) and not isinstance(error, RanksMissing):
        return error
    # Backends report the loss of other ranks by a plain RuntimeError.
    is_speaking = isinstance(error, RuntimeError) and dist.is_initialized() and not memory.find(error)
    has_lost_others = is_speaking or isinstance(error, RanksMissing | dist.DistError)
    reason = transport.with_warnings(error.seen if isinstance(error, RanksMissing) else error)
    fix = "muster doctor checks the nodes and the network between them; more time: --timeout-s"
    if not has_lost_others:
        wrong = f"{this} failed during {doing}: {type(error).__name__}"
        fix = "muster bench --debug shows the traceback; a smaller --max-size needs less memory"
    elif (alive := ranks_alive(world)) is None:
        wrong = f"{this} lost the other ranks during {doing}"
    elif world.rank != min(alive):
        return None
    elif len(alive) == world.world_size:
        wrong = f"all ranks are alive, but {doing} failed"
    else:
        missing = [rank for rank in range(world.world_size) if rank not in alive]
        hosts = listed(world.hosts[rank] for rank in missing)
        numbers = listed(missing, 8)
        wrong = f"{'rank' if len(missing) == 1 else 'ranks'} {numbers} on {hosts} did not return from {doing}"
    return MusterError(wrong, seen=f"{this}: {reason}", fix=fix, code=ExitCode.FAILED)


def ranks_alive(world: World) -> list[int] | None:
    """The ranks that report within WAIT_S that they can't go on, and so are alive; None where the store is gone."""
    assert world.store is not None
    keys = [f"broken/{rank}" for rank in range(world.world_size)]
    try:
        world.store.set(keys[world.rank], "")
        with suppress(dist.DistStoreError):
            world.store.wait(keys, timedelta(seconds=WAIT_S))
        return [rank for rank, key in enumerate(keys) if world.store.check([key])]
    except dist.DistError:
        return None


@dataclass(frozen=True)
class Verdict:
    """The verdict on a measurement.

    Attributes:
        errors: the errors for which it fails.
        if_ok: the sentence without errors: what was compared with what.
        is_sure: False where the absence of errors means little.
    """

    errors: Sequence[MusterError]
    if_ok: str
    is_sure: bool = True

    @property
    def word(self) -> Literal["ok", "warning", "failed"]:
        return "failed" if self.errors else "ok" if self.is_sure else "warning"

    @property
    def says(self) -> str:
        more = f", and {len(self.errors) - 1} more" if len(self.errors) > 1 else ""
        return self.errors[0].wrong + more if self.errors else self.if_ok

    @property
    def code(self) -> int:
        return ExitCode.FAILED if self.errors else ExitCode.DONE


def verdict_of_pairs(rows: Sequence[pairwise.Row], hosts: Sequence[str], used: transport.Transport) -> Verdict:
    """The verdict on pairs of the nodes `hosts`, which are compared with each other."""
    errors = [*([used.error] if used.error else []), *pairwise.errors(rows)]
    if len(hosts) < 2:
        says = "one node: nothing was measured"
    elif len(hosts) == 2:
        says = "two nodes: only the two directions of their link were compared"
    elif (times := pairwise.differ(rows)) > pairwise.SLOW_FACTOR:
        # Where most links are slow, as those between two racks may be, none stands out.
        says = f"links differ {times:.1f}-fold, and no node or single link stands out: see which are slow"
    else:
        return Verdict(errors, "no link is slow")
    return Verdict(errors, says, is_sure=False)


def wrong_values(faults: Sequence[collectives.WrongValues]) -> list[MusterError]:
    """The errors for wrong values: one for each collective and rank, with the smallest message."""
    by_rank: dict[tuple[str, int], list[collectives.WrongValues]] = {}
    for fault in sorted(faults, key=lambda each: each.size):
        by_rank.setdefault((fault.collective, fault.rank), []).append(fault)
    found: list[MusterError] = []
    for first, *others in by_rank.values():
        sizes = listed((collectives.shown(fault.size) for fault in (first, *others)), 8)
        wrong = f"{first.collective} gave wrong values to rank {first.rank} on {first.host}, at {sizes}"
        fix = (
            f"don't train here: try again without {first.host}; if that helps, its GPU, memory or network is broken; "
            "if not, try another version of the backend"
        )
        found.append(MusterError(wrong, seen=str(first), fix=fix, code=ExitCode.FAILED))
    return found


@dataclass
class Report:
    """The report on a measurement, on rank 0. It prints figures before it writes a file, as the disk may be full."""

    options: BenchOptions
    world: World
    setting: baseline.Setting

    def of_sweep(
        self, rows: Sequence[Row], sweep: Sweep, used: transport.Transport, known: baseline.Baseline | None
    ) -> int:
        """Prints the figures and saves a baseline of them, if asked for; returns the exit code."""
        options = self.options
        slow = baseline.find_slow(rows, known) if known else []
        errors = wrong_values(sweep.faults)
        if used.error is not None:
            errors.append(used.error)
        errors += baseline.errors(slow, options.baseline or "")
        num_rows = sum(bool(row.passes) for row in rows)
        num_held = sum((row.collective, row.size) in known.passes for row in rows) if known else 0
        held = "compared with no baseline: --save-baseline FILE keeps one for the next time"
        if known and num_held:
            worth = f"half of them would be found if they took {baseline.least_found(known):.2f} times as long"
            held = f"{num_held} of {num_rows} rows are as fast as in {options.baseline}; {worth}"
        right = f"values were right in {sweep.num_checks} checks; {held}"
        verdict = Verdict(errors, right if num_rows else "nothing was measured", is_sure=num_rows > 0)
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

    def of_pairs(self, rows: Sequence[pairwise.Row], used: transport.Transport) -> int:
        hosts = self.world.nodes
        verdict = verdict_of_pairs(rows, hosts, used)
        lines = ["", f"network: {used.says}", *used.notes]
        if rows:
            lines += ["", pairwise.matrix(rows, hosts), "", pairwise.about(rows)]
        self._show(verdict, {"pairs": [asdict(row) for row in rows]}, lines)
        self._conclude(verdict)
        return verdict.code

    def _show(self, verdict: Verdict, more: Mapping[str, Any], lines: Sequence[str]) -> None:
        """Prints the figures, as a JSON object or as text."""
        value = {
            "verdict": verdict.word,
            "code": verdict.code,
            "says": verdict.says,
            "against": [{"wrong": each.wrong, "seen": each.seen, "fix": each.fix} for each in verdict.errors],
            "setting": asdict(self.setting),
            "hosts": self.world.hosts,
            "about": self.about(),
            "options": asdict(self.options),
        }
        if self.options.json:
            print(json.dumps(value | dict(more)), flush=True)
        devices = ", ".join(self.setting.gpus) or self.setting.device
        site = f", {self.setting.site}" if self.setting.site else ""
        where = f"{ranks.shape(self.world)}, {self.setting.backend} on {devices}, torch {torch.__version__}{site}"
        self._print([where, *lines])

    def _conclude(self, verdict: Verdict) -> None:
        self._print(["", *map(str, verdict.errors)])
        self._print([f"{verdict.word}: {verdict.says}"], f"bold {ranks.STYLES[verdict.word]}")

    def _print(self, lines: Sequence[str], style: str = "") -> None:
        """Prints the lines; nothing with --json, as the object has everything."""
        screen = Console(highlight=False, quiet=self.options.json)
        for line in "\n".join(lines).split("\n"):  # host names and NCCL's messages may contain escape codes
            screen.print(Text(one_line(line), style=style), soft_wrap=True)

    def about(self) -> dict[str, Any]:
        return {
            "muster": installed("muster"),
            "torch": str(torch.__version__),
            "nccl": versions.nccl(),
            "date": datetime.now().astimezone().isoformat(timespec="seconds"),
            "command": os.environ.get(LaunchVariable.COMMAND, ""),
        }

    def _save(self, path: Path, rows: Sequence[Row], verdict: Verdict, used: transport.Transport) -> None:
        """Writes the baseline of a run that does not fail, and prints where."""
        line = f"{path} was not written: a run that fails is no baseline"
        if not verdict.errors:
            about = self.about() | {"network": used.network, "gpudirect": used.gpudirect, "nodes": self.world.nodes}
            baseline.write(path, self.setting, rows, about)
            line = f"baseline: {path}"
        self._print(["", line])


def table(rows: Sequence[Row], faults: Sequence[collectives.WrongValues]) -> str:
    """A table of each collective as nccl-tests prints it, with two more columns for p50 and p99.

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
        collective = collectives.BY_NAME[row.collective]
        count = row.size // collectives.ELEMENT // collective.num_parts(row.num_ranks)
        kind, redop, root = "float", "none" if collective.giver else "sum", collective.root
    mean, p50, p99 = (f"{each * 1e6:.1f}" for each in (middle.mean_s, middle.p50_s, middle.p99_s))
    wrong = NONE if row.num_wrong is None else row.num_wrong
    return (
        f"{row.size:>11} {count:>10} {kind:>5} {redop:>5} {root:>4} {mean:>10} {bandwidth(row.algbw):>7} "
        f"{bandwidth(row.busbw):>7} {wrong:>6} {p50:>10} {p99:>10}"
    )
