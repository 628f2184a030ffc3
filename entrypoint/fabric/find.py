"""What a host has of a fabric: devices, interfaces, libraries, and the profile in jobs/fabrics that fits."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from muster.entrypoint.fabric import AUTO, OFF, TCP, host
from muster.entrypoint.fabric.host import Device, HostRoot
from muster.entrypoint.fabric.libraries import HostLibraries, Library
from muster.entrypoint.sites import profiles
from muster.entrypoint.sites.schema import Fabric, Fact, Libraries, Site
from muster.errors import MusterError

# Of what is present, the first: nodes with Slingshot or EFA may have InfiniBand for their storage.
_KINDS = {"slingshot": ("slingshot",), "efa": ("efa",), "infiniband": ("infiniband", "roce")}
_NETWORK = "/sys/class/net"

T = TypeVar("T")


@dataclass(frozen=True)
class Finding:
    """What a host has.

    Attributes:
        root: where its root is mounted.
        fabric: the profile's name that its devices tell, or that was asked for: infiniband, slingshot, efa, tcp.
        why: the device, option or profile that told.
        devices: all that were found.
        interfaces: names, without the loopback.
        plugin: NCCL's network plugin; None where none is needed or there is none.
        notes: one line for each thing that was left out.
    """

    root: Path
    fabric: str
    why: str
    devices: tuple[Device, ...] = ()
    interfaces: tuple[str, ...] = ()
    plugin: Library | None = None
    notes: tuple[str, ...] = ()


def find(
    root: Path, wanted: str = AUTO, site: Site | None = None, fabrics: Mapping[str, Fabric] | None = None
) -> Finding:
    """What the host whose root is mounted at `root` has.

    Args:
        root: "/" looks at what is here.
        wanted: a profile's name, or `auto`.
        site: its libraries take the place of the profile's.
        fabrics: the profiles by name; None takes those of jobs/fabrics.

    Raises:
        MusterError: there is no such profile.
    """
    fabrics = profiles.fabrics() if fabrics is None else fabrics
    here = HostRoot(root)
    if not here.folder("/sys/class"):
        here.note(
            f"nothing is mounted at {root}/sys: no device of the host can be found; bind its root with all below it"
        )
    devices = host.devices(here)
    name, why = _chosen(here, devices, fabrics, wanted)
    words = profiles.libraries(site, fabrics[name]) if name in fabrics else Libraries()
    libraries = HostLibraries(here, values(words.search))
    plugin = next((library for each in values(words.plugins) if (library := libraries.find(each))), None)
    return Finding(
        root=root,
        fabric=name,
        why=why,
        devices=devices,
        interfaces=tuple(name for name in here.names(_NETWORK) if name != "lo" and here.folder(f"{_NETWORK}/{name}")),
        plugin=plugin,
        notes=tuple(here.notes),
    )


def values(fact: Fact[tuple[T, ...]] | None) -> tuple[T, ...]:
    """What a profile's fact says; nothing where there is none."""
    return fact.value if fact else ()


def _chosen(root: HostRoot, found: tuple[Device, ...], fabrics: Mapping[str, Fabric], wanted: str) -> tuple[str, str]:
    if wanted != AUTO:
        if wanted not in fabrics:
            fix = f"--fabric {'|'.join([OFF, AUTO, *fabrics])}"
            raise MusterError("there is no such fabric", seen=f"--fabric {wanted}", fix=fix)
        return wanted, "it was asked for"
    down: list[str] = []
    for name, kinds in _KINDS.items():
        for device in (device for device in found if name in fabrics and device.kind in kinds):
            if device.state in ("", "ACTIVE"):
                state = f" {device.state}" if device.state else ""
                return name, f"{device.path} ({device.name}, {device.kind}{state})"
            down.append(f"{device.name} is {device.state}")
    # A profile that a site wrote itself: what its patterns match.
    for name in (name for name in fabrics if name not in _KINDS):
        for pattern in values(fabrics[name].devices.recognise):
            if paths := root.glob(pattern):
                return name, paths[0]
    return TCP, "; ".join(["no device of a fabric", *down])
