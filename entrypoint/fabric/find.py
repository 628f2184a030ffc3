"""What a host has of a fabric: devices, interfaces, libraries, and the profile that fits."""

import difflib
import fnmatch
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

from entrypoint.fabric import devices
from entrypoint.fabric.hostroot import HostRoot
from entrypoint.fabric.loader import Loader
from entrypoint.fabric.model import Device, Finding, Library
from entrypoint.sites.schema import Fabric, Fact, Libraries
from train.errors import MusterError

AUTO = "auto"
NO_FABRIC = "tcp"
# Of what is present, the first: nodes with Slingshot or EFA may have InfiniBand for their storage.
_KINDS = {"slingshot": ("slingshot",), "efa": ("efa",), "infiniband": ("infiniband", "roce")}

T = TypeVar("T")


def find(root: Path, profiles: Mapping[str, Fabric], wanted: str = AUTO, libraries: Libraries | None = None) -> Finding:
    """What the host whose root is mounted at `root` has.

    Args:
        root: "/" looks at what is here.
        profiles: of fabrics, by name.
        wanted: a profile's name, or `auto`.
        libraries: the site's; what they leave out is the profile's.

    Raises:
        MusterError: there is no such profile.
    """
    host = HostRoot(root)
    if not host.folder("/sys/class"):
        host.note(
            f"nothing is mounted at {root}/sys: no device of the host can be found; bind its root with all below it"
        )
    found = devices.find(host)
    name, why = _chosen(host, found, profiles, wanted)
    profile = profiles.get(name)
    words = merged(libraries, profile.libraries if profile else Libraries())
    plugin, by_soname, missing = _libraries(host, words)
    return Finding(
        root=root,
        fabric=name,
        why=why,
        devices=found,
        interfaces=devices.interfaces(host),
        plugin=plugin,
        libraries=by_soname,
        missing=missing,
        driver=devices.driver(host),
        notes=tuple(host.notes),
    )


def merged(libraries: Libraries | None, others: Libraries) -> Libraries:
    """The first's, and for what it leaves out the other's."""
    if libraries is None:
        return others
    names = Libraries.__struct_fields__
    return Libraries(**{name: getattr(libraries, name) or getattr(others, name) for name in names})


def value(fact: Fact[tuple[T, ...]] | None) -> tuple[T, ...]:
    """What a fact says; nothing where there is none."""
    return fact.value if fact else ()


def loader_for(host: HostRoot, libraries: Libraries, machine: str = "") -> Loader:
    """What finds libraries as the host's loader would, in a profile's folders first."""
    return Loader(host, value(libraries.search), machine)


def _chosen(host: HostRoot, found: tuple[Device, ...], profiles: Mapping[str, Fabric], wanted: str) -> tuple[str, str]:
    if wanted != AUTO:
        if wanted not in profiles:
            raise _unknown(wanted, profiles)
        return wanted, "it was asked for"
    down: list[str] = []
    ordered = [name for name in _KINDS if name in profiles] + [name for name in profiles if name not in _KINDS]
    for name in ordered:
        why = _recognised(host, name, profiles[name], found, down)
        if why:
            return name, why
    return NO_FABRIC, "; ".join(["no device of a fabric", *down])


def _recognised(host: HostRoot, name: str, profile: Fabric, found: tuple[Device, ...], down: list[str]) -> str | None:
    """The device that tells that the host has this fabric; those that are of it, but down, are added to `down`."""
    patterns = value(profile.devices.recognise)
    of_it = [device for device in found if device.kind in _KINDS.get(name, ())]
    for device in of_it:
        if not any(_matches(device, pattern) for pattern in patterns):
            continue
        if device.state in ("", "ACTIVE"):
            state = f" {device.state}" if device.state else ""
            return f"{device.path} ({device.name}, {device.kind}{state})"
        down.append(f"{device.name} is {device.state}")
    if name in _KINDS:
        return None
    others = (path for pattern in patterns for path in host.glob(pattern))
    return next(others, None)


def _matches(device: Device, pattern: str) -> bool:
    """Whether a pattern of files or folders tells of a device: of its file, or of one of the folders above that."""
    places = {
        device.path,
        f"/sys/class/infiniband/{device.name}",
        f"/sys/class/cxi/{device.name}",
        f"/dev/{device.name}",
    }
    if device.kind in ("infiniband", "roce", "efa"):
        places.add("/dev/infiniband/uverbs0")
    above = {str(folder) for place in places for folder in Path(place).parents}
    return any(fnmatch.fnmatchcase(place, pattern.rstrip("/")) for place in places | above)


def _libraries(host: HostRoot, words: Libraries) -> tuple[Library | None, dict[str, Library], tuple[str, ...]]:
    loader = loader_for(host, words)
    plugins = value(words.plugins)
    plugin = next((library for name in plugins if (library := loader.find(name))), None)
    needed = dict.fromkeys([*value(words.roots), *value(words.host_wins)])
    of_sets = [member for one in value(words.sets) for member in one if not member.startswith("/")]
    found = {name: library for name in [*needed, *of_sets] if (library := loader.find(name))}
    missing = [name for name in needed if name not in found]
    return plugin, found, tuple([*(plugins if plugin is None else ()), *missing])


def _unknown(wanted: str, profiles: Mapping[str, Fabric]) -> MusterError:
    near = difflib.get_close_matches(wanted, profiles, 1)
    return MusterError(
        "there is no such fabric",
        seen=f"--fabric {wanted}",
        fix=f"--fabric {near[0] if near else '|'.join(['off', AUTO, *profiles])}",
    )
