"""Where a launch stands: its allocation, its rendezvous, and the site that gave defaults for both."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from entrypoint import detection, rendezvous
from entrypoint.allocation import Allocation
from entrypoint.environment import Environment
from entrypoint.options import LaunchOptions
from entrypoint.rendezvous import Rendezvous
from entrypoint.sites import defaults, recognise
from entrypoint.sites.defaults import Defaults
from entrypoint.sites.recognise import Recognised
from train.errors import MusterError


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
        raise _told(refusal, found) from None
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


def _told(refusal: MusterError, found: Defaults) -> MusterError:
    if not found.sources:
        return refusal
    seen = f"{refusal.seen}; {found.notes[0]}"
    return MusterError(refusal.wrong, seen=seen, fix=f"{refusal.fix}; or --site off", code=refusal.code)
