"""The nouns of this package: what is found on a host, and what is made of it. No function looks at anything here."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

HOST_ROOT = Path("/host")
"""Where the host's root is mounted, read-only: `--bind /:/host:ro`, `-v /:/host:ro`."""
FABRIC_ROOT = Path("/opt/fabric")
"""Where `muster fabric binds` puts the host's files, one by one: lib/ has the libraries."""


@dataclass(frozen=True)
class Elf:
    """What the loader reads of a shared object.

    Attributes:
        soname: its own name; the file's where it tells none.
        machine: the architecture as ELF names it: EM_X86_64.
        needed: sonames, in order.
        versions_needed: for each soname, the symbol versions asked of it, without those that are weak.
        versions_provided: the symbol versions that it defines.
        search: folders of DT_RPATH, or of DT_RUNPATH, as written ($ORIGIN and all).
        has_runpath: whether they are of DT_RUNPATH: for its own needs alone, and not for those of what it needs.
    """

    soname: str
    machine: str
    needed: tuple[str, ...]
    versions_needed: Mapping[str, frozenset[str]]
    versions_provided: frozenset[str]
    search: tuple[str, ...] = ()
    has_runpath: bool = False


@dataclass(frozen=True)
class Library:
    """A shared object on the host.

    Attributes:
        path: as the host has it, after all links.
        elf: what it says.
        opened_in: the folder in which it was found, before links: the loader's $ORIGIN.
    """

    path: str
    elf: Elf
    opened_in: str = field(default="", compare=False)


@dataclass(frozen=True)
class Device:
    """A device of a fabric.

    Attributes:
        name: mlx5_0, cxi0, rdmap0s6.
        kind: infiniband, roce, efa, slingshot, gdrcopy, xpmem; iwarp and omnipath, which no profile takes.
        path: its file in /dev, or in /sys where it has none.
        state: ACTIVE, DOWN...; empty where it tells none.
    """

    name: str
    kind: str
    path: str
    state: str = ""


@dataclass(frozen=True)
class Interface:
    """A network interface: its speed in Mbit/s where it tells it, and whether it is up."""

    name: str
    speed: int | None
    is_up: bool


@dataclass(frozen=True)
class Finding:
    """What a host has.

    Attributes:
        root: where its root is mounted.
        fabric: the profile's name that its devices tell, or that was asked for: infiniband, slingshot, efa, tcp.
        why: the device, option or profile that told.
        devices: all that were found.
        interfaces: without the loopback.
        plugin: NCCL's network plugin; None where none is needed or there is none.
        libraries: what is named by the profile and was found, by soname.
        missing: sonames and plugins of the profile that were not.
        driver: NVIDIA's, as the kernel tells it.
        notes: one line for each thing that was left out.
    """

    root: Path
    fabric: str
    why: str
    devices: tuple[Device, ...] = ()
    interfaces: tuple[Interface, ...] = ()
    plugin: Library | None = None
    libraries: Mapping[str, Library] = field(default_factory=dict[str, Library])
    missing: tuple[str, ...] = ()
    driver: str | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Refusal:
    """Why a library of the host can't go into this image.

    Attributes:
        library: the host's file that it is about.
        wrong: one sentence.
        needs: the symbol version, soname or architecture that is missing.
        needed_by: who needs it.
        fix: what to do.
    """

    library: str
    wrong: str
    needs: str
    needed_by: str
    fix: str


@dataclass(frozen=True)
class Injected:
    """A library of the host that the container gets.

    Attributes:
        soname: the name under which it is linked.
        path: the host's file.
        needed_by: the soname or profile that asked for it.
        wins: whether it has to be found before a copy of the image's.
    """

    soname: str
    path: str
    needed_by: str
    wins: bool = False


@dataclass(frozen=True)
class FabricPlan:
    """What the container gets of the host.

    Attributes:
        finding: what it was made of.
        injected: in the order in which they were needed; empty where the image's own libraries do.
        plugin: the file name of NCCL's network plugin among them.
        net: what NCCL_NET has to be on several nodes.
        variables: what the profile sets, with conditions resolved.
        files: further files and folders of the host.
        devices: files in /dev for engines that don't bind it whole.
        refusals: why not; then nothing is injected.
        notes: one line for each thing that the user should know.
    """

    finding: Finding
    injected: tuple[Injected, ...] = ()
    plugin: str | None = None
    net: str | None = None
    variables: Mapping[str, str] = field(default_factory=dict[str, str])
    files: tuple[str, ...] = ()
    devices: tuple[str, ...] = ()
    refusals: tuple[Refusal, ...] = ()
    notes: tuple[str, ...] = ()
