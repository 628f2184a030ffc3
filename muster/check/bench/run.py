"""One rank of a measurement, from the meeting of the ranks to the exit code that all of them have."""

import os
import traceback
from contextlib import suppress
from datetime import timedelta
from functools import partial

import torch.distributed as dist

from muster.check import ranks
from muster.check.bench import baseline, collectives, pairwise, transport
from muster.check.bench.baseline import PASSES, Baseline, Setting
from muster.check.bench.report import Report
from muster.check.bench.sweep import Row, Sweep, chosen_sizes
from muster.check.bench.transport import Transport
from muster.check.options import BenchOptions
from muster.errors import ExitCode, MusterError
from muster.train.distributed.backends import compare_fabrics, open_group
from muster.train.distributed.world import RanksMissing, World, close_group
from muster.train.health import faults, memory
from muster.train.health.faults import Watch, agree
from muster.train.reporting import console
from muster.units import listed

WAIT_S = 10
"""For so long ranks that can't go on wait for each other: who does not come is the one to be named."""


def run(options: BenchOptions) -> None:
    """Measures, says the verdict on rank 0, and ends the process."""
    world, sweep, doing = None, None, "the start"
    try:
        world = ranks.join(options.timeout_s)
        watch = Watch(world)
        world = ranks.with_device(world, options.device, options.backend)
        names = agree(world, lambda: collectives.chosen(options.collectives))
        sizes = agree(world, lambda: chosen_sizes(options, world.backend or ""))
        setting = Setting.of(world)
        known = baseline.load(world, options, setting)
        if world.backend == "nccl":
            transport.request_log(os.environ)
            compare_fabrics(world)
        agree(world, lambda: open_group(world))
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
            ranks.leave(error.world, code)  # by its store the ranks that came have yet to hear of it
    ranks.leave(world, code)


def measure(sweep: Sweep, known: Baseline | None) -> tuple[list[Row], Transport]:
    """All rows, with as many passes as it takes to save them or to hold them against `known`; and what they used."""
    rows = sweep.rows()
    used = transport.used(sweep.world, sweep.options)
    if sweep.options.save_baseline is not None:
        for _ in range(PASSES - 1):
            rows = [sweep.again(row) if row.passes else row for row in rows]
    for _ in range(PASSES):
        slow = baseline.find_slow(rows, known) if known else []
        doubted = {(one.collective, one.size) for one in slow if one.num_passes < PASSES}
        # Only what is slow is measured again: it may have been something passing.
        rows = [sweep.again(row) if (row.collective, row.size) in doubted else row for row in rows]
    return rows, used


def report_failure(world: World | None, error: Exception, doing: str) -> int:
    """Reports what happened, once for all ranks; returns the exit code.

    Args:
        world: None where the ranks have not met.
    """
    if isinstance(error, faults.SharedFault) or (world is None and isinstance(error, RanksMissing)):
        # All ranks know of it, and one says it.
        if getattr(error, "is_reporter", os.environ.get("RANK", "0") == "0"):
            console.notify(str(error))
        return error.code
    if world is None and isinstance(error, dist.DistError):
        wrong = f"rank {os.environ.get('RANK', '0')} lost rank 0 before all had met"
        fix = "look what rank 0 said, and how its process ended"
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
    # All that the backends say of other ranks is a RuntimeError.
    is_speaking = isinstance(error, RuntimeError) and dist.is_initialized() and not memory.find(error)
    has_lost_others = is_speaking or isinstance(error, RanksMissing | dist.DistError)
    reason = transport.with_warnings(error.seen if isinstance(error, RanksMissing) else error)
    fix = "muster doctor looks at the nodes and the network between them; more time: --timeout-s"
    if not has_lost_others:
        wrong = f"{this} failed at {doing}: {type(error).__name__}"
        fix = "muster bench --debug shows the traceback; a smaller --max-size needs less memory"
    elif (alive := ranks_alive(world)) is None:
        wrong = f"{this} lost the others at {doing}"
    elif world.rank != min(alive):
        return None
    elif len(alive) == world.world_size:
        wrong = f"the ranks are all there, but {doing} failed"
    else:
        missing = [rank for rank in range(world.world_size) if rank not in alive]
        hosts = listed(world.hosts[rank] for rank in missing)
        numbers = listed(missing, 8)
        wrong = f"{'rank' if len(missing) == 1 else 'ranks'} {numbers} on {hosts} did not come back from {doing}"
    return MusterError(wrong, seen=f"{this}: {reason}", fix=fix, code=ExitCode.FAILED)


def ranks_alive(world: World) -> list[int] | None:
    """The ranks that can't go on either, and so are alive; None where the store is gone."""
    assert world.store is not None
    keys = [f"broken/{rank}" for rank in range(world.world_size)]
    try:
        world.store.set(keys[world.rank], "")
        with suppress(dist.DistStoreError):
            world.store.wait(keys, timedelta(seconds=WAIT_S))
        return [rank for rank, key in enumerate(keys) if world.store.check([key])]
    except dist.DistError:
        return None
