"""The fabric in a launch: the host's libraries where its root is mounted, and no silent fallback to TCP.

    /host                     find -> plan -> links -> proof
    /opt/fabric/lib           the same with what `muster fabric binds` put there
    neither                   InfiniBand and RoCE by the image's own verbs; else several nodes with GPUs are refused

Only NCCL uses a fabric, and only between nodes: in other launches a fabric that fails is a note, unless it was named.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from muster.entrypoint.detect.allocation import Allocation
from muster.entrypoint.environment import Environment
from muster.entrypoint.fabric import AUTO, FABRIC_ROOT, HOST_ROOT, OFF, TCP, Need
from muster.entrypoint.launch.program import Additions, Program
from muster.entrypoint.options import LaunchOptions
from muster.errors import MusterError, one_line
from muster.variables import LaunchVariable

# Loaded where they are needed: most launches have no host mounted.
if TYPE_CHECKING:
    from muster.entrypoint.fabric.find import Finding
    from muster.entrypoint.fabric.stage import FabricPlan
    from muster.entrypoint.sites.schema import Fabric, Site

MOUNT = "apptainer exec --bind /:/host:ro, docker run -v /:/host:ro"
ANYWAY = "over TCP, at a fraction of the speed: --fabric tcp"


@dataclass(frozen=True)
class Mounts:
    """Where the host's root, the libraries of `muster fabric binds` and this container's own root are mounted."""

    host: Path = HOST_ROOT
    bound: Path = FABRIC_ROOT
    own: Path = Path("/")


MOUNTS = Mounts()


def inject(
    allocation: Allocation,
    env: Environment,
    options: LaunchOptions,
    program: Program,
    variables: Mapping[str, str],
    site: "Site | None" = None,
    mounts: Mounts = MOUNTS,
) -> Additions:
    """The additions by which NCCL uses this node's fabric in `program`; none for a recorded environment.

    Args:
        variables: those that the launch sets already; they override `env`.
        site: the site whose profile applies.

    Raises:
        MusterError: several nodes would fall back to TCP, or the fabric that the user named can't be used.
    """
    if not env.is_live:
        return Additions()
    if options.fabric == OFF:
        return Additions({LaunchVariable.FABRIC_FOUND: OFF})
    uses_nccl = bool(allocation.gpus_seen) and not (program.is_ours and "--device=cpu" in program.words)
    need = Need(allocation.num_nodes, uses_nccl, options.fabric, options.interface, options.dry_run)
    return for_need(need, {**env, **variables}, site, mounts)


def for_need(need: Need, env: Mapping[str, str], site: "Site | None" = None, mounts: Mounts = MOUNTS) -> Additions:
    """The additions of `inject`, for a launch of which only `need` is known."""
    try:
        return _added(need, env, site, mounts)
    except MusterError as error:
        if need.is_strict:
            raise
        return Additions({}, (f"fabric: no library of the host is used: {error.wrong}: {error.seen}",))


def is_host(root: Path) -> bool:
    """Whether a host's root is mounted there, and not just an empty folder."""
    # Path.is_dir() raises where this user may not look, and of a name that is too long.
    return os.path.isdir(root / "etc") or os.path.isdir(root / "usr")


def _added(need: Need, env: Mapping[str, str], site: "Site | None", mounts: Mounts) -> Additions:
    """The additions for the libraries of the host's root, or of `muster fabric binds`, or else of the image alone."""
    has_host = is_host(mounts.host)
    bound = [] if has_host else sorted(mounts.bound.glob("*"))
    if not (has_host or bound or need.is_strict):
        return Additions()
    from muster.entrypoint.fabric import proof, stage
    from muster.entrypoint.sites import profiles
    from muster.entrypoint.sites.schema import Context

    finding = _find(need, mounts)
    if finding.fabric == TCP and need.wanted == AUTO and not bound:
        # NCCL is left to itself, as it may know a network that no profile does.
        return Additions({}, (one_line(f"fabric: none: {finding.why}"),) if need.spans_nodes else ())
    profile, context = profiles.load_fabric(finding.fabric), Context.here(need.num_nodes)
    if has_host:
        plan = stage.make_plan(finding, profile, proof.Image.here(env), context, site)
    else:
        plan = stage.plan_without_host(finding, profile, context, bound, site)
    if plan.refusals:
        first, others = plan.refusals[0], plan.refusals[1:]
        more = f" (and {len(others)} more: muster fabric plan)" if others else ""
        unread = [note for note in plan.notes if note.startswith("left out")]  # perhaps what is said to be missing
        seen = "; ".join([*(each.seen for each in plan.refusals[:4]), *unread[:4]])
        raise MusterError(first.wrong + more, seen=seen, fix=f"{first.fix}; or {ANYWAY}")
    if not plan.injected:
        return _additions(plan, stage.settings(plan, env, need), _image_alone(need, plan, profile, env, mounts))
    folder = mounts.bound
    if has_host:
        if need.spans_nodes and need.is_proved:
            _check_devices(finding, profile, mounts)
        folder = stage.link(plan, env, is_dry=need.is_dry)
    settings = stage.settings(plan, env, need, folder)
    # The plugin first: its error is the one that the user has to know.
    names = sorted((each.soname for each in plan.injected), key=lambda name: name != plan.plugin)
    if need.is_proved and not need.is_dry:
        proof.prove(folder, names, proof.Image.here({**env, **settings.variables}))
    shown = ", ".join(names) if len(names) < 4 else f"{names[0]}, {names[1]} and {len(names) - 2} more"
    return _additions(plan, settings, f"{shown} from {'the host' if has_host else mounts.bound}")


