"""The host's libraries in the container: by links in a private folder, or by a container engine's options.

    make_plan        the closure of the fabric's libraries, variables, files and devices, as a FabricPlan
    link             links to the libraries in a private folder
    settings         the variables that point to this folder, or to that of `muster fabric binds`
    engine_options   the options of apptainer, docker or podman that bind the libraries one by one

The exec replaces this process, so that nothing could remove the folder of links: it is named by its content, all tasks
of a node share it, and the next run uses it again. No folder of the host is ever mounted over one of the image's: its
libraries would not fit the image's C library.
"""

import hashlib
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from muster.entrypoint.container import assignment
from muster.entrypoint.fabric import FABRIC_ROOT, Need, find, proof
from muster.entrypoint.launch.program import Additions, Folder, where_unset
from muster.entrypoint.sites import profiles
from muster.entrypoint.sites.schema import Context, Fabric, Fact, Libraries, Site, value_of
from muster.errors import MusterError, explaining
from muster.interfaces import has_one

NCCL_PLUGINS = tuple(range(6, 13))
"""N of each ncclNetPlugin_vN that NCCL 2.30 opens, according to its library."""

# The options of docker and podman that RDMA needs: lockable memory, the host's shared memory and its network.
# Source: https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting.html
RDMA_OPTIONS = ("--ulimit", "memlock=-1", "--cap-add", "IPC_LOCK", "--ipc=host", "--network=host")

# libibverbs opens a provider by the file's name, mlx5 -> libmlx5-rdmav34.so, and not by its soname.
_PROVIDER = re.compile(r"(lib.+)-rdmav\d+\.so")


@dataclass(frozen=True)
class Injected:
    """A library of the host that the container gets.

    Attributes:
        soname: the name under which it is linked.
        needed_by: what asked for it: NCCL, the profile, the fabric, or another library's path.
        wins: whether it has to be found before the image's copy.
    """

    soname: str
    path: str
    needed_by: str
    wins: bool = False


@dataclass(frozen=True)
class FabricPlan:
    """The libraries, files, devices and variables of the host's fabric that the container gets.

    Attributes:
        injected: in the order in which they were needed; empty where the image's own libraries suffice.
        plugin: the file name of NCCL's network plugin among them.
        net: the value for NCCL_NET on several nodes.
        variables: those that the profiles of site and fabric set, with conditions resolved.
        files: further files and folders of the host.
        devices: files in /dev for engines that don't bind it whole.
        refusals: the reasons against the libraries; with any, nothing is injected.
    """

    finding: find.Finding
    injected: tuple[Injected, ...] = ()
    plugin: str | None = None
    net: str | None = None
    variables: Mapping[str, str] = field(default_factory=dict[str, str])
    files: tuple[str, ...] = ()
    devices: tuple[str, ...] = ()
    refusals: tuple[proof.Refusal, ...] = ()
    notes: tuple[str, ...] = ()


def plan_without_host(
    finding: find.Finding, profile: Fabric, context: Context, bound: Sequence[Path], site: Site | None = None
) -> FabricPlan:
    """The plan where no host's root is mounted.

    Args:
        bound: the libraries that `muster fabric binds` put into the container; without any the image's own are used.
    """
    libraries = {path.name: path for path in bound}
    named = (*find.values(profile.libraries.plugins), "libnccl-net.so")
    plugin = next((name for name in named if name in libraries), None)
    exported = find.net_plugin(libraries[plugin]) if plugin else find.NetPlugin()
    return FabricPlan(
        finding,
        injected=tuple(Injected(name, str(path), finding.fabric, wins=True) for name, path in libraries.items()),
        plugin=plugin,
        net=value_of(profile.net, context) or exported.name,
        variables=profiles.variables(site, profile, context),
    )


