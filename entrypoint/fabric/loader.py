"""How a host's loader finds a library: by where the one that needs it says, a profile's folders, its cache, its own."""

import os
import platform
import re
from collections.abc import Sequence
from dataclasses import replace

from entrypoint.fabric import elf, ldcache
from entrypoint.fabric.hostroot import HostRoot
from entrypoint.fabric.model import Library

MACHINES = {
    "x86_64": "EM_X86_64",
    "aarch64": "EM_AARCH64",
    "ppc64le": "EM_PPC64",
    "s390x": "EM_S390",
    "riscv64": "EM_RISCV",
}
"""An architecture's name in ELF, by the one that uname has."""


class Loader:
    """Finds libraries below a root.

    Args:
        root: of the host, or of an image.
        search: folders, `*` allowed, that come before those which the loader itself knows.
        machine: the architecture as uname has it; this one's.
    """

    def __init__(self, root: HostRoot, search: tuple[str, ...] = (), machine: str = "") -> None:
        self.root = root
        self.machine = machine or platform.machine()
        self.search = [
            folder for pattern in search for folder in _newest_first(root.glob(pattern)) if root.folder(folder)
        ]
        self.cache = ldcache.read(root, self.machine)
        self.folders = ldcache.folders(root, self.machine)
        self._read: dict[str, Library | None] = {}

    def at(self, path: str) -> Library | None:
        """The library at a path of the host, after all links; None where there is none."""
        resolved = self.root.file(path)
        if resolved is None:
            return None
        if resolved not in self._read:
            read = elf.read(self.root.path(resolved))
            self._read[resolved] = Library(resolved, read) if read else None
            if read is None:
                self.root.note(f"left out: {resolved} can't be read as a shared object")
        return self._read[resolved]

    def find(self, name: str, by: Sequence[Library] = ()) -> Library | None:
        """The library of that name; one of another architecture where there is no other.

        Args:
            by: the library that needs it, the one that needs that, and so on.
        """
        if "/" in name:
            return _opened(self.at(name), name)
        if not elf.is_name(name):
            return None
        other = None
        for path in self._places(name, by):
            found = _opened(self.at(path), path)
            if found is not None and self.fits(found):
                return found
            other = other or found
        return other

    def fits(self, library: Library) -> bool:
        """Whether it is of this architecture."""
        return library.elf.machine == MACHINES.get(self.machine)

    def others(self, soname: str) -> list[str]:
        """The names of other versions of a library that the host has: libfoo.so.2 for libfoo.so.1."""
        stem = stem_of(soname)
        names = set(self.cache)
        for folder in (*self.search, *self.folders):
            names.update(self.root.names(folder))
        return sorted(name for name in names if name.startswith(f"{stem}.") and name != soname)

    def _places(self, name: str, by: Sequence[Library]) -> list[str]:
        folders = [*(folder for library in _telling(by) for folder in _expanded(library, self.machine)), *self.search]
        paths = [f"{folder}/{name}" for folder in folders]
        if name in self.cache:
            paths.append(self.cache[name])
        return [*paths, *(f"{folder}/{name}" for folder in self.folders)]


def _newest_first(folders: list[str]) -> list[str]:
    """/opt/fab/default, /opt/fab/1.22, /opt/fab/1.3: of several versions a site's own choice, then the newest."""

    def key(folder: str) -> list[tuple[int, int, str]]:
        parts = re.split("([0-9]+)", folder)
        return [(0, int(part), "") if part.isdecimal() else (1, 0, part) for part in parts if part]

    return sorted(folders, key=key, reverse=True)


def stem_of(soname: str) -> str:
    """libfoo.so for libfoo.so.1."""
    return soname.partition(".so")[0] + ".so"


def _opened(library: Library | None, path: str) -> Library | None:
    return replace(library, opened_in=os.path.dirname(path)) if library else None


def _telling(by: Sequence[Library]) -> list[Library]:
    """Those whose folders count: DT_RPATH holds down the whole chain, unless who needs the library has DT_RUNPATH.

    Source: https://sourceware.org/git/?p=glibc.git;a=blob;f=elf/dl-load.c (_dl_map_object)
    """
    if not by or by[0].elf.has_runpath:
        return list(by[:1])
    return [library for library in by if not library.elf.has_runpath]


def _expanded(by: Library, machine: str) -> list[str]:
    folders: list[str] = []
    # As it was opened, as the loader has it; and where it really is, as the host may open it by another name.
    origins = [*([by.opened_in] if by.opened_in else []), os.path.dirname(by.path)]
    for folder in by.elf.search:
        folder = folder.replace("${", "$").replace("}", "") if "${" in folder else folder
        for origin in origins:
            place = folder.replace("$ORIGIN", origin).replace("$PLATFORM", machine)
            folders += [place.replace("$LIB", lib) for lib in ("lib64", f"lib/{machine}-linux-gnu")]
    return [folder for folder in dict.fromkeys(folders) if folder.startswith("/")]
