"""What goes from the host into this image, by the words of the image's own dynamic loader.

    trace      LD_TRACE_LOADED_OBJECTS, as ldd does: what is found where, what is not, whose symbol versions are missing
    Closure    plugin, named libraries -> links in a folder of a moment -> the loader's words -> more links, and so on
                                                                     -> refusals: what is still missing, and whose need
    prove      dlopen in a process of its own, which a library may end or hold: nothing of the host runs before that

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
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from muster import processes
from muster.entrypoint import homes
from muster.entrypoint.fabric.libraries import (
    CACHE,
    HostLibraries,
    Library,
    by_numbers,
    is_drivers,
    is_images,
    loader_cache,
    never_leaves_host,
    own_machine,
)
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

# 	libfabric.so.1 => /lib/x86_64-linux-gnu/libfabric.so.1 (0x00007f2b950fa000)
# 	/lib64/ld-linux-x86-64.so.2 (0x00007f2b95109000)
_FOUND = re.compile(r"\t(?:(\S.*?) => )?(/.*) \(0x[0-9a-f]+\)")
# 	libpsm2.so.2 => not found
_NOT_FOUND = re.compile(r"\t(\S.*) => not found")
# ERROR: ld.so: object 'libcxi.so.1' from LD_PRELOAD cannot be preloaded (cannot open shared object file): ignored.
_NOT_PRELOADED = re.compile(r"ERROR: ld\.so: object '(.*)' from LD_PRELOAD cannot be preloaded .*")
# python: /lib/libfabric.so.1: version `FABRIC_1.7' not found (required by /tmp/links/libnccl-net.so)
_LACKING = re.compile(r"(/.*): version `(.*)' not found \(required by (/.*)\)")

_PROFILE = "the profile"
# Paths that go into one variable, of which the kernel takes 128 KiB.
_BATCH = 500


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
    """

    env: Mapping[str, str]
    torch: Path | None = None

    @classmethod
    def here(cls, env: Mapping[str, str]) -> "Image":
        """This image, with a trainer's variables."""
        package = installed_torch()
        library = package / "lib/libtorch_cuda.so" if package else None
        return cls(env, library if library and library.is_file() else None)

    def trace(self, names: Iterable[str], path: str | None = None) -> Trace:
        """What the loader finds for libraries and all that they need, in a process that has loaded torch.

        Args:
            names: sonames or paths.
            path: LD_LIBRARY_PATH; None takes the trainer's.

        Raises:
            MusterError: one of the libraries ends the loader, or it takes too long.
        """
        path = self.library_path if path is None else path
        names = list(names)
        found = trace(names, path)
        preloaded = self.loaded_by_torch(found.absent)
        return trace([*preloaded, *names], path) if preloaded else found

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
        cached = loader_cache(Path(CACHE))
        found = [Path(path) for paths in cached.values() for path in paths] if isinstance(cached, dict) else []
        found += [self.torch] if self.torch else []
        folders = [Path(folder) for folder in self.library_path.split(os.pathsep) if folder]
        folders.append(Path(str(sysconfig.get_config_var("DESTSHARED"))))
        return [*found, *(path for folder in folders for path in sorted(folder.glob("*.so*")) if path.is_file())]


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


@dataclass(frozen=True)
class Refusal:
    """Why a library of the host can't go into this image.

    Attributes:
        library: the host's file that it is about.
        wrong: one sentence.
        needs: the symbol version, soname or architecture that is missing.
        needed_by: who needs it.
        fix: what to do.
    """

    library: str
    wrong: str
    needs: str
    needed_by: str
    fix: str


@dataclass(frozen=True)
class LibrarySet:
    """Libraries that come all from one side: sonames, and the folders of what they open by themselves."""

    sonames: tuple[str, ...]
    folders: tuple[str, ...]


