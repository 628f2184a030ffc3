"""A home folder, a user name and a temporary folder for a process whose container provides none.

    docker run --user 1234      HOME=/, and /etc/passwd has no line for 1234: nothing can be kept in ~/.cache, and
                                `getpass.getuser()` raises KeyError (torch 2.15's compiler knows that, others don't)
    docker run --read-only      no temporary folder, unless --tmpfs gives one; /dev/shm can be written to

With these set, caches need no variables of their own. Seen with torch 2.15: its hub keeps files in ~/.cache/torch,
its compiler and Triton in torchinductor_USER in the temporary folder.
"""

import os
import pwd
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from muster.entrypoint.environment import Environment
from muster.entrypoint.launch.program import Additions, Folder
from muster.errors import MusterError

SHARED_MEMORY = Path("/dev/shm")
TEMPORARY = (Path("/tmp"), Path("/var/tmp"))

# Python looks them up in this order: `getpass.getuser`, `tempfile.gettempdir`.
_NAMES = ("LOGNAME", "USER", "LNAME", "USERNAME")
_FOLDERS = ("TMPDIR", "TEMP", "TMP")


def temporary_folders(env: Mapping[str, str]) -> list[Path]:
    """The folders for temporary files that can be written to, in Python's order; shared memory is the last resort."""
    named = [Path(env[name]).absolute() for name in _FOLDERS if env.get(name)]
    return [folder for folder in (*named, *TEMPORARY, SHARED_MEMORY) if _is_writable(folder)]


def find(env: Environment) -> Additions:
    """The variables and folders that this process lacks in its container.

    Raises:
        MusterError: no folder at all can be written to.
    """
    uid, entry = os.getuid(), None
    with suppress(KeyError):
        entry = pwd.getpwuid(uid)
    wanted: dict[str, str] = {}
    notes: list[str] = []
    temporary = next(iter(temporary_folders(env)), None)
    if temporary == SHARED_MEMORY and not any(Path(env.get(name, "")) == temporary for name in _FOLDERS):
        wanted["TMPDIR"] = str(SHARED_MEMORY)
        notes.append(f"no temporary folder can be written to: TMPDIR={SHARED_MEMORY}; a larger one: --tmpfs /tmp")
    if entry is None and not any(env.get(name) for name in _NAMES):
        wanted |= {"USER": str(uid), "LOGNAME": str(uid)}
    home = env.get("HOME") or (entry.pw_dir if entry else "")
    if home and home != "/" and _is_writable(Path(home)):
        return Additions(wanted, tuple(notes))
    if temporary is None:
        raise MusterError(
            "neither HOME nor any temporary folder can be written to",
            seen=f"HOME={env.get('HOME', '')} TMPDIR={env.get('TMPDIR', '')} as uid {uid}",
            fix="docker run --tmpfs /tmp; or HOME=FOLDER TMPDIR=FOLDER, where this user may write",
        )
    folder = temporary / f"muster-home-{uid}"
    wanted["HOME"] = str(folder)
    notes.append(f"HOME={folder}, as {home or 'none'} is no home that can be written to")
    private = Folder(folder, "HOME=FOLDER, one that this user may write to", is_private=True)
    return Additions(wanted, tuple(notes), folders=(private,))


def _is_writable(folder: Path) -> bool:
    # Asks the kernel, so that a read-only mount counts too. Path.is_dir is an OSError where this user may not look.
    return os.path.isdir(folder) and os.access(folder, os.W_OK | os.X_OK)
