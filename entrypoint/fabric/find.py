"""The fabric of a host: its devices, its libraries, and the profile in jobs/fabrics that fits.

    HostRoot         files below the folder where the host's root is mounted, as in a chroot
    fabric_devices   the devices of fabrics that /dev and /sys show
    read_library     the ELF fields of a shared object
    HostLibraries    where the host's own loader would find a library
    find             devices, interfaces and the fabric, as a Finding

No program of the host is run, and none of its libraries is loaded.
"""

import fnmatch
import os
import platform
import re
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, TypeVar, cast

from muster import processes
from muster.entrypoint.fabric import AUTO, OFF, TCP
from muster.entrypoint.sites import profiles
from muster.entrypoint.sites.schema import Fabric, Fact
from muster.errors import MusterError, one_line
from muster.units import by_numbers

if TYPE_CHECKING:
    from elftools.elf.elffile import ELFFile

T = TypeVar("T")

# As many as the kernel follows. Source: https://man7.org/linux/man-pages/man7/path_resolution.7.html
MAX_LINKS = 40
_MAX_TEXT = 1 << 20


class HostRoot:
    """The root folder of a host, mounted at `root`. No link leads out of that folder.

    Attributes:
        root: where it is mounted.
        notes: one line for each thing that was left out.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.notes: list[str] = []

    def note(self, line: str) -> None:
        """Adds a line to the notes, once."""
        if one_line(line) not in self.notes:
            self.notes.append(one_line(line))

    def path(self, resolved: str) -> Path:
        """The path in this container of the host's path `resolved`, which is free of links."""
        return self.root / resolved.lstrip("/")

    def resolve(self, path: str) -> str | None:
        """The host's path with all links resolved, as in a chroot: `..` and absolute links stay below the root.

        None where nothing exists, the links are circular, this user lacks permission, or the name is no UTF-8.
        """
        found: list[str] = []
        parts = _parts(path)
        links = 0
        while parts:
            if (part := parts.pop(0)) == "..":
                del found[-1:]
                continue
            here = os.path.join(self.root, *found, part)
            try:
                target = os.readlink(here) if stat.S_ISLNK(os.lstat(here).st_mode) else None
            except (OSError, ValueError):
                return None
            if target is None:
                found.append(part)
                continue
            links += 1
            if links > MAX_LINKS:
                return None
            if target.startswith("/"):
                found = []
            parts = _parts(target) + parts
        resolved = "/" + "/".join(found)
        return resolved if _is_utf8(resolved) else None

    def file(self, path: str) -> str | None:
        """The host's path of a regular file with all links resolved; None for anything else."""
        resolved = self.resolve(path)
        return resolved if resolved and os.path.isfile(self.path(resolved)) else None

    def names(self, folder: str) -> list[str]:
        """The names in a folder of the host, sorted; those that are no UTF-8 are left out, with a note."""
        resolved = self.resolve(folder)
        try:
            names = sorted(os.listdir(self.path(resolved))) if resolved else []
        except OSError as reason:
            if isinstance(reason, PermissionError):
                self.note(f"left out: {resolved}, which this user may not list")
            return []
        readable = [name for name in names if _is_utf8(name)]
        if len(readable) < len(names):
            self.note(f"left out of {resolved}: names that are no UTF-8, {len(names) - len(readable)} of them")
        return readable

    def glob(self, pattern: str) -> list[str]:
        """The host's paths that match `pattern`, sorted, links not resolved; `*`, `?`, `[...]` match within a name."""
        found = ["/"]
        for part in _parts(pattern):
            paths: list[str] = []
            for folder in found:
                names = fnmatch.filter(self.names(folder), part) if set("*?[") & set(part) else [part]
                # As in a shell, a pattern shows hidden names only where it begins with their dot.
                visible = [name for name in names if part.startswith(".") or not name.startswith(".")]
                paths += [str(PurePosixPath(folder) / name) for name in visible]
            found = [path for path in paths if self.resolve(path)]
        return [path for path in found if path != "/"]

    def read_text(self, path: str) -> str:
        """The text in a file of the host, without the spaces around it; empty where it can't be read."""
        if resolved := self.file(path):
            # Some files of sysfs give an error, such as the speed of a port that is down.
            with suppress(OSError), self.path(resolved).open("rb") as file:
                return file.read(_MAX_TEXT).decode(errors="replace").strip()
        return ""


