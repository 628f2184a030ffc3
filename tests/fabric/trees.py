"""Synthetic hosts and images: folders with small shared objects, devices, and a loader's cache, made for a test."""

import platform
import re
import shutil
import struct
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from muster.entrypoint.fabric import find, stage
from muster.entrypoint.fabric.proof import Image, Trace
from muster.entrypoint.fabric.stage import FabricPlan
from muster.entrypoint.sites.schema import Context, Devices, Fabric, Fact, Libraries, Site
from tests.clusters.requirements import refuse

FOREIGN = 183 if platform.machine() == "x86_64" else 62
"""Another architecture than this one, by ELF's number: aarch64, or x86-64."""
CACHE_FLAGS = {"x86_64": 0x0303, "aarch64": 0x0A03}
"""An entry's flags in the loader's cache by architecture: an ELF file for glibc."""


def fact(*values: str) -> Fact[tuple[str, ...]]:
    """A value of a profile."""
    return Fact(value=values, source="test")


def fabric(
    title: str = "a fabric", net: str | None = None, recognise: Sequence[str] = (), **libraries: object
) -> Fabric:
    """A profile; `libraries` are the values of its table of that name, as tuples."""
    facts = {name: Fact(value=value, source="test") for name, value in libraries.items()}
    return Fabric(
        title=title,
        status="documented",
        is_rdma=True,
        net=Fact(value=net, source="test") if net else None,
        devices=Devices(recognise=fact(*recognise)),
        libraries=Libraries(**facts),
    )


def planned(
    host: Path, image: Image, profile: Fabric, nodes: int = 2, libraries: Libraries | None = None
) -> FabricPlan:
    """The plan for a host and an image, by a profile and the `libraries` of a site."""
    site = Site(title="a site", scheduler="slurm", status="unverified", libraries=libraries) if libraries else None
    finding = find.find(host, "test", {"test": profile})
    return stage.make_plan(finding, profile, image, Context(nodes), site)


@dataclass(frozen=True)
class TreeImage(Image):
    """An image that is a tree: libraries that the loader finds outside of it, on this machine, count as missing."""

    root: Path = Path("/")

    def trace(self, names: Iterable[str], path: str | None = None) -> Trace:
        words, own = super().trace(names, path), super().trace(()).found
        inside = {name: file for name, file in words.found.items() if self.has(file)}
        # Every image has the libraries that Python itself needs.
        outside = [name for name in words.found if name not in inside and name not in own]
        lacking = {files: versions for files, versions in words.lacking.items() if self.has(files[0])}
        return Trace(inside, (*words.absent, *outside), lacking)

    def has(self, file: Path) -> bool:
        # The links to the host's libraries are in a temporary folder.
        return file.is_relative_to(self.root) or file.parent.name.startswith("muster-fabric-")


