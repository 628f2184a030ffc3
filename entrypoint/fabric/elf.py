"""What the loader would read of a shared object, read without loading it."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from entrypoint.fabric.model import Elf

if TYPE_CHECKING:
    from elftools.elf.elffile import ELFFile

# A symbol version that a weak reference asks for may be missing.
# Source: https://refspecs.linuxfoundation.org/LSB_5.0.0/LSB-Core-generic/LSB-Core-generic/symversion.html
_WEAK = 0x2
# No library has as many; a damaged file can claim four billion.
_MOST = 20_000
_LONGEST_NAME = 200
_PLUGIN = re.compile(r"ncclNetPlugin_v([0-9]{1,3})")
_ASKED_FOR = re.compile(rb"\0ncclNetPlugin_v([0-9]{1,3})(?=\0)")


@dataclass(frozen=True)
class NetPlugin:
    """What NCCL sees of a network plugin.

    Attributes:
        name: what NCCL_NET has to be; None where the plugin makes it up as it is loaded.
        versions: N of each ncclNetPlugin_vN that it exports, in order.
    """

    name: str | None
    versions: tuple[int, ...]


def read(path: Path) -> Elf | None:
    """What a shared object or a program says; None for what is neither: a linker script, a damaged or static file."""
    elf = _read(path, _elf)
    return elf if isinstance(elf, Elf) else None


def net_plugin(path: Path) -> NetPlugin | None:
    """What a plugin of NCCL exports; None where the file can't be read. Without any version it is no plugin."""
    plugin = _read(path, _net_plugin)
    return plugin if isinstance(plugin, NetPlugin) else None


def opened_plugins(path: Path) -> tuple[int, ...]:
    """N of each ncclNetPlugin_vN that an NCCL asks its network plugin for, in order; none where it can't be told."""
    found = _read(path, _opened_plugins)
    return cast(tuple[int, ...], found) if isinstance(found, tuple) else ()


def _read(path: Path, how: Any) -> object:
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
    sections = {str(section.header["sh_type"]): section for section in islice(file.iter_sections(), _MOST)}
    dynamic = cast(Any, sections.get("SHT_DYNAMIC"))
    if dynamic is None:
        return None
    tags: dict[str, list[str]] = {"DT_NEEDED": [], "DT_SONAME": [], "DT_RPATH": [], "DT_RUNPATH": []}
    for tag in islice(dynamic.iter_tags(), _MOST):
        kind = tag.entry.d_tag
        if kind in tags:
            tags[kind].append(getattr(tag, kind.removeprefix("DT_").lower()))
    soname = tags["DT_SONAME"][0] if tags["DT_SONAME"] else ""
    search = tags["DT_RUNPATH"] or tags["DT_RPATH"]
    return Elf(
        # A name with a slash in it would be a path wherever it is used.
        soname=soname if is_name(soname) else path.name,
        machine=_machine(file),
        needed=tuple(dict.fromkeys(tags["DT_NEEDED"])),
        versions_needed=_versions_needed(sections.get("SHT_GNU_verneed")),
        versions_provided=_versions_provided(sections.get("SHT_GNU_verdef")),
        search=tuple(folder for value in search for folder in value.split(":") if folder),
        has_runpath=bool(tags["DT_RUNPATH"]),
    )


def is_name(name: str) -> bool:
    """Whether `name` can be a file's name in one folder, and be written in a list of paths."""
    return bool(name) and "/" not in name and ":" not in name and name not in (".", "..") and name.isprintable()


def _machine(file: "ELFFile") -> str:
    machine = str(file.header["e_machine"])
    # x32 has the machine of x86-64, and other pointers.
    return machine if file.elfclass == 64 else f"{machine} of {file.elfclass} bits"


def _sections(file: "ELFFile", kind: str) -> Iterator[Any]:
    for section in islice(file.iter_sections(), _MOST):
        if section.header["sh_type"] == kind:
            yield section


def _versions_needed(section: Any) -> dict[str, frozenset[str]]:
    found: dict[str, set[str]] = {}
    left = _MOST
    for need, versions in _versions(section):
        names = found.setdefault(need.name, set())
        for version in versions:
            left -= 1
            if left < 0:
                raise ValueError("more symbol versions than any library has")
            if not version.entry["vna_flags"] & _WEAK:
                names.add(version.name)
    return {name: frozenset(versions) for name, versions in found.items()}


def _versions_provided(section: Any) -> frozenset[str]:
    # The first of the names is its own, the others are those of its parents. The version that has the soname's name
    # counts: libcudnn.so.9 is asked for by it.
    named = (next(names, None) for _, names in _versions(section))
    return frozenset(own.name for own in named if own is not None)


def _versions(section: Any) -> Iterator[tuple[Any, Iterator[Any]]]:
    if section is not None:
        yield from islice(section.iter_versions(), _MOST)


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
    relocated = _relocated(file, place)
    pointer = relocated if relocated is not None else int.from_bytes(_bytes(file, place, 8), "little")
    text = _bytes(file, pointer, _LONGEST_NAME) if pointer else b""
    name, end, _ = text.partition(b"\0")
    try:
        return name.decode("ascii") if end and name.decode("ascii").isprintable() else None
    except UnicodeDecodeError:
        return None


def _relocated(file: "ELFFile", place: int) -> int | None:
    # R_X86_64_64 and R_AARCH64_ABS64 name a symbol; R_X86_64_RELATIVE and R_AARCH64_RELATIVE tell the address.
    # Source: https://gitlab.com/x86-psABIs/x86-64-ABI and https://github.com/ARM-software/abi-aa (aaelf64)
    of_symbol, relative = {"EM_X86_64": (1, 8), "EM_AARCH64": (257, 1027)}.get(file.header["e_machine"], (-1, -1))
    for section in _sections(file, "SHT_RELA"):
        symbols = cast(Any, file.get_section(section.header["sh_link"]))
        for relocation in section.iter_relocations():
            if relocation.entry["r_offset"] != place:
                continue
            kind, addend = relocation.entry["r_info_type"], relocation.entry["r_addend"]
            if kind == relative:
                return addend
            if kind == of_symbol:
                return symbols.get_symbol(relocation.entry["r_info_sym"]).entry["st_value"] + addend
    # RELR, which is without addends, leaves them in place.
    return None


def _bytes(file: "ELFFile", address: int, count: int) -> bytes:
    """What the file has for this address of memory, as far as it has it."""
    for segment in islice(file.iter_segments(), _MOST):
        header = segment.header
        inside = address - header["p_vaddr"]
        if header["p_type"] == "PT_LOAD" and 0 <= inside < header["p_filesz"]:
            file.stream.seek(header["p_offset"] + inside)
            return file.stream.read(min(count, header["p_filesz"] - inside))
    return b""
