"""The shared objects of a host: what one says of itself, where the host's loader finds one, which may leave the host.

Source: https://man7.org/linux/man-pages/man8/ld.so.8.html
"""

import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from muster import processes
from muster.entrypoint.fabric.host import HostRoot

if TYPE_CHECKING:
    from elftools.elf.elffile import ELFFile

CACHE = "/etc/ld.so.cache"
NCCL = "libnccl.so.2"

# No library has as many; a damaged file can claim four billion.
_MOST = 20_000
_LONGEST_NAME = 200
_PLUGIN = re.compile(r"ncclNetPlugin_v([0-9]{1,3})")
_ASKED_FOR = re.compile(rb"\0ncclNetPlugin_v([0-9]{1,3})(?=\0)")
# 	libnl-3.so.200 (libc6,x86-64, OS ABI: Linux 3.2.0) => /lib/x86_64-linux-gnu/libnl-3.so.200
_CACHED = re.compile(r"\t(\S+) \(([^()]*)\) => (/.*)")
_LDCONFIG_TIMEOUT_S = 30.0

_OF_LIBC = r"libc|libm|libmvec|libpthread|libdl|librt|libutil|libresolv|libanl|libnsl|libthread_db|libBrokenLocale"
# One C library and one C++ runtime in a process; and NCCL is the wheel's, which torch was built with. libnsl.so.2 and
# later are a project of their own.
_IMAGES = re.compile(
    rf"(?!libnsl\.so\.[2-9])(({_OF_LIBC}|libstdc\+\+|libgcc_s|libnccl)\.so(\.[0-9.]+)?|libnss_.*|ld-linux.*|ld64?\.so.*)"
)
_DRIVERS = re.compile(r"(libcuda|libnvidia-[^/]+|libnvcuvid|libcudadebugger)\.so(\.[0-9.]+)?")

T = TypeVar("T")


def is_images(soname: str) -> bool:
    """Whether a library comes from the image alone: the C library's family, compilers' runtimes, NCCL."""
    return bool(_IMAGES.fullmatch(soname))


def is_drivers(soname: str) -> bool:
    """Whether a library comes with NVIDIA's driver, which the container's engine puts in place (--nv, --gpus)."""
    return bool(_DRIVERS.fullmatch(soname))


def never_leaves_host(soname: str) -> bool:
    """Whether a library has to be the image's or the driver's, whatever the host has."""
    return is_images(soname) or is_drivers(soname)


def is_name(name: str) -> bool:
    """Whether `name` can be a file's name in one folder, and be written in a list of paths."""
    return bool(name) and "/" not in name and ":" not in name and name not in (".", "..") and name.isprintable()


@dataclass(frozen=True)
class Elf:
    """What the loader reads of a shared object.

    Attributes:
        soname: its own name; the file's where it tells none.
        machine: the architecture as ELF names it: EM_X86_64.
        needed: sonames, in order.
        versions: the symbol versions that it defines.
        search: folders of DT_RPATH, or of DT_RUNPATH, as written ($ORIGIN and all).
        has_runpath: whether they are of DT_RUNPATH: for its own needs alone, and not for those of what it needs.
    """

    soname: str
    machine: str
    needed: tuple[str, ...]
    versions: frozenset[str]
    search: tuple[str, ...] = ()
    has_runpath: bool = False


@dataclass(frozen=True)
class NetPlugin:
    """What NCCL sees of a network plugin.

    Attributes:
        name: what NCCL_NET has to be; None where the plugin makes it up as it is loaded.
        versions: N of each ncclNetPlugin_vN that it exports, in order.
    """

    name: str | None
    versions: tuple[int, ...]


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