def _parts(path: str) -> list[str]:
    return [part for part in path.split("/") if part not in ("", ".")]


def _is_utf8(name: str) -> bool:
    # In a file's name Python represents bytes that are no UTF-8 as lone surrogates.
    return re.search("[\ud800-\udfff]", name) is None


_VERBS = "/sys/class/infiniband"
_CXI_FOLDERS = ("/dev", "/sys/class/cxi", "/sys/class/cxi_user")
# PCI's vendor number of Amazon. Source: https://github.com/amzn/amzn-drivers (kernel/linux/efa/src/efa_main.c)
_AMAZON = "0x1d0f"
_LINK_LAYERS = {"InfiniBand": "infiniband", "Ethernet": "roce"}


@dataclass(frozen=True)
class Device:
    """A device of a fabric.

    Attributes:
        name: mlx5_0, cxi0, rdmap0s6.
        kind: infiniband, roce, efa, slingshot, gdrcopy, xpmem; iwarp, omnipath, unknown, which no profile is for.
        path: its file in /dev, or in /sys where it has none.
        state: ACTIVE, DOWN...; empty where it reports none.
    """

    name: str
    kind: str
    path: str
    state: str = ""


def fabric_devices(root: HostRoot) -> tuple[Device, ...]:
    """The host's devices of all fabrics, by kind and name."""
    found = [_verbs_device(root, name) for name in root.names(_VERBS)]
    names = {name for folder in _CXI_FOLDERS for name in root.names(folder) if re.fullmatch(r"cxi[0-9]+", name)}
    for name in sorted(names):
        paths = [f"{folder}/{name}" for folder in _CXI_FOLDERS]
        found.append(Device(name, "slingshot", next((path for path in paths if root.resolve(path)), paths[-1])))
    for name, kind in (("gdrdrv", "gdrcopy"), ("xpmem", "xpmem")):
        if root.resolve(f"/dev/{name}"):
            found.append(Device(name, kind, f"/dev/{name}"))
    return tuple(found)


def _verbs_device(root: HostRoot, name: str) -> Device:
    """A device of the kernel's verbs interface, which InfiniBand, RoCE, EFA and others share.

    Source: https://www.kernel.org/doc/Documentation/ABI/stable/sysfs-class-infiniband
    """
    folder = f"{_VERBS}/{name}"
    ports: list[tuple[str, str]] = []
    for port in root.names(f"{folder}/ports"):
        # 4: ACTIVE
        state = root.read_text(f"{folder}/ports/{port}/state").rpartition(":")[2].strip()
        ports.append((state, root.read_text(f"{folder}/ports/{port}/link_layer")))
    # Where there are several ports, an active one decides.
    ports.sort(key=lambda port: port[0] != "ACTIVE")
    if root.read_text(f"{folder}/device/vendor") == _AMAZON:
        kind = "efa"
    elif root.read_text(f"{folder}/node_type").endswith("RNIC"):
        kind = "iwarp"
    elif name.startswith("hfi1"):
        kind = "omnipath"
    else:
        kind = next((_LINK_LAYERS[layer] for _, layer in ports if layer in _LINK_LAYERS), "unknown")
    return Device(name, kind, _verbs_file(root, name) or folder, next((state for state, _ in ports if state), ""))


def _verbs_file(root: HostRoot, name: str) -> str | None:
    """The device file of a verbs device, such as /dev/infiniband/uverbs0 of mlx5_0; None where there is none."""
    for file in root.names(f"{_VERBS}_verbs"):
        if root.read_text(f"{_VERBS}_verbs/{file}/ibdev") == name and root.resolve(f"/dev/infiniband/{file}"):
            return f"/dev/infiniband/{file}"
    return None


CACHE = "/etc/ld.so.cache"

# Characters that the loader takes for separators or expands in LD_LIBRARY_PATH and LD_PRELOAD, and the comma, at which
# NCCL splits a list.
UNUSABLE = re.compile(r"[\s:;,$]")

