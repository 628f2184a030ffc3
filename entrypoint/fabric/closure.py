"""All that has to come from the host so that its plugin and its libraries can be loaded, and nothing more."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from entrypoint.fabric.inventory import Inventory
from entrypoint.fabric.loader import Loader
from entrypoint.fabric.model import Library
from entrypoint.fabric.sides import is_cudas, is_kept, is_optional


@dataclass(frozen=True)
class LibrarySet:
    """Libraries that come all from one side: sonames, and the folders of what they open by themselves."""

    sonames: tuple[str, ...]
    folders: tuple[str, ...]


@dataclass(frozen=True)
class Asked:
    """A name that a profile or a library asks for, and who it is."""

    name: str
    by: str


@dataclass(frozen=True)
class Closure:
    """What comes from the host.

    Attributes:
        libraries: by the name under which the loader has to find them, in the order in which they were needed.
        needed_by: by that name, who asked first.
        absent: what neither the image nor the host has.
        forced: sonames that have to be the host's though the image has them too.
        sets: those that come from the host.
    """

    libraries: Mapping[str, Library]
    needed_by: Mapping[str, str]
    absent: tuple[Asked, ...]
    forced: frozenset[str]
    sets: tuple[LibrarySet, ...]


@dataclass
class _Walk:
    libraries: dict[str, Library] = field(default_factory=dict[str, Library])
    needed_by: dict[str, str] = field(default_factory=dict[str, str])
    # Of each, the library itself, the one that needs it, and so on.
    chains: dict[str, tuple[Library, ...]] = field(default_factory=dict[str, tuple[Library, ...]])
    absent: list[Asked] = field(default_factory=list[Asked])


@dataclass(frozen=True)
class Wanted:
    """Where a closure begins.

    Attributes:
        plugin: NCCL's network plugin; it is the host's.
        roots: sonames that are needed whether or not something names them.
        host_wins: sonames that have to be the host's.
        sets: what comes from one side.
    """

    plugin: Library | None
    roots: tuple[str, ...] = ()
    host_wins: tuple[str, ...] = ()
    sets: tuple[LibrarySet, ...] = ()


def closure(wanted: Wanted, loader: Loader, image: Inventory) -> Closure:
    """The closure over what libraries need; of a soname that both have, the image's copy if it is new enough.

    That the host's copy is taken instead can make others need it too: it is gone through until nothing changes.
    """
    forced = set(wanted.host_wins)
    sets: list[LibrarySet] = []
    while True:
        walk = _walked(wanted, sets, forced, loader, image)
        more = _lacking(walk, loader, image) - forced
        joined = [one for one in wanted.sets if one not in sets and _is_hosts(one, walk, more)]
        if not more and not joined:
            return Closure(walk.libraries, walk.needed_by, tuple(walk.absent), frozenset(forced), tuple(sets))
        forced |= more | {name for one in joined for name in one.sonames}
        sets += joined


def provider_files(one: LibrarySet, loader: Loader) -> dict[str, Library]:
    """The libraries in a set's folders on the host, by the names under which its library opens them."""
    found: dict[str, Library] = {}
    for path in (path for folder in one.folders for path in loader.root.glob(f"{folder}/*.so*")):
        library = loader.at(path)
        if library is not None and loader.fits(library):
            found[path.rpartition("/")[2]] = library
    return found


def _members(one: LibrarySet, loader: Loader, image: Inventory) -> dict[str, Library]:
    """What the host has of a set, by name; a provider by its soname too, as NCCL opens libmlx5.so.1.

    What nothing but the set asks for is left to the image where the image's own users need more than the host's has.
    """
    files = provider_files(one, loader)
    named = {name: library for name in one.sonames if (library := loader.find(name))}
    named |= {library.elf.soname: library for library in files.values() if library.elf.soname not in named}
    fitting = {name: library for name, library in named.items() if _does_for_users(library, name, image)}
    # Without the library that the set is named by there is nothing to be a part of.
    first = {name: named[name] for name in one.sonames[:1] if name in named}
    return first | fitting | files


def _does_for_users(library: Library, soname: str, image: Inventory) -> bool:
    users = image.users.get(soname, {})
    needed = (versions for user, versions in users.items() if not is_optional(user))
    return all(provides(library.elf.versions_provided, versions) for versions in needed)


def _is_hosts(one: LibrarySet, walk: _Walk, more: set[str]) -> bool:
    return any(name in walk.libraries or name in more for name in one.sonames)


def _lacking(walk: _Walk, loader: Loader, image: Inventory) -> set[str]:
    """Sonames of which the image's copy is too old for what is taken from the host, while the host's is not."""
    lacking: set[str] = set()
    for name, library in walk.libraries.items():
        for soname, versions in library.elf.versions_needed.items():
            if soname in walk.libraries or soname not in image.libraries:
                continue
            if is_kept(soname) or is_cudas(soname):
                continue
            if provides(image.libraries[soname].versions, versions):
                continue
            hosts = loader.find(soname, walk.chains[name])
            if hosts is not None and provides(hosts.elf.versions_provided, versions):
                lacking.add(soname)
    return lacking


def provides(provided: frozenset[str], needed: frozenset[str]) -> bool:
    """Whether a library will do; one without any versions does for every version, as the loader has it."""
    return not provided or needed <= provided


def _walked(wanted: Wanted, sets: list[LibrarySet], forced: set[str], loader: Loader, image: Inventory) -> _Walk:
    walk = _Walk()
    queue: list[str] = []

    def add(name: str, library: Library, by: str, chain: tuple[Library, ...] = ()) -> None:
        if is_kept(name):
            # However it was named: by a set, by its path, or by a plugin that calls itself so, which the gate refuses.
            return
        if is_kept(library.elf.soname):
            # Under another name it would be a second one in the process.
            walk.absent.append(Asked(name, by))
            return
        walk.libraries[name] = library
        walk.needed_by[name] = by
        walk.chains[name] = (library, *chain)
        queue.append(name)

    def ask(name: str, by: str, chain: tuple[Library, ...] = ()) -> None:
        if name in walk.libraries or is_kept(name):
            # What the image has to have is held against the image by the gate.
            return
        if name in image.libraries and name not in forced:
            return
        library = loader.find(name, chain)
        if library is not None and "/" in name and not chain:
            add(library.elf.soname, library, by)
        elif library is not None and "/" not in name:
            # What needs a path would look there in the container too: a link elsewhere is of no help.
            add(name, library, by, chain)
        elif all(name not in one.sonames or name not in image.libraries for one in sets):
            # A half of a set that only the image has is the gate's to name.
            walk.absent.append(Asked(name, by))

    if wanted.plugin is not None:
        add(wanted.plugin.elf.soname, wanted.plugin, "NCCL")
    for name in (*wanted.roots, *wanted.host_wins):
        ask(name, "the profile")
    for one in sets:
        for name, library in _members(one, loader, image).items():
            if name not in walk.libraries:
                add(name, library, f"the set of {one.sonames[0]}")
    while queue:
        chain = walk.chains[queue.pop(0)]
        for name in chain[0].elf.needed:
            ask(name, chain[0].path, chain)
    return walk