class Tree:
    """The root of a host or of an image, below a folder of a test."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._parts = root.with_name(f"{root.name}-parts")
        root.mkdir(parents=True, exist_ok=True)

    def at(self, path: str) -> Path:
        """The path on this machine for a path in the tree."""
        return self.root / path.lstrip("/")

    def file(self, path: str, content: str | bytes = "") -> Path:
        """Makes a file in the tree."""
        place = self.at(path)
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(content if isinstance(content, bytes) else content.encode())
        return place

    def link(self, path: str, target: str) -> None:
        """Makes a symbolic link in the tree."""
        place = self.at(path)
        place.parent.mkdir(parents=True, exist_ok=True)
        place.symlink_to(target)

    def library(
        self,
        path: str,
        soname: str | None = None,
        provides: Sequence[str] = (),
        needs: Mapping[str, Sequence[str]] | None = None,
        options: Sequence[str] = (),
        source: str = "",
    ) -> Path:
        """Makes a shared object: it defines a function for each symbol version that it `provides`, and points to those
        of the versions that it `needs` of others, by soname; of a library without versions, to its only function.

        Args:
            path: in the tree.
            soname: its own name; None leaves it without one.
            provides: symbol versions.
            needs: the versions that it needs of each soname.
            options: of ld.
            source: further lines for the assembler.
        """
        needs = needs or {}
        own = soname or path.rpartition("/")[2]
        for other, versions in needs.items():
            for function in (_function(other, version) for version in versions or [""]):
                source += f".data\n.balign 8\n.quad {function}\n"
        return self._linked(
            _defined(_function(own, version) for version in (*provides, "")) + source,
            self.at(path),
            *(["-soname", soname] if soname else []),
            *self._versions(own, provides),
            *options,
            *(str(self._stub(other, versions)) for other, versions in needs.items()),
        )

    def plugin(
        self,
        path: str,
        versions: Sequence[int] = (8,),
        name: str = "Libfabric",
        needs: Mapping[str, Sequence[str]] | None = None,
        options: Sequence[str] = (),
    ) -> Path:
        """Makes a network plugin for NCCL, which has a name but no functions."""
        structs = "".join(
            f".data\n.balign 8\n.globl ncclNetPlugin_v{version}\n.type ncclNetPlugin_v{version}, %object\n"
            f"ncclNetPlugin_v{version}: .quad .Lname\n.fill 20, 8, 0\n.size ncclNetPlugin_v{version}, 168\n"
            for version in versions
        )
        source = f'.section .rodata\n.Lname: .asciz "{name}"\n{structs}'
        return self.library(path, path.rpartition("/")[2], (), needs, options, source)

    def verbs(self, name: str, layer: str, *states: str, vendor: str = "0x15b3", node_type: str = "1: CA") -> None:
        """Makes a device of the kernel's verbs, with a port for each of `states`."""
        folder = f"/sys/class/infiniband/{name}"
        self.file(f"{folder}/device/vendor", f"{vendor}\n")
        self.file(f"{folder}/node_type", f"{node_type}\n")
        for port, state in enumerate(states, 1):
            self.file(f"{folder}/ports/{port}/state", f"{state}\n")
            self.file(f"{folder}/ports/{port}/link_layer", f"{layer}\n")
        number = len(list(self.at("/sys/class/infiniband").iterdir())) - 1
        self.file(f"/sys/class/infiniband_verbs/uverbs{number}/ibdev", f"{name}\n")
        self.file(f"/dev/infiniband/uverbs{number}")

    def cache(self, libraries: Mapping[str, str], hwcap: int = 0) -> None:
        """Makes the tree's /etc/ld.so.cache, with these paths by soname."""
        flags = CACHE_FLAGS[platform.machine()]
        self.file("/etc/ld.so.cache", cache_bytes([(name, path, flags, hwcap) for name, path in libraries.items()]))

    def as_image(self) -> Image:
        """The tree as an image, in which the loader searches two folders."""
        folders = ":".join(str(self.at(folder)) for folder in ("/usr/lib64", "/usr/lib"))
        return TreeImage({"LD_LIBRARY_PATH": folders}, root=self.root)

    def _stub(self, soname: str, versions: Sequence[str]) -> Path:
        """A library to link with: the real one may be anywhere, and have other versions."""
        path = self._parts / "-".join([soname, *versions]) / soname
        if path.exists():
            return path
        functions = _defined(_function(soname, version) for version in versions or [""])
        return self._linked(functions, path, "-soname", soname, *self._versions(soname, versions))

    def _linked(self, source: str, path: Path, *options: str) -> Path:
        """Assembles and links `path`, a shared object of data alone, so that the source suits every architecture."""
        if shutil.which("as") is None or shutil.which("ld") is None:
            refuse("missing programs: as, ld; fix: apt-get install --no-install-recommends binutils")
        path.parent.mkdir(parents=True, exist_ok=True)
        self._parts.mkdir(parents=True, exist_ok=True)
        made = self._parts / "last.o"
        source += '.section .note.GNU-stack,"",%progbits\n'
        subprocess.run(["as", "-o", made, "-"], input=source, text=True, check=True, timeout=240)
        flags = ["-shared", "--no-as-needed", "--allow-shlib-undefined"]
        subprocess.run(["ld", *flags, "-o", path, made, *options], check=True, timeout=240)
        return path

    def _versions(self, soname: str, versions: Sequence[str]) -> list[str]:
        if not versions:
            return []
        script = self._parts / f"{'-'.join([soname, *versions])}.map"
        script.parent.mkdir(parents=True, exist_ok=True)
        blocks = [
            f"{version.rpartition('@')[2]} {{ global: {_function(soname, version)}; }};\n" for version in versions
        ]
        script.write_text("".join(blocks))
        return [f"--version-script={script}"]