def make_plan(
    finding: find.Finding, profile: Fabric, image: proof.Image, context: Context, site: Site | None = None
) -> FabricPlan:
    """The plan of libraries to inject, variables to set and files to bind; with refusals, it has none of these.

    Args:
        site: its libraries and variables come before the profile's.

    Raises:
        MusterError: the loader fails on a library, or there is no folder for its links.
    """
    wanted = profiles.libraries(site, profile, context)
    root = find.HostRoot(finding.root)
    host = find.HostLibraries(root, find.values(wanted.search))
    plugin = next((library for name in find.values(wanted.plugins) if (library := host.find(name))), None)
    exported = find.net_plugin(root.path(plugin.path)) if plugin else find.NetPlugin()
    found = proof.Closure(host, image, plugin, wanted)
    refusals = (*_refuse_plugin(plugin, profile, wanted, exported), *found.refusals)
    notes = tuple(dict.fromkeys([*finding.notes, *root.notes]))
    if refusals:
        return FabricPlan(finding, refusals=refusals, notes=notes)
    net = value_of(profile.net, context) or exported.name
    if plugin and net is None:
        notes += (f"{plugin.path} tells its name only to NCCL: unless NCCL_NET is set, NCCL may use TCP instead",)
    own: Mapping[str, Path] = image.trace(found.links).found if found.links else {}
    # Libraries that stay the image's keep the image's configuration files.
    goes_along = bool(found.joined) if wanted.sets else bool(found.links)
    return FabricPlan(
        finding,
        injected=tuple(
            Injected(name, library.path, library.needed_by, wins=name in own) for name, library in found.links.items()
        ),
        plugin=plugin.soname if plugin else None,
        net=net,
        variables=profiles.variables(site, profile, context),
        files=(
            *(_existing(root, wanted.files, context) if goes_along else ()),
            *_existing(root, profile.devices.folders, context),
        ),
        devices=_existing(root, profile.devices.needed, context),
        notes=notes,
    )


def _refuse_plugin(
    plugin: find.Library | None, profile: Fabric, wanted: Libraries, exported: find.NetPlugin
) -> list[proof.Refusal]:
    """Why NCCL would fall back to TCP: no network plugin where the fabric needs one, or one that it would not open."""
    names = find.values(wanted.plugins)
    if plugin is None:
        # For InfiniBand NCCL needs no plugin.
        if not names or profile.net is not None:
            return []
        searched = ", ".join(find.values(wanted.search)) or "the loader's folders"
        wrong = f"the host has no network plugin of NCCL's for {profile.title}; looked in {searched}"
        fix = "load the site's module for aws-ofi-nccl, or name its folder in the site's profile: libraries.search"
        return [proof.Refusal(names[0], wrong, " or ".join(names), "NCCL", fix)]
    if proof.never_leaves_host(plugin.soname) or not find.is_name(plugin.soname):
        wrong = f"NCCL's network plugin has the soname {plugin.soname}, which is never taken from the host"
        needs = "a soname of its own, such as libnccl-net.so"
    elif not set(exported.versions) & set(NCCL_PLUGINS):
        has = ", ".join(f"ncclNetPlugin_v{version}" for version in exported.versions) or "no ncclNetPlugin_vN at all"
        wrong = f"NCCL's network plugin is of no version that this image's NCCL opens: it has {has}"
        needs = f"ncclNetPlugin_v{min(NCCL_PLUGINS)} to v{max(NCCL_PLUGINS)}"
    else:
        return []
    fix = "a plugin for this NCCL: ask the site for another build, or --fabric off"
    return [proof.Refusal(plugin.path, wrong, needs, "NCCL", fix)]


def _existing(root: find.HostRoot, fact: Fact[tuple[str, ...]] | None, context: Context) -> tuple[str, ...]:
    return tuple(dict.fromkeys(path for pattern in (value_of(fact, context) or ()) for path in root.glob(pattern)))


def settings(plan: FabricPlan, env: Mapping[str, str], need: Need, folder: Path = FABRIC_ROOT) -> Additions:
    """The variables that point to a plan's libraries in `folder`, and a note for each value of the user's that stays.

    Source: https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html (NCCL_NET, NCCL_NET_PLUGIN)
    Source: https://github.com/linux-rdma/rdma-core/blob/HEAD/libibverbs/dynamic_driver.c (IBV_DRIVERS, RDMAV_DRIVERS)
    """
    wanted = {name: value for name, value in plan.variables.items() if _fits(name, value, plan, need)}
    forced: dict[str, str] = {}
    if plan.injected:
        winners = [each.soname for each in plan.injected if each.wins]
        forced["LD_LIBRARY_PATH"] = proof.on_path(folder, env.get("LD_LIBRARY_PATH", ""), winners)
        matches = [_PROVIDER.fullmatch(each.soname) for each in plan.injected]
        providers = [str(folder / match[1]) for match in matches if match]
        # libibverbs reads the older name of the same variable first.
        if providers and "RDMAV_DRIVERS" not in env:
            wanted["IBV_DRIVERS"] = ":".join(providers)
        if plan.plugin:
            wanted["NCCL_NET_PLUGIN"] = str(folder / plan.plugin)
    if plan.net and need.spans_nodes:
        wanted["NCCL_NET"] = plan.net
    added = where_unset(wanted, env)
    return Additions({**forced, **added.variables}, added.notes)


