"""A host's root, mounted somewhere: its paths as the host itself would read them."""

import fnmatch
import os
import stat
from collections.abc import Callable
from pathlib import Path, PurePosixPath

from train.errors import one_line

# As many as the kernel follows. Source: https://man7.org/linux/man-pages/man7/path_resolution.7.html
MAX_LINKS = 40
_MAX_TEXT = 1 << 20


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
