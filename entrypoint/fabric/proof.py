"""The host's libraries that go into this image, chosen and tested by the image's own dynamic loader.

    trace      LD_TRACE_LOADED_OBJECTS, as ldd does: the files of libraries, absent libraries, missing symbol versions
    Closure    plugin, named libraries -> links in a temporary folder -> trace -> more links, and so on
                                                                      -> refusals: what is missing, and what needs it
    prove      dlopen in a separate process, which a library may crash or hang: nothing of the host runs before that

Source: https://man7.org/linux/man-pages/man8/ld.so.8.html
"""

import functools
import importlib.util
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from muster import processes
from muster.entrypoint.fabric.find import UNUSABLE, HostLibraries, Library, is_name, own_machine, values
from muster.entrypoint.launch import home
from muster.entrypoint.sites.schema import Libraries
from muster.errors import MusterError
from muster.units import by_numbers

TIMEOUT_S = 60.0
FIX = "muster fabric check shows more; to start without the host's libraries, over TCP: --fabric tcp"
FIX_FOLDER = "TMPDIR=FOLDER, one that this user may write to; or --fabric off"

_OF_LIBC = r"libc|libm|libmvec|libpthread|libdl|librt|libutil|libresolv|libanl|libnsl|libthread_db|libBrokenLocale"
# A process has one C library and one C++ runtime; and NCCL is the wheel's, which torch was built with. libnsl.so.2 and
# later are a separate project.
_IMAGES = re.compile(
    rf"(?!libnsl\.so\.[2-9])(({_OF_LIBC}|libstdc\+\+|libgcc_s|libnccl)\.so(\.[0-9.]+)?|libnss_.*|ld-linux.*|ld64?\.so.*)"
)
# These come with the driver, which the container's engine puts in place (--nv, --gpus).
_DRIVERS = re.compile(r"(libcuda|libnvidia-[^/]+|libnvcuvid|libcudadebugger)\.so(\.[0-9.]+)?")


def never_leaves_host(soname: str) -> bool:
    """Whether a library has to be the image's or the driver's, whatever the host has."""
    return bool(_IMAGES.fullmatch(soname) or _DRIVERS.fullmatch(soname))


# 	libfabric.so.1 => /lib/x86_64-linux-gnu/libfabric.so.1 (0x00007f2b950fa000)
# 	/lib64/ld-linux-x86-64.so.2 (0x00007f2b95109000)
_FOUND = re.compile(r"^\t(?:(\S.*?) => )?(/.*) \(0x[0-9a-f]+\)$", re.MULTILINE)
# 	libpsm2.so.2 => not found
_NOT_FOUND = re.compile(r"^\t(\S.*) => not found$", re.MULTILINE)
# ERROR: ld.so: object 'libcxi.so.1' from LD_PRELOAD cannot be preloaded (cannot open shared object file): ignored.
_NOT_PRELOADED = re.compile(r"^ERROR: ld\.so: object '(.*)' from LD_PRELOAD cannot be preloaded", re.MULTILINE)
# /usr/bin/python: /lib/libfabric.so.1: version `FABRIC_1.7' not found (required by /tmp/links/libnccl-net.so)
_LACKING = re.compile(
    rf"^(?:{re.escape(sys.executable)}: )?(/.*): version `(.*)' not found \(required by (/.*)\)$", re.MULTILINE
)


@dataclass(frozen=True)
class Trace:
    """The dynamic loader's report on some libraries and all that they need.

    Attributes:
        found: the file of each library, by its soname.
        absent: the sonames without a file, or without one that the loader can load.
        lacking: the missing symbol versions, by the paths of the file that lacks them and of the file that needs them.
    """

    found: Mapping[str, Path]
    absent: tuple[str, ...]
    lacking: Mapping[tuple[Path, Path], set[str]]

    def name_of(self, file: Path) -> str:
        """The soname under which the loader found a file."""
        return next((name for name, found in self.found.items() if found == file), file.name)