def _find(need: Need, mounts: Mounts) -> "Finding":
    """The host's finding with this container's interfaces; this container's own where the mount shows no fabric."""
    from muster.entrypoint.fabric.find import find

    own = find(mounts.own, need.wanted)
    if not is_host(mounts.host):
        return own
    finding = find(mounts.host, need.wanted)
    if finding.fabric == TCP and need.wanted == AUTO:
        return replace(own, root=mounts.host, notes=finding.notes)
    return replace(finding, interfaces=own.interfaces)


def _image_alone(need: Need, plan: "FabricPlan", profile: "Fabric", env: Mapping[str, str], mounts: Mounts) -> str:
    """The text of the note for a launch that uses no library of the host.

    Raises:
        MusterError: NCCL would fall back to TCP with the image's own libraries.
    """
    from muster.entrypoint.fabric import proof

    if not profile.is_rdma:
        return "as it was asked for"
    if profile.net is None:
        if not {"NCCL_NET", "NCCL_NET_PLUGIN"} & set(env):
            raise MusterError(
                f"this is {profile.title}: without the host's libraries for it, NCCL would silently use TCP",
                seen=f"{plan.finding.why}; nothing at {mounts.host} or {mounts.bound}",
                fix=f"{MOUNT}; or {ANYWAY}",
            )
    # NCCL itself knows verbs.
    elif need.spans_nodes and need.is_proved and env.get("NCCL_NET", plan.net) == plan.net:
        _check_devices(plan.finding, profile, mounts)
        if problem := proof.problem(["libibverbs.so.1"], env):
            raise MusterError(
                "there is InfiniBand or RoCE, but no library for it in this image",
                seen=problem,
                fix=f"{MOUNT}; or install libibverbs1 and ibverbs-providers; or {ANYWAY}",
            )
    return "the image's own libraries"


def _additions(plan: "FabricPlan", settings: Additions, what: str) -> Additions:
    """The settings, with a line on the fabric, its devices and where the libraries are from."""
    fabric = plan.finding.fabric
    names = [device.name for device in plan.finding.nccl_devices]
    if names and fabric != TCP:
        shown = [*names[:4], f"{len(names) - 4} more"] if len(names) > 4 else names
        fabric += f" ({', '.join(shown)})"
    line = f"fabric: {fabric}: {what}"
    if "NCCL_NET" in settings.variables:
        line += f"; NCCL_NET={settings.variables['NCCL_NET']}"
    notes = tuple(map(one_line, (line, *settings.notes, *plan.notes)))
    return Additions({**settings.variables, LaunchVariable.FABRIC_FOUND: plan.finding.fabric}, notes)


def _check_devices(finding: "Finding", profile: "Fabric", mounts: Mounts) -> None:
    """Raises MusterError where the fabric has device files, and none of them is in this container."""
    from muster.entrypoint.fabric.find import HostRoot, values

    patterns = [pattern for pattern in values(profile.devices.recognise) if pattern.startswith("/dev/")]
    if patterns and not any(map(HostRoot(mounts.own).glob, patterns)):
        # A folder is passed as a whole; files by name, as docker knows no patterns.
        files = [device.name for device in finding.nccl_devices if device.kind == "slingshot"]
        words = " ".join(f"--device /dev/{name}" for name in files)
        raise MusterError(
            "the fabric's device files are not in this container",
            seen=f"{finding.why}; no {' '.join(patterns)} in this container",
            fix=f"docker run {words or '--device /dev/infiniband'} --ulimit memlock=-1 --cap-add IPC_LOCK; or {ANYWAY}",
        )
