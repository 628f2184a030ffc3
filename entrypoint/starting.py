"""From options to the exec: what every command that starts ranks does."""

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from entrypoint import debugging, driver, environment, launch, place, rendezvous, report
from entrypoint.environment import Environment
from entrypoint.fabric import automatic
from entrypoint.options import LaunchOptions
from entrypoint.program import Program
from train.errors import MusterError


def environment_of(options: LaunchOptions) -> Environment:
    """This process's environment, or the recorded one that the options name."""
    return environment.load(Path(options.env_file)) if options.env_file else environment.live()


def start(options: LaunchOptions, program: Program, typed: Sequence[str], is_single: bool = False) -> None:
    """Becomes the launch of `program`; returns only where nothing is to be started.

    Args:
        options: what the user said of the launch.
        program: what runs in each rank.
        typed: the command line, for errors and for trainers that start anew.
        is_single: whether it runs in one process, whatever is allocated.

    Raises:
        MusterError: it can't be started here.
    """
    if options.spawn is not None:
        options = replace(options, nproc_per_node=str(options.spawn))
    env = environment_of(options)
    is_dry = options.dry_run or not env.is_live
    if not is_dry:
        launch.hold_warnings()
    try:
        here = place.find(env, options, typed, is_single=is_single, is_start=True)
        allocation, meeting = here.allocation, here.meeting
        found = driver.Found() if is_dry else driver.check(allocation, env, program)
        site = here.site.site if here.site else None
        network = automatic.inject(allocation, env, options, program, found.variables, site)
    except MusterError as refusal:
        if not is_dry:
            rendezvous.refuse_all(refusal, env, options)
        raise
    if rendezvous.is_open(meeting, allocation) and not is_dry:
        meeting = rendezvous.by_file(meeting, allocation, env, here.options)
    planned = launch.plan(allocation, meeting, env, here.options, program, typed)
    # The fabric's library path has the driver's in it; a site's values come before its fabric's.
    for more in (found, network, here.defaults):
        planned = planned.with_more(more.variables, more.notes)
    if here.site and program.is_ours:
        planned = planned.with_more({"MUSTER_SITE_FOUND": here.site.name}, ())
    debug = None
    if options.debug_distributed:
        debug = debugging.plan(env, meeting.rdzv_id, Path.cwd(), has_gpus=allocation.gpus_seen > 0)
        planned = planned.with_more(debug.variables, debug.notes)
    if is_dry:
        print(report.script(planned))
        return
    launch.check(allocation, meeting)
    if debug is not None:
        debugging.make(debug.folder)
    if allocation.rank == 0:
        print(report.headline(allocation, meeting, planned), file=sys.stderr)
    launch.execute(planned, env)
