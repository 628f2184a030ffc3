"""Whether what was staged can really be opened: asked of the loader, in a process of its own, before the start."""

import shlex
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from entrypoint.fabric.stage import NCCL, Staging
from train.errors import MusterError

TIMEOUT_S = 60.0

# As NCCL opens its plugins.
OPEN = """
import ctypes, os, sys
count = int(sys.argv[1]) + 2
for path in sys.argv[2:count]:
    try:
        ctypes.CDLL(path)
    except OSError:
        # Who needs it says so.
        pass
for path in sys.argv[count:]:
    try:
        ctypes.CDLL(path, mode=os.RTLD_NOW | os.RTLD_LOCAL)
    except OSError as reason:
        sys.exit(f"{path}: {reason}")
"""

VERSION = """
import ctypes, sys
number = ctypes.c_int()
code = ctypes.CDLL(sys.argv[1]).ncclGetVersion(ctypes.byref(number))
print("answer", code, number.value)
"""

FIX = "muster fabric check tells more; to start without the host's libraries, over TCP: --fabric tcp"


def prove(
    staging: Staging,
    env: Mapping[str, str],
    names: Sequence[str],
    timeout_s: float = TIMEOUT_S,
    loaded: Sequence[str] = (),
) -> None:
    """Returns if all of `names` in the staging's folder can be opened with the variables `env`.

    Args:
        loaded: libraries that a trainer has loaded by then, by path.

    Raises:
        MusterError: one can't, in the loader's own words; or it takes longer than `timeout_s`.
    """
    paths = [str(staging.folder / name) for name in names]
    wrong = problem(paths, env, timeout_s, loaded) if names else None
    if wrong:
        what = "NCCL" if names[0] == NCCL else "network libraries"
        raise MusterError(f"the host's {what} can't be loaded here", seen=wrong, fix=FIX)


def problem(
    libraries: Sequence[str], env: Mapping[str, str], timeout_s: float = TIMEOUT_S, loaded: Sequence[str] = ()
) -> str | None:
    """Why one of `libraries` can't be opened with the variables `env` after `loaded`; None where all can."""
    done = _asked(OPEN, [str(len(loaded)), *loaded, *libraries], env, timeout_s, libraries[0])
    if isinstance(done, str):
        return done
    return _last_words(done) if done.returncode else None


def nccl_version(library: Path, env: Mapping[str, str], timeout_s: float = TIMEOUT_S) -> tuple[int, int, int]:
    """What the NCCL in the file `library` says of itself, with the variables `env`.

    Raises:
        MusterError: it can't be asked.
    """
    done = _asked(VERSION, [str(library)], env, timeout_s, str(library))
    said = done if isinstance(done, str) else _last_words(done)
    if not isinstance(done, str) and done.returncode == 0:
        words = (done.stdout.splitlines() or [""])[-1].split()
        if len(words) == 3 and words[:2] == ["answer", "0"]:
            number = int(words[2])
            # 23007 is 2.30.7; up to 2.8 it was 2804 for 2.8.4.
            unit = 10000 if number >= 10000 else 1000
            return number // unit, number % unit // 100, number % 100
    raise MusterError("an NCCL does not tell its version", seen=f"{library}: {said}", fix="leave --host-nccl out")


def _asked(
    program: str, words: Sequence[str], env: Mapping[str, str], timeout_s: float, first: str
) -> "subprocess.CompletedProcess[str] | str":
    command = [sys.executable, "-I", "-S", "-c", program, *words]
    try:
        return subprocess.run(
            command, env=dict(env), stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace",
            timeout=timeout_s, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return f"no answer within {timeout_s:g} s: {shlex.quote(first)}"
    except OSError as reason:
        return str(reason)


def _last_words(done: "subprocess.CompletedProcess[str]") -> str:
    said = done.stderr.strip().splitlines()
    if done.returncode < 0:
        return f"a process that opened it was ended by {signal.Signals(-done.returncode).name}"
    return said[-1] if said else f"a process that opened it ended with code {done.returncode}"