def trace(names: Sequence[str], library_path: str) -> Trace:
    """The loader's report on libraries and all that they need; it runs none of their code, and no Python.

    Raises:
        MusterError: one of the libraries crashes the loader, or it takes longer than TIMEOUT_S.
    """
    loadable = [name for name in names if not UNUSABLE.search(name)]
    env = {"LD_TRACE_LOADED_OBJECTS": "1", "LD_LIBRARY_PATH": library_path, "LD_PRELOAD": " ".join(loadable)}
    done = run_python("", [], env, TIMEOUT_S)
    if isinstance(done, str) or done.returncode < 0:
        reason = done if isinstance(done, str) else reason_of_end(done)
        wrong = "the dynamic loader can't read the host's network libraries"
        raise MusterError(wrong, seen=f"{reason}: {' '.join(loadable)}", fix=FIX)
    found = {name or Path(file).name: Path(file) for name, file in _FOUND.findall(done.stdout)}
    absent = [*_NOT_FOUND.findall(done.stdout), *_NOT_PRELOADED.findall(done.stderr)]
    lacking: dict[tuple[Path, Path], set[str]] = {}
    for file, version, user in _LACKING.findall(done.stderr):
        lacking.setdefault((Path(file), Path(user)), set()).add(version)
    return Trace(found, tuple(dict.fromkeys(absent)), lacking)


@dataclass(frozen=True)
class Image:
    """This image, with the variables and the torch by which a trainer in it finds libraries.

    Attributes:
        torch: torch's library for NVIDIA's GPUs: what it needs is loaded before NCCL opens a plugin, from folders that
            the loader does not search by itself.
    """

    env: Mapping[str, str]
    torch: Path | None = None

    @classmethod
    def here(cls, env: Mapping[str, str]) -> "Image":
        """This image, with a trainer's variables. Torch itself is not loaded."""
        spec = importlib.util.find_spec("torch")
        library = Path(spec.origin).parent / "lib/libtorch_cuda.so" if spec and spec.origin else None
        return cls(env, library if library and library.is_file() else None)

    @property
    def library_path(self) -> str:
        """LD_LIBRARY_PATH of the trainer."""
        return self.env.get("LD_LIBRARY_PATH", "")

    def trace(self, names: Iterable[str], path: str | None = None) -> Trace:
        """The loader's report on libraries and all that they need, as in a process that has loaded torch.

        Args:
            names: sonames or paths.
            path: LD_LIBRARY_PATH; None takes the trainer's.

        Raises:
            MusterError: one of the libraries crashes the loader, or it takes longer than TIMEOUT_S.
        """
        path = self.library_path if path is None else path
        names = list(names)
        found = trace(names, path)
        preloaded = self.loaded_by_torch(found.absent)
        return trace([*preloaded, *names], path) if preloaded else found

    @functools.cached_property
    def _of_torch(self) -> Mapping[str, Path]:
        """The libraries that torch loads, by name."""
        return trace([str(self.torch)], self.library_path).found if self.torch else {}

    def loaded_by_torch(self, names: Sequence[str]) -> list[str]:
        """The paths of the libraries among `names` that torch loads."""
        return [str(self._of_torch[name]) for name in names if name in self._of_torch]


def on_path(folder: Path, path: str, winners: Iterable[str]) -> str:
    """The library path `path` with `folder` last, or first where another folder on it has one of `winners`.

    Where it is last, the folders of --nv, of forward compatibility and of the user come before it.
    """
    others = [element for element in path.split(os.pathsep) if element not in ("", str(folder))]
    is_first = any(os.path.lexists(Path(element) / name) for element in others for name in winners)
    return os.pathsep.join([str(folder), *others] if is_first else [*others, str(folder)])


def temporary_folder(env: Mapping[str, str]) -> Path:
    """The first temporary folder that can be written to, and whose name can stand in LD_LIBRARY_PATH.

    Raises:
        MusterError: there is none.
    """
    for folder in home.temporary_folders(env):
        if not UNUSABLE.search(str(folder)):
            return folder
    raise MusterError(
        "links to the host's libraries need a temporary folder, and none can be written to",
        seen=f"TMPDIR={env.get('TMPDIR', '')} as uid {os.getuid()}",
        fix=FIX_FOLDER,
    )


@dataclass(frozen=True)
class Refusal:
    """Why a library of the host can't go into this image.

    Attributes:
        library: the host's file, or the soname where there is no file.
        needs: the symbol version, soname or architecture that is missing.
    """

    library: str
    wrong: str
    needs: str
    needed_by: str
    fix: str

    @property
    def seen(self) -> str:
        """The library, what is missing, and what needs it, for the `seen` of an error."""
        return f"{self.library}: {self.needs}, needed by {self.needed_by}"