def _fits(name: str, value: str, plan: FabricPlan, need: Need) -> bool:
    """Whether the profile's value can be used: NCCL and gloo fail where no interface has that name."""
    if not name.endswith("_SOCKET_IFNAME"):
        return True
    interfaces = plan.finding.interfaces
    return need.interface is None and (not interfaces or has_one(interfaces, value))


def link(plan: FabricPlan, env: Mapping[str, str], *, is_dry: bool = False) -> Path:
    """The folder with links to a plan's libraries, named by a hash of them, in a folder that is private to this user.

    What is missing of it is created, perhaps by several tasks of a node at once; a dry run creates nothing.

    Raises:
        MusterError: it can't be created, or its parent folder is not private to this user.
    """
    # A link's target is read from the link's own folder, and not from this one.
    root = plan.finding.root.absolute()
    targets = {each.soname: f"{root}{each.path}" for each in plan.injected}
    content = "\0".join(f"{name}\0{target}" for name, target in sorted(targets.items()))
    digest = hashlib.sha256(os.fsencode(content)).hexdigest()[:16]
    folder = proof.temporary_folder(env) / f"muster-fabric-{os.getuid()}" / digest
    if is_dry:
        return folder
    Folder(folder.parent, proof.FIX_FOLDER, is_private=True).make()
    with explaining("no folder can be made for links to the host's libraries", seen=folder, fix=proof.FIX_FOLDER):
        folder.mkdir(exist_ok=True)
        for name, target in targets.items():
            with suppress(FileExistsError):
                (folder / name).symlink_to(target)
    return folder


def engine_options(plan: FabricPlan, variables: Mapping[str, str], engine: str) -> str:
    """The options of a container's engine, for `eval "apptainer exec $(muster fabric binds) IMAGE ..."`.

    They are quoted for a shell that reads them once.

    Args:
        plan: the libraries, files and devices that the container gets.
        variables: the variables of `settings` for the launches in it.
        engine: apptainer, docker or podman.

    Raises:
        MusterError: a file's name, or a value, can't be passed to this engine.
    """
    is_apptainer = engine == "apptainer"
    option, refused = ("--bind", r"[:,\\\n]") if is_apptainer else ("--volume", ":")
    words: list[str] = []
    files = [(each.path, str(FABRIC_ROOT / each.soname)) for each in plan.injected]
    for host, container in (*files, *((path, path) for path in plan.files)):
        if re.search(refused, host + container):
            raise _unusable(f"{option} can't name such a file", host)
        words += [option, shlex.quote(f"{host}:{container}:ro")]
    # Apptainer binds /dev and /sys by default.
    for path in () if is_apptainer else plan.devices:
        if ":" in path:
            raise _unusable("docker's --device takes no colons", path)
        words += ["--device", shlex.quote(path)]
    named = {"MUSTER_FABRIC": plan.finding.fabric} if plan.injected or plan.net else {}
    for name, value in sorted({**variables, **named}.items()):
        if is_apptainer and re.search(r"[$`\\\n\r\0]", value):
            raise _unusable("apptainer has a shell evaluate the value of a variable", f"{name}={value}")
        words += ["--env", shlex.quote(assignment(name, value) if is_apptainer else f"{name}={value}")]
    is_rdma = profiles.load_fabric(plan.finding.fabric).is_rdma
    return " ".join([*words, *(RDMA_OPTIONS if is_rdma and not is_apptainer else ())])


def _unusable(why: str, seen: str) -> MusterError:
    return MusterError(
        f"what the fabric needs can't be passed: {why}",
        seen=seen,
        fix="mount the host's root in the container, which needs no such names: --bind /:/host:ro",
    )
