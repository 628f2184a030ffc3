"""What a host's loader has noted down: /etc/ld.so.cache, and without it the folders of /etc/ld.so.conf.

Source: https://sourceware.org/git/?p=glibc.git;a=blob;f=sysdeps/generic/dl-cache.h
"""

import platform
import posixpath
import re
import struct

from entrypoint.fabric.hostroot import HostRoot

CACHE = "/etc/ld.so.cache"
CONFIG = "/etc/ld.so.conf"

_OLD = b"ld.so-1.7.0"
_NEW = b"glibc-ld.so.cache1.1"
_OLD_HEADER, _OLD_ENTRY = struct.Struct("=11sxI"), struct.Struct("=iII")
_NEW_HEADER, _NEW_ENTRY = struct.Struct("=20sII5I"), struct.Struct("=iIIIQ")

FLAGS = {
    "x86_64": 0x0303,
    "aarch64": 0x0A03,
    "ppc64le": 0x0503,
    "s390x": 0x0403,
    "riscv64": 0x1003,
}
"""An entry's flags by architecture: the upper byte is its own, the lower one 3, an ELF file for glibc."""
_TRIPLES = {"ppc64le": "powerpc64le"}
_MAX_INCLUDES = 100
_BLANKS = " \t\n\v\f\r"


class Damaged(ValueError):
    """The bytes are no cache of a loader."""


def read(root: HostRoot, machine: str = "") -> dict[str, str]:
    """The host's paths by soname, of one architecture (this one's, as uname names it), without hwcaps variants.

    Where the cache is missing or damaged it is empty, and the root has a note.
    """
    resolved = root.file(CACHE)
    if resolved is None:
        root.note(f"no {CACHE} on the host: only its folders are looked at")
        return {}
    try:
        return parse(root.path(resolved).read_bytes(), machine or platform.machine())
    except (OSError, Damaged) as error:
        root.note(f"the host's {CACHE} can't be read ({error}): only its folders are looked at")
        return {}


def parse(data: bytes, machine: str) -> dict[str, str]:
    """The paths by soname that a cache has for an architecture; of two, the first.

    Raises:
        Damaged: it is no cache, or cut off.
    """
    start = 0
    if data.startswith(_OLD):
        count = _unpack(_OLD_HEADER, data, 0)[1]
        # The new format follows the old one's entries, at the next multiple of eight.
        start = -(-(_OLD_HEADER.size + count * _OLD_ENTRY.size) // 8) * 8
    if data[start : start + len(_NEW)] != _NEW:
        raise Damaged("it is in no format of glibc 2.2 or later")
    count = _unpack(_NEW_HEADER, data, start)[1]
    entries = start + _NEW_HEADER.size
    if entries + count * _NEW_ENTRY.size > len(data):
        raise Damaged("it is cut off")
    wanted = FLAGS.get(machine)
    found: dict[str, str] = {}
    for index in range(count):
        flags, key, value, _, hwcap = _unpack(_NEW_ENTRY, data, entries + index * _NEW_ENTRY.size)
        if flags == wanted and not hwcap:
            found.setdefault(_text(data, start + key), _text(data, start + value))
    return {name: path for name, path in found.items() if name and path.startswith("/")}


def folders(root: HostRoot, machine: str = "") -> list[str]:
    """The folders that the host's loader looks in: those of its configuration, and those that it is built with."""
    machine = machine or platform.machine()
    triple = f"{_TRIPLES.get(machine, machine)}-linux-gnu"
    built_in = ["/lib64", "/usr/lib64", f"/lib/{triple}", f"/usr/lib/{triple}", "/lib", "/usr/lib"]
    return list(dict.fromkeys([*configured(root), *built_in]))


def configured(root: HostRoot) -> list[str]:
    """The folders that /etc/ld.so.conf names, with what it includes, in the order in which ldconfig reads them."""
    found: list[str] = []
    _configured(root, CONFIG, found, set())
    return list(dict.fromkeys(found))


def _configured(root: HostRoot, file: str, found: list[str], seen: set[str]) -> None:
    # Source: https://sourceware.org/git/?p=glibc.git;a=blob;f=elf/ldconfig.c (parse_conf, add_dir_1)
    if file in seen or len(seen) >= _MAX_INCLUDES:
        return
    seen.add(file)
    for line in (root.read_text(file) or "").split("\n"):
        text = line.partition("#")[0].strip(_BLANKS)
        if re.match(r"include[ \t]", text):
            for pattern in text.split()[1:]:
                # Joined to an absolute pattern, the folder of this file is dropped.
                for path in root.glob(posixpath.join(posixpath.dirname(file), pattern)):
                    _configured(root, path, found, seen)
        elif not re.match(r"hwcap[ \t]", text, re.IGNORECASE):
            # A whole line is one folder, with its blanks and commas; after = there may be a kind of library.
            folder = text.partition("=")[0].rstrip(_BLANKS)
            if folder.startswith("/"):
                found.append(folder.rstrip("/") or "/")


def _unpack(shape: struct.Struct, data: bytes, start: int) -> tuple[int, ...]:
    try:
        return shape.unpack_from(data, start)
    except struct.error:
        raise Damaged("it is cut off") from None


def _text(data: bytes, start: int) -> str:
    end = data.find(b"\0", start)
    if end < 0:
        raise Damaged("it is cut off")
    try:
        return data[start:end].decode()
    except UnicodeDecodeError:
        return ""
