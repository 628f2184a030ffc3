"""The dynamic loader of this image: what it says to libraries of the host.

    trace    LD_TRACE_LOADED_OBJECTS, as ldd does: what is found where, what is not, whose symbol versions are missing
    opened   dlopen in a process of its own, which a library may end or hold

Source: https://man7.org/linux/man-pages/man8/ld.so.8.html
"""

import functools
import importlib.util
import os
import re
import shlex
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from muster.entrypoint import homes
from muster.entrypoint.fabric.libraries import NCCL, loader_cache
from muster.errors import MusterError

TIMEOUT_S = 60.0
FIX = "muster fabric check tells more; to start without the host's libraries, over TCP: --fabric tcp"
FIX_FOLDER = "TMPDIR=FOLDER, one that this user may write to; or --fabric off"

# What takes these in LD_LIBRARY_PATH and LD_PRELOAD for separators or for words of its own: the loader, and NCCL the
# comma.
UNUSABLE = re.compile(r"[\s:;,$]")

# As NCCL opens its plugins.
_OPEN = """
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

_VERSION = """
import ctypes, sys
number = ctypes.c_int()
code = ctypes.CDLL(sys.argv[1]).ncclGetVersion(ctypes.byref(number))
print("answer", code, number.value)
"""

# 	libfabric.so.1 => /lib/x86_64-linux-gnu/libfabric.so.1 (0x00007f2b950fa000)
# 	/lib64/ld-linux-x86-64.so.2 (0x00007f2b95109000)
_FOUND = re.compile(r"\t(?:(\S.*?) => )?(/.*) \(0x[0-9a-f]+\)")
# 	libpsm2.so.2 => not found
_NOT_FOUND = re.compile(r"\t(\S.*) => not found")
# ERROR: ld.so: object 'libcxi.so.1' from LD_PRELOAD cannot be preloaded (cannot open shared object file): ignored.
_NOT_PRELOADED = re.compile(r"ERROR: ld\.so: object '(.*)' from LD_PRELOAD cannot be preloaded .*")
# python: /lib/libfabric.so.1: version `FABRIC_1.7' not found (required by /tmp/links/libnccl-net.so)
_LACKING = re.compile(r"(/.*): version `(.*)' not found \(required by (/.*)\)")


@dataclass(frozen=True)
class Lacking:
    """A symbol version that a library lacks, and the library that asks it for it; both as the loader found them."""

    library: Path
    version: str
    required_by: Path


@dataclass(frozen=True)
class Trace:
    """The dynamic loader's words.

    Attributes:
        found: by name, the file that a library is.
        absent: the names that it finds nowhere, or in no file that it can load.
        lacking: the symbol versions that are missing.
    """

    found: Mapping[str, Path]
    absent: tuple[str, ...]
    lacking: tuple[Lacking, ...]


@dataclass(frozen=True)
class Image:
    """What the host's libraries come into: this image, as a trainer in it finds its libraries.

    Attributes:
        env: the trainer's variables.
        torch: torch's library for NVIDIA's GPUs: what it needs is loaded before NCCL opens a plugin, from folders in
            which the loader does not look by itself.
        root: what is not below it is not there.
    """

    env: Mapping[str, str]
    torch: Path | None = None
    root: Path = Path("/")

    @classmethod
    def here(cls, env: Mapping[str, str]) -> "Image":
        """This image, with a trainer's variables."""
        package = installed_torch()
        library = package / "lib/libtorch_cuda.so" if package else None
        return cls(env, library if library and library.is_file() else None)

    def trace(self, names: Iterable[str], folder: Path | None = None, path: str | None = None) -> Trace:
        """What the loader finds for libraries and all that they need, in a process that has loaded torch.

        Args:
            names: sonames or paths.
            folder: one with links to libraries of the host, which are there as the image's own are.
            path: LD_LIBRARY_PATH; None takes the trainer's.

        Raises:
            MusterError: one of the libraries ends the loader, or it takes too long.
        """
        path = self.library_path if path is None else path
        names = list(names)
        found = trace(names, path)
        preloaded = self.loaded_by_torch(found.absent)
        if preloaded:
            found = trace([*preloaded, *names], path)
        if self.root == Path("/"):
            return found
        inside = {name: file for name, file in found.found.items() if self._has(file, folder)}
        outside = [name for name in found.found if name not in inside]
        return Trace(
            inside,
            (*found.absent, *outside),
            tuple(each for each in found.lacking if self._has(each.library, folder)),
        )

    @property
    def library_path(self) -> str:
        """LD_LIBRARY_PATH of the trainer."""
        return self.env.get("LD_LIBRARY_PATH", "")

    def loaded_by_torch(self, names: Iterable[str]) -> list[str]:
        """The paths of those of `names` that are libraries which torch loads."""
        names = list(names)
        if not names or not self.torch:
            return []
        found = _needs_of(self.torch, self.library_path)
        return [str(found[name]) for name in names if name in found]

    def users(self) -> list[Path]:
        """The libraries that programs of the image find by name, Python's own modules, and torch's."""
        cached = loader_cache(self.root / "etc/ld.so.cache")
        found = [Path(path) for paths in cached.values() for path in paths] if isinstance(cached, dict) else []
        found += [self.torch] if self.torch else []
        folders = [Path(folder) for folder in self.library_path.split(os.pathsep) if folder]
        if self.root == Path("/"):
            folders.append(Path(str(sysconfig.get_config_var("DESTSHARED"))))
        return [*found, *(path for folder in folders for path in sorted(folder.glob("*.so*")) if path.is_file())]

    def shown(self, file: Path) -> str:
        """The path of a file of the image, as the image itself has it."""
        return f"/{file.relative_to(self.root)}" if file.is_relative_to(self.root) else str(file)

    def _has(self, file: Path, folder: Path | None) -> bool:
        return file.is_relative_to(self.root) or (folder is not None and file.is_relative_to(folder))