class Closure:
    """The host's libraries that are needed: it links them, traces, and links what is missing, until nothing is added.

    Of a soname that host and image both have, the image's copy is taken if it is new enough.

    Args:
        plugin: NCCL's network plugin on the host.
        wanted: the profile's `roots`, `host_wins` and `sets`.

    Attributes:
        links: the libraries by the names under which the loader has to find them, in the order of need.
        refusals: every reason why the links can't be loaded.

    Raises:
        MusterError: the loader fails on a library, or there is no folder for the links.
    """

    def __init__(self, host: HostLibraries, image: Image, plugin: Library | None, wanted: Libraries) -> None:
        self.host = host
        self.image = image
        self.roots, self.host_wins, self.sets = values(wanted.roots), values(wanted.host_wins), values(wanted.sets)
        self.links: dict[str, Library] = {}
        self.refusals: tuple[Refusal, ...] = ()
        if plugin or self.roots or self.host_wins:
            with tempfile.TemporaryDirectory(prefix="muster-fabric-", dir=temporary_folder(image.env)) as folder:
                self._folder = Path(folder)
                self._search(plugin)

    @property
    def joined(self) -> list[tuple[str, ...]]:
        """The sets of which the host gives a member, so that it has to give them all."""
        return [members for members in self.sets if any(name in self.links for name in members)]

    def _search(self, plugin: Library | None) -> None:
        if plugin:
            self._link(plugin.soname, plugin, "NCCL")
        for name in self.host_wins:
            self._link(name, self.host.find(name), "the profile")
        roots = [root for root in self.roots if not never_leaves_host(root)]
        while True:
            library_path = on_path(self._folder, self.image.library_path, self.links)
            traced = self.image.trace(dict.fromkeys([*self.links, *roots]), library_path)
            if not self._link_missing(traced) and not self._link_sets():
                break
        self.refusals = tuple([*self._refuse_absent(traced), *self._refuse_sets(), *self._refuse_versions(traced)])

    def _link(self, name: str, library: Library | None, by: str) -> bool:
        """Links a library under a name, and returns True; False where there is none, or it is linked, or may not be.

        A library that is needed by its path gets no link: the loader looks for it at that path only.
        """
        if library is None or name in self.links or not is_name(name):
            return False
        # Its soname counts, whatever the name of its file is.
        if never_leaves_host(name) or never_leaves_host(library.soname):
            return False
        (self._folder / name).symlink_to(self.host.root.path(library.path).absolute())
        self.links[name] = replace(library, needed_by=by)
        return True

    def _link_of(self, file: Path) -> Library | None:
        """The host's library that is linked at a path; None for a file of the image."""
        return self.links.get(file.name) if file.parent == self._folder else None

    def _needed_by(self, name: str) -> tuple[str, Library | None]:
        """The library or profile that needs a soname, in words; and the linked library itself, if it is one."""
        if name in self.roots:
            return "the profile", None
        for library in self.links.values():
            if name in library.needed:
                return library.path, library
        return "a library of the image", None

    def _link_missing(self, traced: Trace) -> bool:
        """Links the host's copies of libraries that are absent or lack symbol versions; returns whether it did."""
        is_more = False
        for name in traced.absent:
            who, by = self._needed_by(name)
            is_more |= self._link(name, self.host.find(name, by), who)
        for file, user in traced.lacking:
            name, by = traced.name_of(file), self._link_of(user)
            # Two CUDA runtimes, torch's and another, can be loaded together.
            if by is None or self._link_of(file) or name.startswith("libcudart.so"):
                continue
            is_more |= self._link(name, self.host.find(name, by), by.path)
        return is_more

    def _link_sets(self) -> bool:
        """Links the other members of the sets of which one is linked; returns whether it did."""
        is_more = False
        for members in self.joined:
            for member in members:
                # For a folder all libraries in it, by the file names under which the set's library opens them.
                for path in self._providers(member) if "/" in member else [member]:
                    name = os.path.basename(path)
                    library = None if name in self.links else self.host.find(path)
                    if library and library.machine == own_machine():
                        is_more |= self._link(name, library, f"the set of {members[0]}")
        return is_more

    def _providers(self, folder: str) -> list[str]:
        return self.host.root.glob(f"{folder.rstrip('/')}/*.so*")

    def _refuse_absent(self, traced: Trace) -> Iterator[Refusal]:
        """Refusals of sonames that neither host nor image has, and of files that the loader can't load."""
        fix = "name the host's folder with {} in the profile's search, or --fabric off"
        missing = [name for name in self.host_wins if name not in self.links and not never_leaves_host(name)]
        for name in missing:
            wrong = "it has to come from the host, and the host does not have it"
            yield Refusal(name, wrong, name, "the profile", fix.format(name))
        for name in traced.absent:
            if link := self.links.get(name):
                wrong = "the loader can't read it"
                if link.machine != own_machine():
                    wrong = f"it is built for another architecture: {link.machine}"
                anew = "install the host's package again, or name another folder in the profile's search"
                yield Refusal(link.path, wrong, own_machine(), link.needed_by, anew)
            elif name not in missing and not _DRIVERS.fullmatch(name):
                wrong = "neither the host nor the image has it"
                yield Refusal(name, wrong, name, self._needed_by(name)[0], fix.format(name))

    def _refuse_sets(self) -> Iterator[Refusal]:
        """Refusals of sets whose library would open the image's providers, which do not fit it."""
        for members in self.joined:
            folders = [member for member in members if "/" in member]
            if folders and not any(map(self._providers, folders)):
                wrong = "a set must come all from the host or all from the image, and the host has no providers"
                fix = "install the host's package with them, or name their folder in the profile's sets"
                yield Refusal(" ".join(folders), wrong, f"{folders[0]}/*.so", f"{members[0]} of the host", fix)

    def _refuse_versions(self, traced: Trace) -> Iterator[Refusal]:
        """Refusals for missing symbol versions: links need them, or libraries of the image need them from a link."""
        for (file, user), versions in traced.lacking.items():
            soname, link, needing = traced.name_of(file), self._link_of(file), self._link_of(user)
            missing = " ".join(sorted(versions, key=by_numbers))
            if needing and not _DRIVERS.fullmatch(soname):
                path = needing.path
                of = f"the host's {link.path}" if link else f"the image's {file}"
                wrong = f"it needs symbol versions of {soname} that {of} does not have"
                if never_leaves_host(soname):
                    fix = f"an image whose {soname} has {missing}, or a build of the library for an older system"
                else:
                    side = "on the host" if link else "in the image"
                    fix = f"a newer {soname} {side}, or a build of the library that needs no newer one"
                yield Refusal(path, wrong, missing, path, fix)
            elif link and not needing:
                wrong = f"it would replace the image's {soname}, but lacks symbol versions that the image needs"
                fix = f"a newer {soname} on the host, or a fabric that works with the image's: --fabric tcp"
                yield Refusal(link.path, wrong, missing, str(user), fix)