class Closure:
    """What comes from the host: links, asks the loader, and links what it misses, until it misses nothing there is.

    Of a soname that both have, the image's copy is taken if it is new enough.

    Args:
        host: where libraries are looked for.
        image: what they go into.
        plugin: NCCL's network plugin; it is the host's.
        roots: sonames that are needed whether or not something names them; or paths.
        host_wins: sonames that have to be the host's.
        sets: what comes from one side.

    Attributes:
        links: by the name under which the loader has to find it, in the order in which it was needed.
        needed_by: by that name, who asked first.
        winners: the names of those that the image has too.
        joined: the sets that come from the host.
        refusals: every reason why the links can't be loaded.

    Raises:
        MusterError: the loader can't be asked.
    """

    def __init__(
        self,
        host: HostLibraries,
        image: Image,
        plugin: Library | None = None,
        roots: tuple[str, ...] = (),
        host_wins: tuple[str, ...] = (),
        sets: tuple[LibrarySet, ...] = (),
    ) -> None:
        self.host, self.image, self.roots, self.sets = host, image, roots, sets
        self.links: dict[str, Library] = {}
        self.needed_by: dict[str, str] = {}
        self.winners: frozenset[str] = frozenset()
        self.joined: list[LibrarySet] = []
        self.refusals: tuple[Refusal, ...] = ()
        # Of each link, the library itself, the one that needs it, and so on.
        self.chains: dict[str, tuple[Library, ...]] = {}
        self.forced: set[str] = set()
        # Names that only a set asks for.
        self.optional: set[str] = set()
        # Names that have to be the host's, and are not there.
        self.missing: list[str] = []
        if plugin or roots or host_wins:
            with tempfile.TemporaryDirectory(prefix="muster-fabric-", dir=temporary_folder(image.env)) as folder:
                self.folder = Path(folder)
                self.search(plugin, host_wins)

    def search(self, plugin: Library | None, host_wins: tuple[str, ...]) -> None:
        """Finds all of it, with links in a folder of a moment."""
        self.before = self.image.trace(())
        if plugin:
            self.link(plugin.elf.soname, plugin, "NCCL")
        for name in host_wins:
            library = self.host.find(name)
            if library and self.link(name, library, _PROFILE):
                self.forced.add(name)
            elif not never_leaves_host(name):
                self.missing.append(name)
        for path in (name for name in self.roots if "/" in name):
            library = self.host.find(path)
            if library:
                self.link(library.elf.soname, library, _PROFILE)
            else:
                self.missing.append(path)
        while True:
            words = self.ask()
            if self.link_absent(words) or self.replace_outdated(words) or self.join_sets():
                continue
            own = self.image.trace(self.links).found
            self.winners = frozenset(name for name in self.links if name in own)
            broken = self.broken_users([own[name] for name in self.winners]) if self.winners else ()
            if not self.leave_to_image(broken):
                break
        found = [*self.refuse_absent(words), *self.refuse_versions(words), *self.refuse_users(words, broken)]
        self.refusals = tuple(dict.fromkeys(found))

    def link(self, name: str, library: Library, by: str, chain: tuple[Library, ...] = ()) -> bool:
        """Links a library under a name; False where it never comes from the host, whatever its file is called."""
        if name in self.links or never_leaves_host(name) or never_leaves_host(library.elf.soname):
            return False
        (self.folder / name).symlink_to(self.host.root.path(library.path).absolute())
        self.links[name] = library
        self.needed_by[name] = by
        self.chains[name] = (library, *chain)
        return True

    def ask(self) -> Trace:
        """The loader's words to all links and named libraries."""
        named = [name for name in self.roots if "/" not in name and not never_leaves_host(name)]
        return self.image.trace(dict.fromkeys([*self.links, *named]), self.library_path())

    def library_path(self) -> str:
        """The library path of a launch with these links."""
        return on_path(self.folder, self.image.library_path, self.forced)

    def absent(self, words: Trace) -> list[str]:
        """What the loader misses now, and has not missed before anything was linked."""
        return [name for name in words.absent if name not in self.before.absent and not is_drivers(name)]

    def who_needs(self, name: str) -> tuple[str, tuple[Library, ...]]:
        """Who asks for a name: to be told, and as a chain of needs."""
        if name in self.roots:
            return _PROFILE, ()
        for link, library in self.links.items():
            if name in library.elf.needed:
                return library.path, self.chains[link]
        return "a library of the image", ()

    def link_absent(self, words: Trace) -> bool:
        """Links what the loader misses and the host has; whether anything was."""
        is_more = False
        for name in self.absent(words):
            by, chain = self.who_needs(name)
            # What needs a path looks there in the container too: a link elsewhere is of no help.
            library = None if "/" in name else self.host.find(name, chain)
            is_more |= library is not None and self.link(name, library, by, chain)
        return is_more

    def replace_outdated(self, words: Trace) -> bool:
        """Links the host's copy where the image's lacks symbol versions that a link needs; whether anything was."""
        lacking: dict[tuple[str, str], set[str]] = {}
        for each in words.lacking:
            user, name = self.link_of(each.required_by), self.name_of(each.library, words)
            # Of two CUDA runtimes, torch's and another, both can be loaded.
            is_replaceable = not self.link_of(each.library) and not name.startswith("libcudart.so")
            if user and is_replaceable:
                lacking.setdefault((user, name), set()).add(each.version)
        is_more = False
        for (user, name), versions in lacking.items():
            library, by = self.host.find(name, self.chains[user]), self.links[user].path
            is_newer = library is not None and versions <= library.elf.versions
            if library and is_newer and self.link(name, library, by, self.chains[user]):
                self.forced.add(name)
                is_more = True
        return is_more

    def join_sets(self) -> bool:
        """Links all of a set of which a part is linked; whether anything was."""
        is_more = False
        for one in self.sets:
            if one in self.joined or not any(name in self.links for name in one.sonames):
                continue
            self.joined.append(one)
            files = self.provider_files(one)
            named = {name: library for name in one.sonames if (library := self.host.find(name))}
            # A provider by its soname too, as NCCL opens libmlx5.so.1.
            named = {library.elf.soname: library for library in files.values()} | named
            for name, library in (named | files).items():
                is_linked = self.link(name, library, f"the set of {one.sonames[0]}")
                is_more |= is_linked
                if is_linked and name in named and name != one.sonames[0]:
                    self.optional.add(name)
            self.forced |= set(named)
        return is_more

    def provider_files(self, one: LibrarySet) -> dict[str, Library]:
        """The libraries in a set's folders on the host, by the names under which its library opens them."""
        found: dict[str, Library] = {}
        for path in (path for folder in one.folders for path in self.host.root.glob(f"{folder}/*.so*")):
            library = self.host.at(path)
            if library is not None and library.elf.machine == own_machine():
                found[path.rpartition("/")[2]] = library
        return found

    def broken_users(self, replaced: list[Path]) -> tuple[Lacking, ...]:
        """What the image's own libraries miss with the links, and do not miss without them.

        Args:
            replaced: files of the image that links take the place of.
        """
        in_sets = {os.path.realpath(path) for path in self.set_members().values()}
        unused = in_sets | {os.path.realpath(path) for path in replaced}
        users = [str(path) for path in self.image.users() if os.path.realpath(path) not in unused]
        found = [
            each
            for each in self.lacking_of(users, self.library_path())
            if self.link_of(each.library) and not self.link_of(each.required_by)
        ]
        if not found:
            return ()
        had = {(each.version, each.required_by) for each in self.lacking_of(users)}
        of_sets = {name for one in self.joined for name in one.sonames}

        def is_unused(each: Lacking) -> bool:
            # A provider that asks for its library's private interface, where its set comes from the host.
            is_private = "_PRIVATE" in each.version and each.library.name in of_sets
            return is_private and os.path.realpath(each.required_by) not in in_sets

        return tuple(each for each in found if (each.version, each.required_by) not in had and not is_unused(each))

    def lacking_of(self, users: list[str], path: str | None = None) -> list[Lacking]:
        """The symbol versions that libraries of the image miss."""
        batches = [users[start : start + _BATCH] for start in range(0, len(users), _BATCH)]
        try:
            return [each for batch in batches for each in self.image.trace(batch, path).lacking]
        except MusterError:
            # A library of the image that ends the loader says nothing of the host's.
            return []

    def leave_to_image(self, broken: tuple[Lacking, ...]) -> bool:
        """Takes back what only a set asks for and the image's own users can't do with; whether anything was."""
        needed = {name for library in self.links.values() for name in library.elf.needed}
        taken_back = {each.library.name for each in broken} & self.optional - needed
        for name in taken_back:
            (self.folder / name).unlink()
            del self.links[name]
        self.optional -= taken_back
        self.forced -= taken_back
        return bool(taken_back)

    def set_members(self) -> dict[str, Path]:
        """The image's own files of the sets that come from the host, by soname."""
        names = [name for one in self.joined for name in one.sonames]
        found = self.image.trace(names).found
        return {name: found[name] for name in names if name in found}

    def link_of(self, file: Path) -> str | None:
        """The name of a link, by its path; None for a file of the image."""
        return file.name if file.parent == self.folder else None

    def name_of(self, file: Path, words: Trace) -> str:
        """The soname by which the loader came to a file."""
        return next((name for name, found in words.found.items() if found == file), file.name)

    def refuse_absent(self, words: Trace) -> Iterator[Refusal]:
        for name in self.missing:
            yield self.nowhere(name, _PROFILE)
        for name in self.absent(words):
            library = self.links.get(name)
            if library is None:
                yield self.nowhere(name, self.who_needs(name)[0])
            else:
                machine = library.elf.machine
                is_foreign = machine != own_machine()
                yield Refusal(
                    library.path,
                    f"it is built for another architecture: {machine}" if is_foreign else "the loader can't read it",
                    own_machine(),
                    self.needed_by[name],
                    "install the host's package anew, or name another folder in the profile's search",
                )
        for one in self.joined:
            if one.folders and not self.provider_files(one):
                folder = " ".join(one.folders)
                yield self.mixed(one, f"providers in {folder}", folder)

    def nowhere(self, name: str, by: str) -> Refusal:
        if name in self.missing and name in self.image.trace([name]).found:
            wrong = "it has to be the host's, and the host does not have it"
        else:
            wrong = "neither the host nor the image has it"
        fix = f"name the host's folder with {name} in the profile's search, or --fabric off"
        return Refusal(name, wrong, name, by, fix)

    def refuse_versions(self, words: Trace) -> Iterator[Refusal]:
        """Links that need symbol versions which nobody has."""
        lacking: dict[tuple[str, Path], set[str]] = {}
        for each in words.lacking:
            user = self.link_of(each.required_by)
            if user and not is_drivers(self.name_of(each.library, words)):
                lacking.setdefault((user, each.library), set()).add(each.version)
        for (user, file), versions in lacking.items():
            soname, link, path = self.name_of(file, words), self.link_of(file), self.links[user].path
            of = f"the host's {self.links[link].path}" if link else f"the image's {file}"
            missing = sorted(versions, key=by_numbers)
            if is_images(soname):
                fix = f"an image whose {soname} has {missing[-1]}, or a build of the library for an older system"
            else:
                side = "host" if link else "image"
                fix = f"a newer {soname} in the {side}, or a build of the library that asks for less"
            wrong = f"it needs symbol versions of {soname} that {of} does not have"
            yield Refusal(path, wrong, " ".join(missing), path, fix)

    def refuse_users(self, words: Trace, broken: tuple[Lacking, ...]) -> Iterator[Refusal]:
        """Links that would take the place of the image's copies, and have less than the image's own libraries need."""
        members = {os.path.realpath(path): name for name, path in self.set_members().items()}
        lacking: dict[str, dict[str, set[str]]] = {}
        for each in (*words.lacking, *broken):
            link = self.link_of(each.library)
            if not link or self.link_of(each.required_by):
                continue
            member = members.get(os.path.realpath(each.required_by))
            if member:
                one = next(one for one in self.joined if member in one.sonames)
                yield self.mixed(one, member, str(each.required_by))
            else:
                users = lacking.setdefault(link, {}).setdefault(each.version, set())
                users.add(str(each.required_by))
        for link, versions in lacking.items():
            users = sorted(set[str]().union(*versions.values()))
            more = f" and {len(users) - 3} more" if len(users) > 3 else ""
            yield Refusal(
                self.links[link].path,
                f"it would take the place of the image's {link}, and has less than the image's own libraries need",
                " ".join(sorted(versions, key=by_numbers)),
                " ".join(users[:3]) + more,
                f"a newer {link} on the host, or a fabric whose libraries do with the image's: --fabric tcp",
            )

    def mixed(self, one: LibrarySet, name: str, path: str) -> Refusal:
        first = next((each for each in one.sonames if each in self.links), one.sonames[0])
        return Refusal(
            path,
            "a set that has to come from one side would be mixed: the host does not have all of it",
            name,
            f"{first} of the host",
            f"install the host's package with {name}, or name its folder in the profile's search and sets",
        )


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
        raise MusterError("the host's network libraries can't be loaded here", seen=wrong, fix=FIX)


def problem(
    libraries: Sequence[str], env: Mapping[str, str], timeout_s: float = TIMEOUT_S, loaded: Sequence[str] = ()
) -> str | None:
    """Why one of `libraries` can't be opened with the variables `env` after `loaded`; None where all can."""
    done = run_python(_OPEN, [str(len(loaded)), *loaded, *libraries], env, timeout_s)
    if isinstance(done, str):
        return f"{done}: {shlex.quote(libraries[0])}"
    return last_words(done) if done.returncode else None


def run_python(
    program: str, words: Sequence[str], env: Mapping[str, str], timeout_s: float
) -> "subprocess.CompletedProcess[str] | str":
    """A program of Python's, ended; or why it did not end by itself, or could not be started."""
    try:
        return processes.run([sys.executable, "-I", "-S", "-c", program, *words], env=env, timeout_s=timeout_s)
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
