"""What a launch does about the fabric by itself: the host's libraries where its root is mounted, no silent TCP.

    /host                     find -> plan -> links -> proof
    /opt/fabric/lib           the same with what `muster fabric binds` put there
    neither                   InfiniBand and RoCE by the image's own verbs; else several nodes with GPUs are refused

Only NCCL uses a fabric, and only from node to node: elsewhere what does not work is a note.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from entrypoint.allocation import Allocation
from entrypoint.environment import Environment
from entrypoint.fabric import refusing
from entrypoint.fabric.model import FabricPlan, Finding
from entrypoint.fabric.need import AUTO, OFF, PLACES, TCP, Need, Places
from entrypoint.options import LaunchOptions
from entrypoint.program import Program
from train.errors import MusterError, one_line

if TYPE_CHECKING:
    from entrypoint.fabric.stage import Staging, Use
    from entrypoint.sites.schema import Site

FOUND = "MUSTER_FABRIC_FOUND"
"""Tells the program which fabric it got; a run's summary.json has it."""


@dataclass(frozen=True)
class Injection:
    """What the launched process gets: variables, and lines for the user."""

    variables: Mapping[str, str] = field(default_factory=dict[str, str])
    notes: tuple[str, ...] = ()


def inject(
    allocation: Allocation,
    env: Environment,
    options: LaunchOptions,
    program: Program,
    variables: Mapping[str, str],
    site: "Site | None" = None,
    places: Places = PLACES,
) -> Injection:
    """What lets NCCL use this node's fabric in `program`; nothing for a recording.

    Args:
        variables: what the launch sets already, over those of `env`.
        site: whose profile holds here.

    Raises:
        MusterError: several nodes would fall back to TCP, or what the user named can't be had.
    """
    if not env.is_live:
        return Injection()
    if options.fabric == OFF:
        return Injection({FOUND: OFF})
    on_cpu = program.is_ours and "--device=cpu" in program.words
    need = Need(
        allocation.num_nodes,
        bool(allocation.gpus_seen) and not on_cpu,
        options.fabric,
        options.interface,
        options.host_nccl,
        options.dry_run,
    )
    return for_need(need, {**env, **variables}, site, places)


def for_need(need: Need, env: Mapping[str, str], site: "Site | None" = None, places: Places = PLACES) -> Injection:
    """The same for a launch of which only that is known."""
    try:
        if is_host(places.host):
            return _of_host(need, env, site, places)
        if need.host_nccl:
            raise MusterError(
                "the host's NCCL was asked for, and the host is not here", seen="--host-nccl", fix=refusing.MOUNT
            )
        if has_bound(places.bound):
            return _of_binds(need, env, site, places)
        if not need.is_strict:
            return Injection()
        return _of_own(need, env, site, places)
    except MusterError as error:
        if need.is_strict:
            raise
        return Injection({}, (f"fabric: none of the host's libraries: {error.wrong}: {error.seen}",))


def is_host(root: Path) -> bool:
    """Whether a host's root is mounted there, and not just an empty folder."""
    # Path.is_dir() raises where this user may not look, and of a name that is too long.
    return os.path.isdir(root / "etc") or os.path.isdir(root / "usr")


def has_bound(folder: Path) -> bool:
    """Whether `muster fabric binds` put libraries there."""
    try:
        return any(os.scandir(folder))
    except OSError:
        return False


def _of_host(need: Need, env: Mapping[str, str], site: "Site | None", places: Places) -> Injection:
    # Here and not above: most launches have no host mounted.
    from entrypoint.fabric import stage, survey

    finding = _look(need, site, places)
    if finding.fabric == TCP and need.wanted == AUTO and not need.host_nccl:
        return _without(need, finding)
    plan = survey.plan(finding, need.num_nodes, site, is_named=need.wanted != AUTO)
    if plan.refusals:
        raise refusing.refused(plan.refusals)
    use = use_of(need, env, site, places)
    if not plan.injected and not use.host_nccl:
        if finding.fabric != TCP:
            refusing.check_verbs(need, plan, env, places)
        return _told(plan, stage.settings(plan, env, use, None, (), ()), "the image's own libraries")
    refusing.check_devices(need, plan, places)
    staging = stage.of_host(plan, env, use)
    if not need.is_dry:
        stage.make(staging)
        _prove(need, staging, env, tuple(staging.links), plan.plugin)
    return _told(plan, (staging.variables, staging.notes), _names(plan, use) + " from the host")