def _function(soname: str, version: str) -> str:
    """The name of a library's function for a version: FAB_1.0, or function@FAB_1.0, which names a real function."""
    if "@" in version:
        return version.partition("@")[0]
    return re.sub(r"\W", "_", f"{soname}_{version}")


def _defined(functions: Iterable[str]) -> str:
    return ".text\n" + "".join(f".globl {name}\n.type {name}, %function\n{name}: .quad 0\n" for name in functions)


def cache_bytes(entries: Sequence[tuple[str, str, int, int]], *, in_old: bool = False) -> bytes:
    """A cache of glibc's loader: soname, path, flags and hwcap of each entry; with `in_old` inside the old format."""
    head = 48 + 24 * len(entries)
    strings, table = b"", b""
    for name, path, flags, hwcap in entries:
        key = head + len(strings)
        strings += name.encode() + b"\0"
        table += struct.pack("=iIIIQ", flags, key, head + len(strings), 0, hwcap)
        strings += path.encode() + b"\0"
    new = struct.pack("=20sII5I", b"glibc-ld.so.cache1.1", len(entries), len(strings), 2, 0, 0, 0, 0) + table + strings
    if not in_old:
        return new
    old = struct.pack("=11sxI", b"ld.so-1.7.0", len(entries)) + b"".join(
        struct.pack("=iII", flags, 0, 0) for _, _, flags, _ in entries
    )
    return old + b"\0" * (-len(old) % 8) + new


def as_machine(path: Path, machine: int) -> Path:
    """Writes another architecture into a shared object's header: 183 is aarch64. Its code stays the same."""
    data = bytearray(path.read_bytes())
    data[18:20] = struct.pack("<H", machine)
    path.write_bytes(data)
    return path


def as_weak(path: Path) -> Path:
    """Marks all symbol versions that a shared object needs as weak: they may be missing."""
    from elftools.elf.elffile import ELFFile

    data = bytearray(path.read_bytes())
    with path.open("rb") as file:
        section = next(ELFFile(file).iter_sections("SHT_GNU_verneed"))
    need, count = section["sh_offset"], section["sh_info"]
    for _ in range(count):
        _, versions, _, first, following = struct.unpack_from("=HHIII", data, need)
        version = need + first
        for _ in range(versions):
            struct.pack_into("=H", data, version + 4, 2)
            version += struct.unpack_from("=I", data, version + 12)[0]
        need += following
    path.write_bytes(data)
    return path


def links(folder: Path, host: Path, injected: Mapping[str, str]) -> Path:
    """A folder of links to the host's files, by name: what a container would get."""
    folder.mkdir(parents=True)
    for name, path in injected.items():
        (folder / name).symlink_to(host / path.lstrip("/"))
    return folder


def opened(name: str, *folders: Path) -> str:
    """The loader's error as a new process opens a library and all that it needs, from these folders; or empty."""
    code = "import ctypes, sys\ntry:\n ctypes.CDLL(sys.argv[1], mode=2)\nexcept OSError as error:\n print(error)"
    answer = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code, name],
        env={"LD_LIBRARY_PATH": ":".join(map(str, folders))},
        capture_output=True,
        text=True,
        timeout=240,
        check=True,
    )
    return answer.stdout.strip()
