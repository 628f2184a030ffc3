"""One rank of a measurement, from the meeting of the ranks to the verdict."""

import os
import traceback
from dataclasses import dataclass, field

from check.bench import (
    baseline,
    collectives,
    memory,
    pairwise,
    setting,
    sizes,
    together,
    transport,
)
from check.bench.baseline import PASSES, Baseline
from check.bench.report import Report
from check.bench.sweep import Sweep
from check.leaving import leave
from check.options import BenchOptions
from train.backends import open_group
from train.errors import FAILED
from train.faults import Watch, agree
from train.world import World, close_group

INTERRUPTED = 130


def run(options: BenchOptions) -> None:
    """Measures, says the verdict on rank 0, and ends the process."""
    bench, code = Bench(options), FAILED
    try:
        code = bench.run()
    except KeyboardInterrupt:
        code = INTERRUPTED
    except Exception as error:
        if os.environ.get("MUSTER_DEBUG"):
            traceback.print_exc()
        code = together.answer(bench.world, error, bench.doing)
    leave(bench.world, code, failed=code != 0)


@dataclass
class Bench:
    """A measurement, as far as it has got.

    Attributes:
        world: this rank among all; None before they have met.
        sweep: the run through collectives and sizes, once it has begun.
    """

    options: BenchOptions
    world: World | None = None
    sweep: Sweep | None = None
    known: Baseline | None = field(default=None)

    @property
    def doing(self) -> str:
        """What the ranks are at."""
        return self.sweep.doing if self.sweep else "the start"

    def run(self) -> int:
        """The exit code of all ranks.

        Raises:
            MusterError: an option, a node or a rank is in the way.
            Broken: this rank lost the others.
        """
        options = self.options
        self.world = together.join(options.timeout_s)
        watch = Watch(self.world)
        self.world = world = setting.with_device(self.world, options)
        names = agree(world, lambda: collectives.chosen(options.collectives))
        lengths = agree(
            world, lambda: sizes.sweep(options.min_size, options.max_size, options.factor, world.backend or "")
        )
        here = setting.look(world)
        self.known = agree(world, lambda: setting.baselines(world, options, here))
        if self.known is not None:
            known, keys = self.known, collectives.keys(world, names, lengths)
            agree(world, lambda: baseline.check_held(keys, known, options.baseline or ""))
        agree(world, lambda: memory.look(world, lengths))
        transport.prepare(options)
        agree(world, lambda: open_group(world))
        report = Report(options, world, here)
        if options.pairwise:
            pairs = pairwise.run(world, options)
            code = report.of_pairs(pairs) if world.main else 0
        else:
            self.sweep = Sweep(world, options, lengths, names)
            code = self.measure(self.sweep, report)
        code = world.gather(code)[0]
        close_group()
        watch.close()
        return code

    def measure(self, sweep: Sweep, report: Report) -> int:
        """The exit code of rank 0, which says and writes what was measured; on other ranks any."""
        options, world = self.options, sweep.world
        rows = sweep.rows()
        used = transport.used(world, options)
        if options.save_baseline is not None:
            for _ in range(PASSES - 1):
                rows = [sweep.again(row) if row.passes else row for row in rows]
        for _ in range(PASSES):
            slow = baseline.judge(rows, self.known) if self.known else []
            doubted = {id(one.row) for one in slow if len(one.row.passes) < PASSES}
            # Only what is slow is measured again: it may have been something passing.
            rows = [sweep.again(row) if id(row) in doubted else row for row in rows]
        if not world.main:
            return 0
        return report.of_sweep(rows, sweep, used, self.known)