class HostLibraries:
    """Finds libraries below a host's root, as the host's own loader would.

    Args:
        root: of the host.
        search: folders, `*` allowed, that come before those which the loader itself knows.
    """

    def __init__(self, root: HostRoot, search: tuple[str, ...] = ()) -> None:
        self.root = root
        found = (folder for pattern in search for folder in _newest_first(root.glob(pattern)))
        self.search = [folder for folder in found if root.folder(folder)]
        self.cached: dict[str, list[str]] = {}
        resolved = root.file(CACHE)
        cached = loader_cache(root.path(resolved)) if resolved else f"there is no {CACHE} on the host"
        if isinstance(cached, str):
            root.note(f"{cached}: only its loader's own folders are looked at")
        else:
            self.cached = cached
        machine = platform.machine()
        triple = f"{'powerpc64le' if machine == 'ppc64le' else machine}-linux-gnu"
        self.folders = ["/lib64", "/usr/lib64", f"/lib/{triple}", f"/usr/lib/{triple}", "/lib", "/usr/lib"]
        self._read: dict[str, Library | None] = {}

    def at(self, path: str) -> Library | None:
        """The library at a path of the host, after all links; None where there is none."""
        resolved = self.root.file(path)
        if resolved is None:
            return None
        if resolved not in self._read:
            elf = read(self.root.path(resolved))
            self._read[resolved] = Library(resolved, elf) if elf else None
            if elf is None:
                self.root.note(f"left out: {resolved} can't be read as a shared object")
        library = self._read[resolved]
        return replace(library, opened_in=os.path.dirname(path)) if library else None

    def find(self, name: str, by: Sequence[Library] = ()) -> Library | None:
        """The library of that name; one of another architecture where there is no other.

        Args:
            name: a soname, or a path.
            by: the library that needs it, the one that needs that, and so on.
        """
        if "/" in name:
            return self.at(name)
        if not is_name(name):
            return None
        folders = [*_search_of(by), *self.search]
        paths = [f"{folder}/{name}" for folder in folders] + self.cached.get(name, [])
        other = None
        for path in [*paths, *(f"{folder}/{name}" for folder in self.folders)]:
            found = self.at(path)
            if found is not None and found.elf.machine == own_machine():
                return found
            other = other or found
        return other


