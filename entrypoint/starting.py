"""From options to the exec: what every command that starts ranks does."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from muster.entrypoint import debugging, detection, driver, environment, launch, rendezvous, report
from muster.entrypoint.allocation import Allocation
from muster.entrypoint.environment import Environment
from muster.entrypoint.fabric import automatic
from muster.entrypoint.options import LaunchOptions
from muster.entrypoint.program import Program
from muster.entrypoint.rendezvous import Rendezvous
from muster.entrypoint.sites import defaults, recognise
from muster.entrypoint.sites.defaults import Defaults
from muster.entrypoint.sites.recognise import Recognised
from muster.errors import MusterError


@dataclass(frozen=True)
class Place:
    """What is known of a launch before its command is made.

    Attributes:
        allocation: which of the job's processes this is.
        meeting: where the ranks meet.
        site: whose profile was used; None without one. `site.site` is the profile itself.
        defaults: what that gave: the options with the site's in them, variables and notes.
    """

    allocation: Allocation
    meeting: Rendezvous
    site: Recognised | None
    defaults: Defaults

    @property
    def options(self) -> LaunchOptions:
        """The user's options, with the site's where the user gave none."""
        return self.defaults.options


def environment_of(options: LaunchOptions) -> Environment:
    """This process's environment, or the recorded one that the options name."""
    return environment.load(Path(options.env_file)) if options.env_file else environment.live()


def find(
    env: Environment, options: LaunchOptions, typed: Sequence[str], *, is_single: bool = False, is_start: bool = False
) -> Place:
    """Where the process of `env` stands.

    Args:
        env: its variables.
        options: what the user says about the launch.
        typed: the command, for errors that tell how to start it.
        is_single: whether a world of one is wanted.
        is_start: whether something is to be started: at some sites this image can't run.

    Raises:
        MusterError: it can't be told, or does not fit together; or the image does not run at this site.
    """
    site = recognise.here(env, options)
    if is_start:
        recognise.check(site)
    allocation = detection.allocate(env, options, typed, is_single=is_single)
    if is_single:
        allocation = detection.single(allocation, typed)
    found = defaults.of(site, allocation.num_nodes, env, options)
    try:
        meeting = rendezvous.meet(allocation, env, found.options)
    except MusterError as refusal:
        raise _with_site(refusal, found) from None
    return Place(allocation, _with_sources(meeting, found), site, found)


def _with_sources(meeting: Rendezvous, found: Defaults) -> Rendezvous:
    # The rendezvous takes all options for the user's.
    sources = dict(meeting.sources)
    if "address_suffix" in found.sources:
        profile = f"the address suffix of {found.sources['address_suffix']}"
        sources["master_addr"] = sources["master_addr"].replace("--address-suffix", profile)
    if "interface" in found.sources and sources["interface"] == "--interface":
        sources["interface"] = found.sources["interface"]
    return replace(meeting, sources=sources)


def _with_site(refusal: MusterError, found: Defaults) -> MusterError:
    if not found.sources:
        return refusal
    seen = f"{refusal.seen}; {found.notes[0]}"
    return MusterError(refusal.wrong, seen=seen, fix=f"{refusal.fix}; or --site off", code=refusal.code)


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
        here = find(env, options, typed, is_single=is_single, is_start=True)
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
    debug = debugging.folder_of(meeting.rdzv_id, Path.cwd())
    if options.debug_distributed:
        planned = planned.with_more(*debugging.plan(env, debug, has_gpus=allocation.gpus_seen > 0))
    if is_dry:
        print(report.script(planned))
        return
    launch.check(allocation, meeting)
    if options.debug_distributed:
        debugging.make(debug)
    if allocation.rank == 0:
        print(report.headline(allocation, meeting, planned), file=sys.stderr)
    launch.execute(planned, env)