# No library has as many sections, tags or symbols; a damaged file can claim four billion.
_MAX_ENTRIES = 20_000
_LONGEST_NAME = 200
_PLUGIN = re.compile(r"ncclNetPlugin_v([0-9]{1,3})")
# 	libnl-3.so.200 (libc6,x86-64, OS ABI: Linux 3.2.0) => /lib/x86_64-linux-gnu/libnl-3.so.200
_CACHED = re.compile(r"\t(\S+) \(([^()]*)\) => (/.*)")
_LDCONFIG_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class Library:
    """A shared object on the host, with the ELF fields that the host's loader reads.

    Attributes:
        path: the host's path, with all links resolved.
        soname: its DT_SONAME; the file's name where it has none.
        machine: the architecture as ELF names it: EM_X86_64.
        needed: the sonames of DT_NEEDED, in order.
        rpath: folders of its DT_RPATH and of that of libraries that need it: for all its dependencies, direct or not.
        runpath: folders of DT_RUNPATH: for its direct dependencies, in place of DT_RPATH.
        needed_by: what asked for it first, where that is known: NCCL, the profile, or the path of another library.
    """

    path: str
    soname: str
    machine: str
    needed: tuple[str, ...] = ()
    rpath: tuple[str, ...] = ()
    runpath: tuple[str, ...] = ()
    needed_by: str = ""


@dataclass(frozen=True)
class NetPlugin:
    """A network plugin as NCCL sees it.

    Attributes:
        name: the value for NCCL_NET; None where the plugin sets its name only when it is loaded.
        versions: N of each ncclNetPlugin_vN that it exports, in order.
    """

    name: str | None = None
    versions: tuple[int, ...] = ()


def is_name(name: str) -> bool:
    """Whether `name` can be the name of a file, and an element of LD_LIBRARY_PATH or LD_PRELOAD."""
    return name not in ("", ".", "..") and "/" not in name and name.isprintable() and not UNUSABLE.search(name)


def _of_elf(path: Path, how: "Callable[[ELFFile], T]") -> T | None:
    """The result of `how` for an ELF file; None where it is none, or is damaged."""
    from elftools.elf.elffile import ELFFile

    try:
        with path.open("rb") as file:
            return how(ELFFile(file))
    except Exception:
        # pyelftools trusts the file: damaged bytes can raise any exception.
        return None


def _sections(file: "ELFFile", kind: str) -> Iterator[Any]:
    for section in islice(file.iter_sections(), _MAX_ENTRIES):
        if section.header["sh_type"] == kind:
            yield section


def read_library(root: HostRoot, path: str) -> Library | None:
    """The library at a path of the host; None where the file is none: a linker script, a damaged or static file."""
    if (resolved := root.file(path)) is None:
        return None
    # For $ORIGIN: the folder in `path`, as for the loader, and the resolved one, as the host may open another path.
    origins = list(dict.fromkeys(map(os.path.dirname, (path, resolved))))
    found = _of_elf(root.path(resolved), lambda file: _library(file, resolved, origins))
    if found is None:
        root.note(f"left out: {resolved} can't be read as a shared object")
    return found


def _library(file: "ELFFile", path: str, origins: list[str]) -> Library | None:
    if (dynamic := next(_sections(file, "SHT_DYNAMIC"), None)) is None:
        return None
    tags: dict[str, list[str]] = {"DT_NEEDED": [], "DT_SONAME": [], "DT_RPATH": [], "DT_RUNPATH": []}
    for tag in islice(dynamic.iter_tags(), _MAX_ENTRIES):
        if (kind := tag.entry.d_tag) in tags:
            tags[kind].append(getattr(tag, kind.removeprefix("DT_").lower()))
    soname = tags["DT_SONAME"][0] if tags["DT_SONAME"] else ""
    machine = str(file.header["e_machine"])
    return Library(
        path,
        # A name with a slash in it would be a path wherever it is used.
        soname=soname if is_name(soname) else os.path.basename(path),
        # x32 has the machine of x86-64, but 32-bit pointers.
        machine=machine if file.elfclass == 64 else f"{machine} of {file.elfclass} bits",
        needed=tuple(dict.fromkeys(tags["DT_NEEDED"])),
        rpath=() if tags["DT_RUNPATH"] else _expanded(tags["DT_RPATH"], origins),
        runpath=_expanded(tags["DT_RUNPATH"], origins),
    )


def _expanded(values: list[str], origins: list[str]) -> tuple[str, ...]:
    """The folders of DT_RPATH or DT_RUNPATH, for a library in one of `origins`.

    Source: https://man7.org/linux/man-pages/man8/ld.so.8.html (Dynamic string tokens)
    """
    written = [folder.replace("${ORIGIN}", "$ORIGIN") for value in values for folder in value.split(":")]
    folders = [folder.replace("$ORIGIN", origin) for folder in written for origin in origins]
    return tuple(folder for folder in dict.fromkeys(folders) if folder.startswith("/"))


