"""A baseline: the figures of an earlier measurement, and the comparison of new figures with them.

A baseline keeps several passes of each row. A row is too slow when each of its new passes, of which there are as many,
takes longer than the slowest pass of the baseline by more than the factor between the slowest and the fastest pass of
the baseline: the row's own factor, or the median of all rows' factors where that is larger. So the tolerance is the
machine's own variation. The mean call and the median call are compared: half the bandwidth makes both twice as long; an
occasional delay, as on a link that loses packets, shows in the mean; and where healthy machines have occasional delays
too, only the median shows a slow row.
"""

import json
import os
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import torch

from muster.check.bench.collectives import shown
from muster.check.bench.sweep import Row, Timing
from muster.check.options import BenchOptions
from muster.errors import ExitCode, MusterError, explaining
from muster.paths import content_of
from muster.train.distributed.world import World
from muster.train.health.faults import agree
from muster.units import plural
from muster.variables import LaunchVariable

Key = tuple[str, int]

PASSES = 5
"""The passes of each row in a baseline, and the most passes of a row that is compared with one."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """The conditions of a measurement: figures can be compared only if their settings are equal.

    Attributes:
        site: the site's name; empty where none is known.
        ranks: the number of ranks on each node.
        gpus: the different names of the GPUs; none on CPUs.
    """

    site: str
    backend: str
    device: str
    nodes: int
    ranks: tuple[int, ...]
    gpus: tuple[str, ...] = ()

    @classmethod
    def of(cls, world: World) -> "Setting":
        """The setting of this measurement. To be called on all ranks."""
        gpu = torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else ""
        return cls(
            site=site(os.environ),
            backend=world.backend or "",
            device=world.device.type,
            nodes=len(world.nodes),
            ranks=tuple(world.hosts.count(host) for host in world.nodes),
            gpus=tuple(sorted({name for name in world.gather(gpu) if name})),
        )


def site(environ: Mapping[str, str]) -> str:
    """The site's name, as the launch found it, the user set it, or Slurm names its cluster; else empty."""
    for name in (LaunchVariable.SITE_FOUND, "MUSTER_SITE", "SLURM_CLUSTER_NAME"):
        if environ.get(name, "auto") not in ("auto", "off", ""):
            return environ[name]
    return ""


class Kept(msgspec.Struct, frozen=True):
    """A row of a baseline, with the timing of each pass."""

    collective: str
    size: int
    passes: Annotated[tuple[Timing, ...], msgspec.Meta(min_length=1)]


class Baseline(msgspec.Struct, frozen=True, kw_only=True):
    """The contents of a baseline file.

    Attributes:
        muster_bench: the version of the file format.
        about: versions, network and date: for people, not for comparing.
    """

    muster_bench: Literal[1] = 1
    setting: Setting
    about: dict[str, Any] = {}
    rows: Annotated[tuple[Kept, ...], msgspec.Meta(min_length=1)]

    @property
    def passes(self) -> dict[Key, tuple[Timing, ...]]:
        """The timing of each pass, by collective and size."""
        return {(row.collective, row.size): row.passes for row in self.rows}


@dataclass(frozen=True)
class Slow:
    """A row that is too slow.

    Attributes:
        figure: which of its times is too long: mean or p50.
        num_passes: how often it was measured.
        now_us: the figure of its fastest pass.
        slowest_us: the figure of the baseline's slowest pass.
        factor: how many times as long as that slowest pass it may take.
    """

    collective: str
    size: int
    figure: str
    num_passes: int
    now_us: float
    slowest_us: float
    factor: float


def find_slow(rows: Sequence[Row], baseline: Baseline) -> list[Slow]:
    """The rows that are too slow, each once; rows that the baseline does not have are not compared."""
    found: dict[Key, Slow] = {}
    for figure in ("mean", "p50"):
        times = {key: [getattr(one, f"{figure}_s") for one in passes] for key, passes in baseline.passes.items()}
        factors = _factors(times)
        for row in rows:
            key = (row.collective, row.size)
            if key not in times or not row.passes:
                continue
            now_us = 1e6 * min(getattr(one, f"{figure}_s") for one in row.passes)
            slowest_us = 1e6 * max(times[key])
            if now_us > slowest_us * factors[key]:
                found.setdefault(key, Slow(*key, figure, len(row.passes), now_us, slowest_us, factors[key]))
    return list(found.values())


def _factors(times: Mapping[Key, Sequence[float]]) -> dict[Key, float]:
    """The factor by which each row may take longer than the slowest of its `times`."""
    own = {key: max(each) / min(each) for key, each in times.items()}
    common = statistics.median(own.values()) if own else 1.0
    return {key: max(factor, common) for key, factor in own.items()}