# As NCCL opens its plugins.
_OPEN = """
import ctypes, os, sys
for path in sys.argv[1:]:
    try:
        ctypes.CDLL(path, mode=os.RTLD_NOW | os.RTLD_LOCAL)
    except OSError as reason:
        sys.exit(f"{path}: {reason}")
"""


def prove(folder: Path, names: Sequence[str], image: Image, timeout_s: float = TIMEOUT_S) -> None:
    """Checks, in the order of `names`, that these libraries in a folder can be opened in the image.

    Raises:
        MusterError: one can't, with the loader's own message; or it takes longer than `timeout_s`.
    """
    paths = [str(folder / name) for name in names]
    # Torch itself is not loaded, as that takes seconds: only those of its libraries which are needed.
    loaded = image.loaded_by_torch(trace(paths, image.library_path).absent)
    preloaded = " ".join([*loaded, image.env.get("LD_PRELOAD", "")]).strip()
    if wrong := problem(paths, {**image.env, "LD_PRELOAD": preloaded}, timeout_s):
        raise MusterError("the host's network libraries can't be loaded here", seen=wrong, fix=FIX)


def problem(libraries: Sequence[str], env: Mapping[str, str], timeout_s: float = TIMEOUT_S) -> str | None:
    """Why one of `libraries` can't be opened with the variables `env`; None where all can."""
    done = run_python(_OPEN, libraries, env, timeout_s)
    if isinstance(done, str):
        return f"{done}: {shlex.quote(libraries[0])}"
    return reason_of_end(done) if done.returncode else None


def run_python(
    program: str, words: Sequence[str], env: Mapping[str, str], timeout_s: float
) -> "subprocess.CompletedProcess[str] | str":
    """The completed process of a Python program; or, as text, why it did not end by itself or could not be started."""
    try:
        return processes.run([sys.executable, "-I", "-S", "-c", program, *words], env=env, timeout_s=timeout_s)
    except subprocess.TimeoutExpired:
        return f"no answer within {timeout_s:g} s"
    except OSError as reason:
        return str(reason)


def reason_of_end(done: "subprocess.CompletedProcess[str]") -> str:
    """Why a process that opened a library failed: its signal, its last line of errors, or its exit code."""
    lines = done.stderr.strip().splitlines()
    if done.returncode < 0:
        return f"a process that opened it {processes.how_ended(done.returncode)}"
    return lines[-1] if lines else f"a process that opened it ended with code {done.returncode}"