def on_path(folder: Path, path: str, winners: Iterable[str]) -> str:
    """The library path `path` with `folder` last, or first where another folder on it has one of `winners`.

    What --nv, forward compatibility or the user put there stays before it.
    """
    others = [element for element in path.split(os.pathsep) if element not in ("", str(folder))]
    is_first = any(os.path.lexists(Path(element) / name) for element in others for name in winners)
    return os.pathsep.join([str(folder), *others] if is_first else [*others, str(folder)])


def temporary_folder(env: Mapping[str, str]) -> Path:
    """The first folder that can be written to, and that can stand in a library path.

    Raises:
        MusterError: there is none.
    """
    named = [Path(env[name]).absolute() for name in ("TMPDIR", "TEMP", "TMP") if env.get(name)]
    for folder in (*named, *homes.TEMPORARY, homes.SHARED_MEMORY):
        if os.path.isdir(folder) and os.access(folder, os.W_OK | os.X_OK) and not UNUSABLE.search(str(folder)):
            return folder
    raise MusterError(
        "no temporary folder can be written to, for links to the host's libraries",
        seen=f"TMPDIR={env.get('TMPDIR', '')} as uid {os.getuid()}",
        fix=FIX_FOLDER,
    )


def installed_torch() -> Path | None:
    """The folder of the package torch, which is not loaded; None without one."""
    spec = importlib.util.find_spec("torch")
    return Path(spec.origin).parent if spec and spec.origin else None


def trace(names: Sequence[str], library_path: str, timeout_s: float = TIMEOUT_S) -> Trace:
    """What the loader finds for libraries and all that they need; none of their code runs, nor does this Python.

    Raises:
        MusterError: one of the libraries ends the loader, or it takes too long.
    """
    loadable = [name for name in names if not UNUSABLE.search(name)]
    env = {"LD_TRACE_LOADED_OBJECTS": "1", "LD_LIBRARY_PATH": library_path, "LD_PRELOAD": " ".join(loadable)}
    done = run_python("", [], env, timeout_s)
    if isinstance(done, str) or done.returncode < 0:
        said = done if isinstance(done, str) else last_words(done)
        raise MusterError(
            "the dynamic loader can't read the host's network libraries", seen=f"{said}: {' '.join(loadable)}", fix=FIX
        )
    found: dict[str, Path] = {}
    absent: dict[str, None] = {}
    lacking: dict[Lacking, None] = {}
    for line in done.stdout.splitlines():
        if match := _NOT_FOUND.fullmatch(line):
            absent[match[1]] = None
        elif match := _FOUND.fullmatch(line):
            found[match[1] or Path(match[2]).name] = Path(match[2])
    for line in done.stderr.splitlines():
        if match := _NOT_PRELOADED.fullmatch(line):
            absent[match[1]] = None
        elif match := _LACKING.fullmatch(line.removeprefix(f"{sys.executable}: ")):
            lacking[Lacking(Path(match[1]), match[2], Path(match[3]))] = None
    return Trace(found, tuple(absent), tuple(lacking))


