"""A host as its mounted root shows it: its files and its fabric's devices.

Everything is read below the folder where the root is mounted; no program of the host is run.
"""

import fnmatch
import os
import re
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from muster.errors import one_line

# As many as the kernel follows. Source: https://man7.org/linux/man-pages/man7/path_resolution.7.html
MAX_LINKS = 40
_MAX_TEXT = 1 << 20

# PCI's vendor number of Amazon. Source: https://github.com/amzn/amzn-drivers (kernel/linux/efa/src/efa_main.c)
_AMAZON = "0x1d0f"
_LINK_LAYERS = {"InfiniBand": "infiniband", "Ethernet": "roce"}


class HostRoot:
    """The root folder of a host, mounted at `root`. Nothing above that folder is ever reached through a link.

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
        """Where a resolved path of the host is on this side."""
        return self.root / resolved.lstrip("/")

    def resolve(self, path: str) -> str | None:
        """The host's path after all links, as in a chroot: `..` and absolute links stay below the root.

        None where it leads nowhere, in circles, or where this user may not look.
        """
        found: list[str] = []
        parts = _parts(path)
        links = 0
        while parts:
            part = parts.pop(0)
            if part == "..":
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
        if not _is_utf8(resolved):
            self.note(f"left out: a name that is no UTF-8, {resolved!a}")
            return None
        return resolved

    def file(self, path: str) -> str | None:
        """The host's path after all links, of a regular file; None for anything else."""
        resolved = self.resolve(path)
        return resolved if resolved and self._is(resolved, stat.S_ISREG) else None

    def folder(self, path: str) -> str | None:
        """The host's path after all links, of a folder; None for anything else."""
        resolved = self.resolve(path)
        return resolved if resolved and self._is(resolved, stat.S_ISDIR) else None

    def exists(self, path: str) -> bool:
        """Whether the host has something there, links followed."""
        return self.resolve(path) is not None

    def names(self, folder: str) -> list[str]:
        """The names in a folder of the host, sorted; those that are no UTF-8 are left out, with a note."""
        resolved = self.folder(folder)
        if resolved is None:
            return []
        try:
            names = sorted(os.listdir(self.path(resolved)))
        except OSError:
            return []
        readable = [name for name in names if _is_utf8(name)]
        if len(readable) < len(names):
            self.note(f"left out of {resolved}: names that are no UTF-8, {len(names) - len(readable)} of them")
        return readable

    def glob(self, pattern: str) -> list[str]:
        """The host's paths that match, as it names them: `*`, `?` and `[...]` within a name. Sorted."""
        found = ["/"]
        for part in _parts(pattern):
            found = [path for folder in found for path in self._matching(folder, part)]
        return [path for path in found if path != "/"]

    def read_text(self, path: str) -> str | None:
        """What a file of the host says, without the spaces around it; None where it can't be read."""
        resolved = self.file(path)
        if resolved is None:
            return None
        try:
            with self.path(resolved).open("rb") as file:
                return file.read(_MAX_TEXT).decode(errors="replace").strip()
        except OSError:
            # A port that is down refuses to tell its speed.
            return None

    def _matching(self, folder: str, part: str) -> list[str]:
        if not set("*?[") & set(part):
            path = str(PurePosixPath(folder) / part)
            return [path] if self.exists(path) else []
        matching = [name for name in self.names(folder) if fnmatch.fnmatchcase(name, part)]
        hidden = part.startswith(".")
        paths = [str(PurePosixPath(folder) / name) for name in matching if hidden or not name.startswith(".")]
        return [path for path in paths if self.exists(path)]

    def _is(self, resolved: str, kind: Callable[[int], bool]) -> bool:
        try:
            mode = os.stat(self.path(resolved), follow_symlinks=False).st_mode
        except (OSError, ValueError):
            return False
        return kind(mode)


def _parts(path: str) -> list[str]:
    return [part for part in path.split("/") if part not in ("", ".")]


def _is_utf8(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


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


def devices(root: HostRoot) -> tuple[Device, ...]:
    """All devices of fabrics, by kind and name."""
    found = [*_verbs(root), *_slingshot(root)]
    for name, kind in (("gdrdrv", "gdrcopy"), ("xpmem", "xpmem")):
        if root.exists(f"/dev/{name}"):
            found.append(Device(name, kind, f"/dev/{name}"))
    return tuple(found)


def _verbs(root: HostRoot) -> list[Device]:
    base = "/sys/class/infiniband"
    files = _character_devices(root)
    found: list[Device] = []
    for name in root.names(base):
        folder = f"{base}/{name}"
        ports = root.names(f"{folder}/ports")
        states = [_state(root.read_text(f"{folder}/ports/{port}/state")) for port in ports]
        state = "ACTIVE" if "ACTIVE" in states else next((state for state in states if state), "")
        kind = _verbs_kind(root, folder, ports, states)
        found.append(Device(name, kind, files.get(name, folder), state))
    return found


def _verbs_kind(root: HostRoot, folder: str, ports: list[str], states: list[str]) -> str:
    if root.read_text(f"{folder}/device/vendor") == _AMAZON:
        return "efa"
    if (root.read_text(f"{folder}/node_type") or "").endswith("RNIC"):
        return "iwarp"
    if folder.rpartition("/")[2].startswith("hfi1"):
        return "omnipath"
    # The active port tells, where there are several.
    ordered = sorted(zip(ports, states, strict=True), key=lambda port: port[1] != "ACTIVE")
    layers = [root.read_text(f"{folder}/ports/{port}/link_layer") or "" for port, _ in ordered]
    return next((_LINK_LAYERS[layer] for layer in layers if layer in _LINK_LAYERS), "unknown")


def _character_devices(root: HostRoot) -> dict[str, str]:
    """/dev/infiniband/uverbs0 by the device's name."""
    base = "/sys/class/infiniband_verbs"
    named = {root.read_text(f"{base}/{name}/ibdev") or "": f"/dev/infiniband/{name}" for name in root.names(base)}
    return {name: path for name, path in named.items() if name and root.exists(path)}


def _slingshot(root: HostRoot) -> list[Device]:
    names = {name for folder in ("/dev", "/sys/class/cxi", "/sys/class/cxi_user") for name in root.names(folder)}
    found: list[Device] = []
    for name in sorted(name for name in names if re.fullmatch(r"cxi[0-9]+", name)):
        paths = (f"/dev/{name}", f"/sys/class/cxi/{name}", f"/sys/class/cxi_user/{name}")
        found.append(Device(name, "slingshot", next(path for path in paths if root.exists(path) or path == paths[-1])))
    return found


def _state(text: str | None) -> str:
    # 4: ACTIVE
    return (text or "").rpartition(":")[2].strip()
