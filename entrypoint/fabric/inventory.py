"""What this image has of libraries: their symbol versions, and who needs which of them.

It is written once, as the image is built: `python -m entrypoint.fabric.inventory`. Elsewhere it is found anew.
"""

import json
import platform
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from entrypoint import ROOT
from entrypoint.fabric import elf
from entrypoint.fabric.hostroot import HostRoot
from entrypoint.fabric.loader import MACHINES, Loader
from entrypoint.fabric.sides import is_images

FILE = ROOT / "libraries.json"
PLUGINS = tuple(range(6, 13))
"""What NCCL 2.30 opens, as its library tells; for an image without NCCL."""


@dataclass(frozen=True)
class Copy:
    """The image's copy of a library: where it is, and the symbol versions that it provides."""

    path: str
    versions: frozenset[str]


@dataclass(frozen=True)
class Inventory:
    """What an image has.

    Attributes:
        machine: its architecture as ELF names it: EM_X86_64.
        libraries: by soname.
        users: for each soname, the files that need symbol versions of it, and which.
        plugins: N of each ncclNetPlugin_vN that its NCCL opens.
    """

    machine: str
    libraries: Mapping[str, Copy]
    users: Mapping[str, Mapping[str, frozenset[str]]]
    plugins: tuple[int, ...] = PLUGINS


def load(root_of_image: Path = Path("/")) -> Inventory:
    """What the image at a root has: as its build wrote it down, else as it is found there, in seconds."""
    written = root_of_image / FILE.relative_to("/")
    try:
        return _read(json.loads(written.read_text()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return found(root_of_image)


def found(root_of_image: Path = Path("/")) -> Inventory:
    """What the image at a root has, looked at anew."""
    root = HostRoot(root_of_image)
    loader = Loader(root)
    libraries: dict[str, Copy] = {}
    users: dict[str, dict[str, frozenset[str]]] = {}
    for path, is_found in _files(root, loader):
        library = loader.at(path)
        if library is None or not loader.fits(library):
            continue
        if is_found:
            libraries.setdefault(library.elf.soname, Copy(library.path, library.elf.versions_provided))
        for soname, versions in library.elf.versions_needed.items():
            if versions:
                users.setdefault(soname, {})[library.path] = versions
    # Nobody takes the place of the C library: who needs it need not be known.
    kept = {soname: by for soname, by in users.items() if soname in libraries and not is_images(soname)}
    nccl = libraries.get("libnccl.so.2")
    plugins = elf.opened_plugins(root.path(nccl.path)) if nccl else ()
    return Inventory(MACHINES.get(platform.machine(), platform.machine()), libraries, kept, plugins or PLUGINS)


def written(inventory: Inventory) -> str:
    """The inventory as a file: the same bytes for the same image."""
    value = {
        "machine": inventory.machine,
        "libraries": {name: [copy.path, sorted(copy.versions)] for name, copy in inventory.libraries.items()},
        "users": {
            name: {path: sorted(versions) for path, versions in users.items()}
            for name, users in inventory.users.items()
        },
        "plugins": inventory.plugins,
    }
    return json.dumps(value, sort_keys=True, separators=(",", ":")) + "\n"


def _read(value: Any) -> Inventory:
    libraries = {
        str(name): Copy(str(path), frozenset(versions)) for name, (path, versions) in value["libraries"].items()
    }
    users = {
        str(name): {str(path): frozenset(map(str, versions)) for path, versions in by.items()}
        for name, by in value["users"].items()
    }
    return Inventory(str(value["machine"]), libraries, users, tuple(map(int, value["plugins"])))


def _files(root: HostRoot, loader: Loader) -> Iterator[tuple[str, bool]]:
    """All files that may be libraries, and whether a program finds them by name."""
    for path in loader.cache.values():
        yield path, True
    for folder in loader.folders:
        for path in _libraries_in(root, folder):
            yield path, True
    for folder in _wheels(root):
        for path in _libraries_in(root, folder):
            yield path, True
    for folder in loader.folders:
        # Providers that a library opens by itself lie in a folder of its name.
        for below in root.names(folder):
            if below.startswith("lib") and root.folder(f"{folder}/{below}"):
                for path in _libraries_in(root, f"{folder}/{below}"):
                    yield path, False
    # Python's own modules; a virtual environment has none.
    for path in _libraries_in(root, str(sysconfig.get_config_var("DESTSHARED"))):
        yield path, False
    yield sys.executable, False


def _libraries_in(root: HostRoot, folder: str) -> list[str]:
    return [f"{folder}/{name}" for name in root.names(folder) if name.endswith(".so") or ".so." in name]


def _wheels(root: HostRoot) -> list[str]:
    packages = sysconfig.get_path("platlib")
    return [path for pattern in ("torch/lib", "nvidia/*/lib") for path in root.glob(f"{packages}/{pattern}")]


def main() -> None:
    """Writes the file into the image."""
    FILE.write_text(written(found()))


if __name__ == "__main__":
    main()