@functools.cache
def _needs_of(library: Path, library_path: str) -> Mapping[str, Path]:
    return trace([str(library)], library_path).found


def prove(folder: Path, names: Sequence[str], image: Image, timeout_s: float = TIMEOUT_S) -> None:
    """Returns if all of `names` in a folder can be opened in the image, the first one first.

    Raises:
        MusterError: one can't, in the loader's own words; or it takes longer than `timeout_s`.
    """
    if not names:
        return
    paths = [str(folder / name) for name in names]
    # Torch itself is not loaded, as that takes seconds: only those of its libraries which are needed.
    loaded = image.loaded_by_torch(trace(paths, image.library_path, timeout_s).absent)
    wrong = problem(paths, image.env, timeout_s, loaded)
    if wrong:
        what = "NCCL" if names[0] == NCCL else "network libraries"
        raise MusterError(f"the host's {what} can't be loaded here", seen=wrong, fix=FIX)


def problem(
    libraries: Sequence[str], env: Mapping[str, str], timeout_s: float = TIMEOUT_S, loaded: Sequence[str] = ()
) -> str | None:
    """Why one of `libraries` can't be opened with the variables `env` after `loaded`; None where all can."""
    done = run_python(_OPEN, [str(len(loaded)), *loaded, *libraries], env, timeout_s)
    if isinstance(done, str):
        return f"{done}: {shlex.quote(libraries[0])}"
    return last_words(done) if done.returncode else None


def nccl_version(library: Path, env: Mapping[str, str], timeout_s: float = TIMEOUT_S) -> tuple[int, int, int]:
    """What the NCCL in the file `library` says of itself, with the variables `env`.

    Raises:
        MusterError: it can't be asked.
    """
    done = run_python(_VERSION, [str(library)], env, timeout_s)
    said = done if isinstance(done, str) else last_words(done)
    found = None if isinstance(done, str) else answer(done)
    if found and found[0] == 0:
        # 23007 is 2.30.7; up to 2.8 it was 2804 for 2.8.4.
        unit = 10000 if found[1] >= 10000 else 1000
        return found[1] // unit, found[1] % unit // 100, found[1] % 100
    raise MusterError("an NCCL does not tell its version", seen=f"{library}: {said}", fix="leave --host-nccl out")


def run_python(
    program: str, words: Sequence[str], env: Mapping[str, str], timeout_s: float
) -> "subprocess.CompletedProcess[str] | str":
    """A program of Python's, ended; or why it did not end by itself, or could not be started."""
    try:
        return subprocess.run(
            [sys.executable, "-I", "-S", "-c", program, *words], env=dict(env), stdin=subprocess.DEVNULL,
            capture_output=True, text=True, errors="replace", timeout=timeout_s, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return f"no answer within {timeout_s:g} s"
    except OSError as reason:
        return str(reason)


def answer(done: "subprocess.CompletedProcess[str]") -> tuple[int, int] | None:
    """The two numbers after "answer" in the last line: a library may have said something before. None without."""
    words = (done.stdout.splitlines() or [""])[-1].split()
    is_whole = done.returncode == 0 and len(words) == 3 and words[0] == "answer"
    return (int(words[1]), int(words[2])) if is_whole else None


def last_words(done: "subprocess.CompletedProcess[str]") -> str:
    """Why a process that opened a library failed, as it said itself."""
    said = done.stderr.strip().splitlines()
    if done.returncode < 0:
        return f"a process that opened it was ended by {signal.Signals(-done.returncode).name}"
    return said[-1] if said else f"a process that opened it ended with code {done.returncode}"