def loader_cache(path: Path) -> dict[str, list[str]] | str:
    """The paths by soname in a cache of glibc's loader, as this image's ldconfig reads it; or why it can't be read.

    Copies for certain processors (glibc-hwcaps) are left out.
    """
    program = shutil.which("ldconfig", path="/sbin:/usr/sbin:/bin:/usr/bin")
    if program is None:
        return f"no ldconfig here to read {CACHE}"
    try:
        command = [program, "-p", "-C", str(path)]
        done = processes.run(command, env={}, errors="surrogateescape", timeout_s=_LDCONFIG_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as reason:
        return f"{CACHE} can't be read ({reason})"
    if done.returncode:
        return f"{CACHE} can't be read (ldconfig ended with code {done.returncode})"
    found: dict[str, list[str]] = {}
    for line in done.stdout.splitlines():
        entry = _CACHED.fullmatch(line)
        if entry and "hwcap" not in entry[2]:
            found.setdefault(entry[1], []).append(entry[3])
    return found or f"{CACHE} can't be read (ldconfig finds no library in it)"


def _newest_first(folders: list[str]) -> list[str]:
    """/opt/fab/default, /opt/fab/1.22, /opt/fab/1.3: of several versions a site's own choice, then the newest."""
    return sorted(folders, key=by_numbers, reverse=True)


def by_numbers(text: str) -> list[tuple[int, int, str]]:
    """A key for sorting by which GLIBC_2.9 comes before GLIBC_2.34."""
    parts = re.split("([0-9]+)", text)
    return [(0, int(part), "") if part.isdecimal() else (1, 0, part) for part in parts if part]


def _search_of(by: Sequence[Library]) -> list[str]:
    """The folders that the libraries of a chain of needs name for the last need.

    DT_RPATH holds down the whole chain, unless the library that needs another has DT_RUNPATH.
    Source: https://sourceware.org/git/?p=glibc.git;a=blob;f=elf/dl-load.c (_dl_map_object)
    """
    telling = by[:1] if by and by[0].elf.has_runpath else [library for library in by if not library.elf.has_runpath]
    machine = platform.machine()
    folders: list[str] = []
    for library in telling:
        # As it was opened, as the loader has it; and where it really is, as the host may open it by another name.
        origins = [*([library.opened_in] if library.opened_in else []), os.path.dirname(library.path)]
        for folder in library.elf.search:
            folder = re.sub(r"\$\{(\w+)\}", r"$\1", folder).replace("$PLATFORM", machine)
            for place in (folder.replace("$ORIGIN", origin) for origin in origins):
                folders += [place.replace("$LIB", lib) for lib in ("lib64", f"lib/{machine}-linux-gnu")]
    return [folder for folder in dict.fromkeys(folders) if folder.startswith("/")]


@cache
def own_machine() -> str:
    """This image's architecture, as ELF names it."""
    elf = read(Path(sys.executable))
    return elf.machine if elf else ""


def read(path: Path) -> Elf | None:
    """What a shared object or a program says; None for what is neither: a linker script, a damaged or static file."""
    return _read(path, _elf)


def net_plugin(path: Path) -> NetPlugin | None:
    """What a plugin of NCCL exports; None where the file can't be read. Without any version it is no plugin."""
    return _read(path, _net_plugin)


def opened_plugins(nccl: Path) -> tuple[int, ...]:
    """N of each ncclNetPlugin_vN that an NCCL asks its network plugin for, in order; none where it can't be told."""
    return _read(nccl, _opened_plugins) or ()


def _read(path: Path, how: "Callable[[ELFFile, Path], T]") -> T | None:
    from elftools.elf.elffile import ELFFile

    try:
        # Opening a pipe would wait for somebody to write into it.
        if not path.is_file():
            return None
        with path.open("rb") as file:
            return how(ELFFile(file), path)
    except Exception:
        # pyelftools trusts what it reads: damaged bytes raise whatever they come to, and the file is no library then.
        return None


def _elf(file: "ELFFile", path: Path) -> Elf | None:
    dynamic = next(_sections(file, "SHT_DYNAMIC"), None)
    if dynamic is None:
        return None
    tags: dict[str, list[str]] = {"DT_NEEDED": [], "DT_SONAME": [], "DT_RPATH": [], "DT_RUNPATH": []}
    for tag in islice(dynamic.iter_tags(), _MOST):
        kind = tag.entry.d_tag
        if kind in tags:
            tags[kind].append(getattr(tag, kind.removeprefix("DT_").lower()))
    soname = tags["DT_SONAME"][0] if tags["DT_SONAME"] else ""
    search = tags["DT_RUNPATH"] or tags["DT_RPATH"]
    machine = str(file.header["e_machine"])
    return Elf(
        # A name with a slash in it would be a path wherever it is used.
        soname=soname if is_name(soname) else path.name,
        # x32 has the machine of x86-64, and other pointers.
        machine=machine if file.elfclass == 64 else f"{machine} of {file.elfclass} bits",
        needed=tuple(dict.fromkeys(tags["DT_NEEDED"])),
        versions=frozenset(_versions(file)),
        search=tuple(folder for value in search for folder in value.split(":") if folder),
        has_runpath=bool(tags["DT_RUNPATH"]),
    )


def _sections(file: "ELFFile", kind: str) -> Iterator[Any]:
    for section in islice(file.iter_sections(), _MOST):
        if section.header["sh_type"] == kind:
            yield section


def _versions(file: "ELFFile") -> Iterator[str]:
    """The symbol versions that a file defines; one has the soname's name, and libcudnn.so.9 is asked for by it."""
    for section in _sections(file, "SHT_GNU_verdef"):
        for _, names in islice(section.iter_versions(), _MOST):
            # The first of the names is the version's own, the others are those of its parents.
            yield from (own.name for own in islice(names, 1))


def _opened_plugins(file: "ELFFile", path: Path) -> tuple[int, ...]:
    names = file.get_section_by_name(".rodata")
    return tuple(sorted({int(match[1]) for match in _ASKED_FOR.finditer(names.data() if names else b"")}))


def _net_plugin(file: "ELFFile", path: Path) -> NetPlugin:
    places: dict[int, int] = {}
    for section in _sections(file, "SHT_DYNSYM"):
        for symbol in islice(section.iter_symbols(), _MOST):
            match = _PLUGIN.fullmatch(symbol.name)
            if match and symbol.entry["st_shndx"] != "SHN_UNDEF":
                places[int(match[1])] = symbol.entry["st_value"]
    names = [_pointed_to(file, places[version]) for version in sorted(places, reverse=True)]
    return NetPlugin(next((name for name in names if name), None), tuple(sorted(places)))


def _pointed_to(file: "ELFFile", place: int) -> str | None:
    """The string to which the pointer at address `place` will point: a plugin's first field is its name."""
    pointer = _relocated(file, place) or int.from_bytes(_bytes(file, place, 8), "little")
    name, end, _ = (_bytes(file, pointer, _LONGEST_NAME) if pointer else b"").partition(b"\0")
    return name.decode() if end and name.isascii() and name.decode().isprintable() else None


def _relocated(file: "ELFFile", place: int) -> int | None:
    """The value that the loader will write at address `place`; None where the file has it there already."""
    for section in _sections(file, "SHT_RELA"):
        symbols = cast(Any, file.get_section(section.header["sh_link"]))
        for relocation in section.iter_relocations():
            entry = relocation.entry
            if entry["r_offset"] == place:
                index = entry["r_info_sym"]
                # One of a symbol, such as R_X86_64_64, or a relative one, which has the address itself.
                return entry["r_addend"] + (symbols.get_symbol(index).entry["st_value"] if index else 0)
    # RELR, which is without addends, leaves them in place.
    return None


def _bytes(file: "ELFFile", address: int, count: int) -> bytes:
    """What the file has from an address of memory on; empty where that is zeroed memory alone."""
    for offset in file.address_offsets(address) if file.num_segments() < _MOST else ():
        file.stream.seek(offset)
        return file.stream.read(count)
    return b""