def net_plugin(path: Path) -> NetPlugin:
    """The exports of a network plugin of NCCL; a file without any version is no plugin.

    Source: https://github.com/NVIDIA/nccl/tree/master/plugins/net
    """
    return _of_elf(path, _net_plugin) or NetPlugin()


def _net_plugin(file: "ELFFile") -> NetPlugin:
    addresses: dict[int, int] = {}
    for section in _sections(file, "SHT_DYNSYM"):
        for symbol in islice(section.iter_symbols(), _MAX_ENTRIES):
            match = _PLUGIN.fullmatch(symbol.name)
            if match and symbol.entry["st_shndx"] != "SHN_UNDEF":
                addresses[int(match[1])] = symbol.entry["st_value"]
    for version in sorted(addresses, reverse=True):
        # Each is a struct that begins with a pointer to the name.
        pointer = _pointer_at(file, addresses[version])
        name, end, _ = (_bytes_at(file, pointer, _LONGEST_NAME) if pointer else b"").partition(b"\0")
        if name and end and name.isascii() and name.decode().isprintable():
            return NetPlugin(name.decode(), tuple(sorted(addresses)))
    return NetPlugin(None, tuple(sorted(addresses)))


def _pointer_at(file: "ELFFile", address: int) -> int:
    """The pointer that the loader will write at a virtual address."""
    for section in _sections(file, "SHT_RELA"):
        symbols = cast(Any, file.get_section(section.header["sh_link"]))
        for entry in (relocation.entry for relocation in section.iter_relocations()):
            if entry["r_offset"] == address:
                # A relocation against a symbol, such as R_X86_64_64, or a relative one, whose addend is the address.
                index = entry["r_info_sym"]
                return entry["r_addend"] + (symbols.get_symbol(index).entry["st_value"] if index else 0)
    # RELR relocations have no addends: the file has the pointer in place.
    return int.from_bytes(_bytes_at(file, address, 8), "little")


def _bytes_at(file: "ELFFile", address: int, count: int) -> bytes:
    """The file's bytes from a virtual address on, at most `count`; empty where the file has none, as for .bss."""
    for offset in file.address_offsets(address) if file.num_segments() < _MAX_ENTRIES else ():
        file.stream.seek(offset)
        return file.stream.read(count)
    return b""


@cache
def own_machine() -> str:
    """This image's architecture, as ELF names it."""
    own = read_library(HostRoot(Path("/")), sys.executable)
    return own.machine if own else ""


class HostLibraries:
    """Finds libraries below a host's root, as the host's own loader would.

    Source: https://man7.org/linux/man-pages/man8/ld.so.8.html

    Args:
        search: folders, `*` allowed, that are searched before the loader's own. Of several that match a pattern, the
            site's own choice comes first, then the newest version: /opt/fab/default, /opt/fab/1.22, /opt/fab/1.3.
    """

    def __init__(self, root: HostRoot, search: tuple[str, ...] = ()) -> None:
        self.root = root
        self.search = [path for pattern in search for path in sorted(root.glob(pattern), key=by_numbers, reverse=True)]
        self.cached = loader_cache(root)
        machine = platform.machine()
        triple = f"{'powerpc64le' if machine == 'ppc64le' else machine}-linux-gnu"
        self.folders = ["/lib64", "/usr/lib64", f"/lib/{triple}", f"/usr/lib/{triple}", "/lib", "/usr/lib"]

    def find(self, name: str, by: Library | None = None) -> Library | None:
        """The library called `name`; one of another architecture where there is no other, None without any.

        Args:
            name: a soname, or a path.
            by: the library that needs it.
        """
        if "/" in name:
            return read_library(self.root, name)
        rpath = by.rpath if by else ()
        listed = by.runpath if by and by.runpath else rpath
        first = [f"{folder}/{name}" for folder in (*listed, *self.search)]
        last = [f"{folder}/{name}" for folder in self.folders]
        other = None
        for path in (*first, *self.cached.get(name, []), *last):
            found = read_library(self.root, path)
            if found is not None and found.machine == own_machine():
                # Source: https://sourceware.org/git/?p=glibc.git;a=blob;f=elf/dl-load.c (_dl_map_object)
                return replace(found, rpath=(*found.rpath, *rpath))
            other = other or found
        return other