def _look(need: Need, site: "Site | None", places: Places) -> Finding:
    """What the host has; of what its mount does not show of /sys and /dev, this container's own tells."""
    from entrypoint.fabric import survey

    finding = survey.look(places.host, need.wanted, site)
    if finding.fabric != TCP or need.wanted != AUTO:
        return finding
    own = survey.look(places.own, AUTO, site)
    if own.fabric == TCP:
        return finding
    found = survey.look(places.host, own.fabric, site)
    return replace(found, why=own.why, devices=own.devices, interfaces=own.interfaces)


def _of_binds(need: Need, env: Mapping[str, str], site: "Site | None", places: Places) -> Injection:
    from entrypoint.fabric import bound, stage

    plan = bound.plan(places, need, site)
    use = use_of(need, env, site, places)
    staging = stage.of_binds(plan, env, use, places.bound)
    if not need.is_dry:
        _prove(need, staging, env, tuple(each.soname for each in plan.injected), plan.plugin)
    return _told(plan, (staging.variables, staging.notes), f"{_names(plan, use)} from {places.bound}")


def _of_own(need: Need, env: Mapping[str, str], site: "Site | None", places: Places) -> Injection:
    """Where there is nothing of the host's: what this container's own /sys tells."""
    from entrypoint.fabric import stage, survey

    finding = survey.look(places.own, need.wanted, site)
    if finding.fabric == TCP and need.wanted == AUTO:
        return _without(need, finding)
    profile = survey.profile_of(finding)
    plan = survey.without_host(finding, need.num_nodes, site)
    use = use_of(need, env, site, places)
    settings = stage.settings(plan, env, use, None, (), ())
    if not profile.is_rdma:
        return _told(plan, settings, "as it was asked for")
    # NCCL itself knows verbs; any other network is a plugin's.
    if profile.net is None and not {"NCCL_NET", "NCCL_NET_PLUGIN"} & set(env):
        raise MusterError(
            f"this is {profile.title}, and NCCL needs the host's libraries for it: it would silently use TCP",
            seen=f"{finding.why}; nothing at {places.host} or {places.bound}",
            fix=f"{refusing.MOUNT}; or {refusing.ANYWAY}",
        )
    if profile.net is not None:
        refusing.check_verbs(need, plan, env, places)
    return _told(plan, settings, "the image's own libraries")


def use_of(need: Need, env: Mapping[str, str], site: "Site | None", places: Places) -> "Use":
    """What decides on variables, with the host's NCCL where it is wanted.

    Raises:
        MusterError: it is wanted, but can't be used.
    """
    from entrypoint.fabric import host_nccl, stage

    found = host_nccl.find(places.host, env, site) if need.host_nccl else None
    return stage.Use(need.is_several, need.interface, found, places.interfaces)


def _prove(need: Need, staging: "Staging", env: Mapping[str, str], names: tuple[str, ...], plugin: str | None) -> None:
    """Returns if the libraries can be opened, the plugin first: what it lacks is what the user has to know."""
    if not need.is_proved:
        return
    from entrypoint.fabric import preloaded, proof

    first = [plugin] if plugin in names else []
    ordered = [*first, *(name for name in names if name != plugin)]
    loaded = preloaded.needed_by(staging.folder / name for name in ordered)
    proof.prove(staging, {**env, **staging.variables}, ordered, loaded=loaded)


def _without(need: Need, finding: Finding) -> Injection:
    """Where there is no fabric that a profile knows: NCCL is left to itself, as it may know another."""
    return Injection({}, (one_line(f"fabric: none: {finding.why}"),) if need.is_several else ())


def _told(plan: FabricPlan, settings: tuple[Mapping[str, str], tuple[str, ...]], what: str) -> Injection:
    variables, notes = settings
    line = f"fabric: {_place(plan.finding)}: {what}"
    if "NCCL_NET" in variables:
        line += f"; NCCL_NET={variables['NCCL_NET']}"
    return Injection({**variables, FOUND: plan.finding.fabric}, tuple(map(one_line, (line, *notes, *plan.notes))))


def _place(finding: Finding) -> str:
    """slingshot (cxi0, cxi1)."""
    names = [device.name for device in refusing.devices(finding)]
    shown = ", ".join([*names[:4], *([f"{len(names) - 4} more"] if len(names) > 4 else [])])
    return f"{finding.fabric} ({shown})" if names and finding.fabric != TCP else finding.fabric


def _names(plan: FabricPlan, use: "Use") -> str:
    """libnccl-net.so, libfabric.so.1 and 5 more."""
    names = [each.soname for each in plan.injected]
    names.sort(key=lambda name: name != plan.plugin)
    if use.host_nccl:
        names.insert(0, use.host_nccl.name)
    return ", ".join(names) if len(names) < 4 else f"{names[0]}, {names[1]} and {len(names) - 2} more"
