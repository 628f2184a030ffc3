"""What the container gets of the host: the closure of the fabric's libraries, if the gate lets it through."""

from pathlib import Path
from typing import TypeVar

from entrypoint.fabric import elf
from entrypoint.fabric.closure import Closure, LibrarySet, Wanted, closure
from entrypoint.fabric.find import loader_for, merged
from entrypoint.fabric.gate import refusals
from entrypoint.fabric.hostroot import HostRoot
from entrypoint.fabric.inventory import Inventory
from entrypoint.fabric.loader import MACHINES
from entrypoint.fabric.model import FabricPlan, Finding, Injected, Refusal
from entrypoint.fabric.sides import is_kept
from entrypoint.sites.conditions import Context, holds
from entrypoint.sites.schema import Fabric, Fact, Libraries

T = TypeVar("T")


def plan(
    finding: Finding, profile: Fabric, image: Inventory, context: Context, libraries: Libraries | None = None
) -> FabricPlan:
    """What is to be injected, set and bound; with a reason to refuse, nothing of it.

    Args:
        finding: what the host has.
        profile: the fabric's.
        image: what this image has.
        context: what conditions in the profile ask about.
        libraries: the site's; what they leave out is the profile's.
    """
    host = HostRoot(finding.root)
    words = merged(libraries, profile.libraries)
    machine = next((name for name, named in MACHINES.items() if named == image.machine), "")
    loader = loader_for(host, words, machine)
    wanted = _wanted(finding, words, context)
    found = closure(wanted, loader, image)
    plugin = elf.net_plugin(host.path(wanted.plugin.path)) if wanted.plugin else None
    wrong = (*_without_plugin(finding, profile, words, context), *refusals(wanted, found, plugin, loader, image))
    notes = tuple(dict.fromkeys([*finding.notes, *host.notes]))
    if wrong:
        return FabricPlan(finding, refusals=wrong, notes=notes)
    net = _net(profile, plugin, context)
    if wanted.plugin and net is None:
        notes += (f"{wanted.plugin.path} tells its name only to NCCL: without NCCL_NET nothing keeps it from TCP",)
    return FabricPlan(
        finding,
        injected=_injected(found, image),
        plugin=wanted.plugin.elf.soname if wanted.plugin else None,
        net=net,
        variables={name: fact.value for name, fact in profile.variables.items() if holds(fact.when, context)},
        files=_files(host, profile, words, found, context),
        devices=_existing(host, profile.devices.needed, context),
        notes=notes,
    )


def _values(fact: Fact[tuple[T, ...]] | None, context: Context) -> tuple[T, ...]:
    return fact.value if fact and holds(fact.when, context) else ()


def _wanted(finding: Finding, words: Libraries, context: Context) -> Wanted:
    plugin = finding.plugin if _values(words.plugins, context) else None
    if finding.root == Path("/"):
        # The host is the image: no copy of it wins over itself.
        return Wanted(plugin, _values(words.roots, context))
    sets = [_library_set(members) for members in _values(words.sets, context)]
    return Wanted(
        plugin,
        _values(words.roots, context),
        _values(words.host_wins, context),
        tuple(one for one in sets if one.sonames),
    )


def _library_set(members: tuple[str, ...]) -> LibrarySet:
    folders = tuple(member.rstrip("/") for member in members if member.startswith("/"))
    names = (member for member in members if not member.startswith("/"))
    return LibrarySet(tuple(name for name in names if not is_kept(name)), folders)


def _without_plugin(finding: Finding, profile: Fabric, words: Libraries, context: Context) -> tuple[Refusal, ...]:
    """Where only a plugin lets NCCL use the fabric, that there is none; NCCL itself knows InfiniBand."""
    names = _values(words.plugins, context)
    if not names or finding.plugin is not None or profile.net is not None:
        return ()
    searched = ", ".join(_values(words.search, context)) or "the loader's folders"
    return (
        Refusal(
            names[0],
            f"the host has no network plugin of NCCL's for {profile.title}; looked in {searched}",
            " or ".join(names),
            "NCCL",
            "load the site's module for aws-ofi-nccl, or name its folder in the site's profile: libraries.search",
        ),
    )


def _injected(found: Closure, image: Inventory) -> tuple[Injected, ...]:
    return tuple(
        Injected(name, library.path, found.needed_by[name], wins=name in image.libraries)
        for name, library in found.libraries.items()
    )


def _net(profile: Fabric, plugin: elf.NetPlugin | None, context: Context) -> str | None:
    if profile.net is not None and holds(profile.net.when, context):
        return profile.net.value
    return plugin.name if plugin else None


def _files(host: HostRoot, profile: Fabric, words: Libraries, found: Closure, context: Context) -> tuple[str, ...]:
    # The settings of libraries that stay the image's stay the image's too.
    goes_along = bool(found.sets) if _values(words.sets, context) else bool(found.libraries)
    paths = [*(_existing(host, words.files, context) if goes_along else ())]
    paths += _existing(host, profile.devices.folders, context)
    for one in found.sets:
        # A folder of libraries goes in by its libraries; one of settings, /etc/libibverbs.d, at its own place.
        paths += [path for folder in one.folders for path in host.glob(folder) if not _has_libraries(host, path)]
    return tuple(dict.fromkeys(paths))


def _has_libraries(host: HostRoot, folder: str) -> bool:
    return any(name.endswith(".so") or ".so." in name for name in host.names(folder))


def _existing(host: HostRoot, fact: Fact[tuple[str, ...]] | None, context: Context) -> tuple[str, ...]:
    return tuple(dict.fromkeys(path for pattern in _values(fact, context) for path in host.glob(pattern)))