def loader_cache(root: HostRoot) -> dict[str, list[str]]:
    """The paths by soname in the host's loader cache, which this image's ldconfig reads.

    Copies for certain processors (glibc-hwcaps) are left out.
    """
    found: dict[str, list[str]] = {}
    if resolved := root.file(CACHE):
        command = ["ldconfig", "-p", "-C", str(root.path(resolved))]
        env = {"PATH": "/sbin:/usr/sbin:/bin:/usr/bin"}
        with suppress(OSError, subprocess.TimeoutExpired):
            done = processes.run(command, env=env, errors="surrogateescape", timeout_s=_LDCONFIG_TIMEOUT_S)
            for entry in map(_CACHED.fullmatch, done.stdout.splitlines()):
                if entry and "hwcap" not in entry[2]:
                    found.setdefault(entry[1], []).append(entry[3])
    if not found:
        root.note(f"ldconfig finds no library in the host's {CACHE}: only its loader's own folders are searched")
    return found


# The fabric of each kind of device. The first that is present is taken: nodes with Slingshot or EFA may have InfiniBand
# for their storage.
_FABRICS = {"slingshot": "slingshot", "efa": "efa", "infiniband": "infiniband", "roce": "infiniband"}


@dataclass(frozen=True)
class Finding:
    """The devices, the interfaces and the fabric of a host.

    Attributes:
        fabric: the name of the profile that its devices match, or that was asked for: infiniband, slingshot, efa, tcp.
        why: the reason for `fabric`: a device, a path, that it was asked for, or that there is no device.
        interfaces: names, without the loopback.
    """

    root: Path
    fabric: str
    why: str
    devices: tuple[Device, ...] = ()
    interfaces: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def nccl_devices(self) -> list[Device]:
        """The devices that NCCL can send over."""
        return [device for device in self.devices if device.kind in _FABRICS]


def find(root: Path, wanted: str = AUTO, fabrics: Mapping[str, Fabric] | None = None) -> Finding:
    """The devices, the interfaces and the fabric of the host whose root is mounted at `root`.

    Args:
        root: "/" for this container's own.
        wanted: a profile's name, or `auto`.
        fabrics: the profiles by name; None takes those of jobs/fabrics.

    Raises:
        MusterError: there is no such profile.
    """
    fabrics = profiles.fabrics() if fabrics is None else fabrics
    here = HostRoot(root)
    if not here.names("/sys/class"):
        here.note(f"nothing is mounted at {root}/sys: no device of the host is found; bind its root with all below it")
    devices = fabric_devices(here)
    name, why = _chosen(here, devices, fabrics, wanted)
    return Finding(
        root=root,
        fabric=name,
        why=why,
        devices=devices,
        # bonding_masters is a file.
        interfaces=tuple(name for name in here.names("/sys/class/net") if name not in ("lo", "bonding_masters")),
        notes=tuple(here.notes),
    )


def values(fact: Fact[tuple[T, ...]] | None) -> tuple[T, ...]:
    """The values of a profile's fact; empty where there is none."""
    return fact.value if fact else ()


def _chosen(root: HostRoot, found: tuple[Device, ...], fabrics: Mapping[str, Fabric], wanted: str) -> tuple[str, str]:
    if wanted != AUTO:
        if wanted not in fabrics:
            fix = f"--fabric {'|'.join([OFF, AUTO, *fabrics])}"
            raise MusterError("there is no such fabric", seen=f"--fabric or MUSTER_FABRIC: {wanted}", fix=fix)
        return wanted, "it was asked for"
    down: list[str] = []
    for kind, name in _FABRICS.items():
        for device in (device for device in found if name in fabrics and device.kind == kind):
            if device.state in ("", "ACTIVE"):
                state = f" {device.state}" if device.state else ""
                return name, f"{device.path} ({device.name}, {device.kind}{state})"
            down.append(f"{device.name} is {device.state}")
    # A profile that a site wrote itself is recognised by its patterns.
    for name in sorted(fabrics.keys() - _FABRICS.values()):
        for pattern in values(fabrics[name].devices.recognise):
            if paths := root.glob(pattern):
                return name, paths[0]
    return TCP, "; ".join(["no device of a fabric", *down])
