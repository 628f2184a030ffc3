"""A home, a name and a temporary folder for a process in a container that gave it none.

    docker run --user 1234      HOME=/, and /etc/passwd has no line for 1234: nothing can be kept in ~/.cache, and
                                `getpass.getuser()` raises KeyError (torch 2.15's compiler knows that, others don't)
    docker run --read-only      no temporary folder, unless --tmpfs gives one; /dev/shm can be written to

With these right, caches need no variables of their own. Seen with torch 2.15: its hub keeps files in ~/.cache/torch,
its compiler and Triton in torchinductor_USER in the temporary folder.
"""

import os
import pwd
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from muster.entrypoint.environment import Environment
from muster.errors import MusterError

SHARED_MEMORY = Path("/dev/shm")
TEMPORARY = (Path("/tmp"), Path("/var/tmp"))

FIX = "docker run --tmpfs /tmp; or HOME=FOLDER TMPDIR=FOLDER, where this user may write"

# Python looks them up in this order: `getpass.getuser`, `tempfile.gettempdir`.
_NAMES = ("LOGNAME", "USER", "LNAME", "USERNAME")
_FOLDERS = ("TMPDIR", "TEMP", "TMP")


@dataclass(frozen=True)
class Home:
    """What a process lacks.

    Attributes:
        variables: those to set.
        notes: one line for each thing that the user should know.
        folder: to be made before the start; None where nothing is.
    """

    variables: Mapping[str, str]
    notes: tuple[str, ...] = ()
    folder: Path | None = None


def plan(env: Environment) -> Home:
    """What the process of `env` lacks in its container; nothing outside of one, and for a recording.

    Raises:
        MusterError: no folder at all can be written to.
    """
    if not env.is_live or env.engine is None:
        return Home({})
    uid = os.getuid()
    entry = _entry(uid)
    wanted: dict[str, str] = {}
    notes: list[str] = []
    folders = [*(Path(env[name]) for name in _FOLDERS if env.get(name)), *TEMPORARY]
    temporary = next((folder for folder in folders if _is_writable(folder)), None)
    if temporary is None and _is_writable(SHARED_MEMORY):
        temporary = SHARED_MEMORY
        wanted["TMPDIR"] = str(SHARED_MEMORY)
        notes.append(f"no temporary folder can be written to: TMPDIR={SHARED_MEMORY}; a larger one: --tmpfs /tmp")
    if entry is None and not any(env.get(name) for name in _NAMES):
        wanted |= {"USER": str(uid), "LOGNAME": str(uid)}
    home = env.get("HOME") or (entry.pw_dir if entry else "")
    if home and home != "/" and _is_writable(Path(home)):
        return Home(wanted, tuple(notes))
    if temporary is None and _is_writable(Path(".")):
        # Python takes that for its temporary files, but it is no place for a home.
        return Home(wanted, (*notes, f"neither HOME nor a temporary folder can be written to: {FIX}"))
    if temporary is None:
        raise MusterError(
            "neither HOME nor any temporary folder can be written to",
            seen=f"HOME={env.get('HOME', '')} TMPDIR={env.get('TMPDIR', '')} as uid {uid}",
            fix=FIX,
        )
    folder = temporary / f"muster-home-{uid}"
    wanted["HOME"] = str(folder)
    notes.append(f"HOME={folder}, as {home or 'none'} is no home that can be written to")
    return Home(wanted, tuple(notes), folder)


def make(folder: Path) -> None:
    """Makes the private folder, if it is not there.

    Raises:
        MusterError: it can't be made, or something else has its name: others may write there too.
    """
    wrong = ""
    try:
        # Neither this nor the check follows a link that somebody may have put there.
        folder.mkdir(mode=0o700)
    except FileExistsError:
        found = folder.lstat()
        is_private = stat.S_ISDIR(found.st_mode) and stat.S_IMODE(found.st_mode) == 0o700
        if not is_private or found.st_uid != os.getuid():
            wrong = "the folder that was to be HOME belongs to somebody else"
    except OSError as reason:
        wrong = f"no folder can be made for HOME: {reason.strerror}"
    if wrong:
        raise MusterError(wrong, seen=str(folder), fix="HOME=FOLDER, one that this user may write to")


def _entry(uid: int) -> pwd.struct_passwd | None:
    try:
        return pwd.getpwuid(uid)
    except KeyError:
        return None


def _is_writable(folder: Path) -> bool:
    # Asks the kernel, so that a read-only mount counts too.
    return folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)