def least_found(baseline: Baseline) -> float:
    """The sensitivity of a comparison: half of the rows are found if they take this many times as long as usual."""
    times = {key: [one.p50_s for one in passes] for key, passes in baseline.passes.items()}
    factors = _factors(times)
    return statistics.median(max(each) * factors[key] / statistics.median(each) for key, each in times.items())


def errors(slow: Sequence[Slow], path: str) -> list[MusterError]:
    """The errors for the rows that are too slow: one for each collective, with its worst size."""
    found: list[MusterError] = []
    for name in dict.fromkeys(one.collective for one in slow):
        own = [one for one in slow if one.collective == name]
        worst = max(own, key=lambda one: one.now_us / one.slowest_us)
        times = f"{worst.now_us / worst.slowest_us:.2f} times"
        size = f" of {shown(worst.size)}" if worst.size else ""
        more = f", and too slow at {plural(len(own) - 1, 'more size')}" if len(own) > 1 else ""
        wrong = f"{name}{size} takes {times} as long as the slowest pass of the baseline{more}"
        seen = (
            f"{worst.figure} {worst.now_us:.1f} us in the fastest of {plural(worst.num_passes, 'pass')}; in "
            f"{path} {worst.slowest_us:.1f} us in the slowest, and passes differ by a factor of {worst.factor:.2f}"
        )
        fix = "muster bench --pairwise names the slow link or node; if this is acceptable from now on: --save-baseline"
        found.append(MusterError(wrong, seen=seen, fix=fix, code=ExitCode.FAILED))
    return found


def load(world: World, options: BenchOptions, setting: Setting) -> Baseline | None:
    """The baseline to compare the figures with, on all ranks; None without one.

    Rank 0 reads the files: other nodes need not see them. The file to save to is checked here too, before much time is
    spent on measuring.

    Raises:
        SharedFault: on all ranks: options conflict, a file can't be read or written, or is of another setting.
    """
    known = agree(world, lambda: _read_files(options, setting) if world.main else None)
    return msgspec.convert(world.gather(msgspec.to_builtins(known))[0], Baseline | None)


def _read_files(options: BenchOptions, setting: Setting) -> Baseline | None:
    """The baseline of `--baseline`, after all files that the options name were checked."""
    if options.pairwise and (options.baseline or options.save_baseline):
        wrong = "pairs of nodes are compared with each other, not with a baseline"
        raise MusterError(wrong, seen="--pairwise with --baseline or --save-baseline", fix="leave one of them out")
    if options.save_baseline is not None:
        path = Path(options.save_baseline)
        with _writing(path):  # checked before the measurement, not after it
            folder = path.absolute().parent
            folder.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=folder).close()
            if path.exists():
                read(options.save_baseline, "--save-baseline", setting)
    return None if options.baseline is None else read(options.baseline, "--baseline", setting)


def write(path: Path, setting: Setting, rows: Sequence[Row], about: dict[str, Any]) -> None:
    """Writes the baseline of `rows`, and replaces an existing one.

    Raises:
        MusterError: it can't be written, or nothing was measured.
    """
    kept = tuple(Kept(row.collective, row.size, row.passes) for row in rows if row.passes)
    if not kept:
        fix = "--collectives with other ones, or all"
        raise MusterError("nothing was measured that a baseline could contain", seen=f"--save-baseline={path}", fix=fix)
    baseline = Baseline(setting=setting, about=about, rows=kept)
    # Not imported above, as it takes time to load, and most runs save no baseline.
    from muster.train.checkpoint.storage import write_text

    with _writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, msgspec.json.format(msgspec.json.encode(baseline), indent=1).decode() + "\n")


def _writing(path: Path) -> AbstractContextManager[None]:
    fix = "--save-baseline with a path in a folder that you may write to"
    return explaining("the baseline can't be written", seen=path, fix=fix)


def read(path: str, option: str, setting: Setting) -> Baseline:
    """The baseline in the file `path`, which `option` names.

    Raises:
        MusterError: it can't be read, is no baseline, or is of another setting; the message says what differs.
    """
    fix = f"{option}=FILE that `muster bench --save-baseline FILE` wrote, or another name"
    try:
        with explaining("the baseline can't be read", seen=path, fix=fix):
            found = msgspec.json.decode(content_of(Path(path)), type=Baseline)
    except (ValueError, RecursionError) as error:
        raise MusterError("the file is no baseline", seen=f"{path}: {error}", fix=fix) from None
    own, theirs = asdict(setting), asdict(found.setting)
    unlike = [name for name in own if own[name] != theirs[name]]
    differences = [f"{name} {json.dumps(theirs[name])}, not {json.dumps(own[name])}" for name in unlike]
    if differences:
        raise MusterError(
            f"the baseline is of another setting: it has {differences[0]}",
            seen=f"{path} has {'; '.join(differences)}",
            fix=f"{option} with another file: one for each site, backend, device, and number of nodes and ranks",
        )
    return found
