"""Whether what comes from the host can be loaded in this image: every reason why not, each with what to do."""

from collections.abc import Iterator
from pathlib import PurePosixPath

from entrypoint.fabric.closure import Closure, LibrarySet, Wanted, provider_files, provides
from entrypoint.fabric.elf import NetPlugin
from entrypoint.fabric.inventory import Inventory
from entrypoint.fabric.loader import Loader, stem_of
from entrypoint.fabric.model import Library, Refusal
from entrypoint.fabric.sides import is_drivers, is_images, is_kept, is_optional


def refusals(
    wanted: Wanted, closure: Closure, plugin: NetPlugin | None, loader: Loader, image: Inventory
) -> tuple[Refusal, ...]:
    """All reasons why the host's libraries can't go into this image; none where they can."""
    found = [
        *_plugin(wanted.plugin, plugin, image),
        *_architecture(closure, image),
        *_absent(closure, loader, image),
        *_versions(closure, image),
        *_users(wanted, closure, image),
        *_mixed(closure, loader, image),
    ]
    return tuple(dict.fromkeys(found))


def _plugin(library: Library | None, plugin: NetPlugin | None, image: Inventory) -> Iterator[Refusal]:
    if library is None:
        return
    if is_kept(library.elf.soname):
        yield Refusal(
            library.path,
            f"NCCL's network plugin calls itself {library.elf.soname}, which never comes from the host",
            "a soname of its own, such as libnccl-net.so",
            "NCCL",
            "a plugin for this NCCL: ask the site for another build, or --fabric off",
        )
        return
    versions = plugin.versions if plugin else ()
    if not set(versions) & set(image.plugins):
        has = ", ".join(f"ncclNetPlugin_v{version}" for version in versions) or "no ncclNetPlugin_vN at all"
        yield Refusal(
            library.path,
            f"NCCL's network plugin is of no version that this image's NCCL opens: it has {has}",
            f"ncclNetPlugin_v{min(image.plugins)} to v{max(image.plugins)}",
            "NCCL",
            "a plugin for this NCCL: ask the site for another build, or --fabric off",
        )


def _architecture(closure: Closure, image: Inventory) -> Iterator[Refusal]:
    for name, library in closure.libraries.items():
        if library.elf.machine != image.machine:
            yield Refusal(
                library.path,
                f"it is built for another architecture: {library.elf.machine}",
                image.machine,
                closure.needed_by[name],
                f"an image built for {library.elf.machine}, or a library of the host for {image.machine}",
            )


def _absent(closure: Closure, loader: Loader, image: Inventory) -> Iterator[Refusal]:
    asked = {name: by for name, by in ((absent.name, absent.by) for absent in reversed(closure.absent))}
    for library in closure.libraries.values():
        for name in library.elf.needed:
            if is_images(name) and name not in image.libraries:
                asked.setdefault(name, library.path)
    for name, by in asked.items():
        yield _nowhere(name, by, loader, image)


def _nowhere(name: str, by: str, loader: Loader, image: Inventory) -> Refusal:
    on_host = [] if is_images(name) else loader.others(name)
    in_image = sorted(other for other in image.libraries if other.startswith(f"{stem_of(name)}."))
    others = [f"the host has {' '.join(on_host[:4])}"] if on_host else []
    others += [f"the image has {' '.join(in_image[:4])}"] if in_image else []
    if name in image.libraries:
        wrong = "it has to be the host's, and the host does not have it"
        fix = f"name the host's folder with {name} in the profile's search"
    elif others:
        wrong = f"only another version of it is there: {', '.join(others)}"
        asking = by.rpartition("/")[2]
        fix = f"a {asking} that is built for what is there, or the folder of {name} in the profile's search"
    else:
        wrong = "neither the host nor the image has it"
        fix = f"name the host's folder with {name} in the profile's search, or --fabric off"
    return Refusal(name, wrong, name, by, fix)


def _versions(closure: Closure, image: Inventory) -> Iterator[Refusal]:
    for library in closure.libraries.values():
        for soname, versions in library.elf.versions_needed.items():
            if is_drivers(soname):
                continue
            if soname in closure.libraries:
                copy = closure.libraries[soname]
                provided, of = copy.elf.versions_provided, f"the host's {copy.path}"
            elif soname in image.libraries:
                provided, of = image.libraries[soname].versions, f"the image's {image.libraries[soname].path}"
            else:
                continue
            if not provides(provided, versions):
                missing = ordered(versions - provided)
                yield Refusal(
                    library.path,
                    f"it needs symbol versions of {soname} that {of} does not have",
                    " ".join(missing),
                    library.path,
                    _fix_of_versions(soname, missing, soname in closure.libraries),
                )


def _fix_of_versions(soname: str, missing: list[str], is_hosts: bool) -> str:
    if is_images(soname):
        return f"an image whose {soname} has {missing[-1]}, or a build of the library for an older system"
    side = "host" if is_hosts else "image"
    return f"a newer {soname} in the {side}, or a build of the library that asks for less"


def _users(wanted: Wanted, closure: Closure, image: Inventory) -> Iterator[Refusal]:
    """Libraries of the image that would get the host's copy, and find too little in it."""
    replaced = {copy.path for name, copy in image.libraries.items() if name in closure.libraries}
    for soname, library in closure.libraries.items():
        if soname not in image.libraries:
            continue
        had = image.libraries[soname].versions
        lacking: dict[str, list[str]] = {}
        for user, versions in image.users.get(soname, {}).items():
            # What the image's own copy lacks too, nobody has used.
            missing = (versions & had) - library.elf.versions_provided
            if missing and user not in replaced and not _is_of_set(user, soname, missing, closure.sets, image):
                for version in missing:
                    lacking.setdefault(version, []).append(user)
        if lacking:
            users = sorted({user for by in lacking.values() for user in by})
            more = f" and {len(users) - 3} more" if len(users) > 3 else ""
            yield Refusal(
                library.path,
                f"it would take the place of the image's {soname}, and has less than the image's own libraries need",
                " ".join(ordered(lacking)),
                " ".join(users[:3]) + more,
                f"a newer {soname} on the host, or a fabric whose libraries do with the image's: --fabric tcp",
            )


def _is_of_set(user: str, soname: str, missing: frozenset[str], sets: tuple[LibrarySet, ...], image: Inventory) -> bool:
    """Whether a user in the image is left unused as its set comes from the host, or is opened by choice alone."""
    if is_optional(user):
        return True
    for one in sets:
        if soname not in one.sonames:
            continue
        if _is_member(user, one, image):
            return True
        # A provider, by what it asks for: its library opens it, and goes on without it.
        if all("_PRIVATE" in version for version in missing):
            return True
    return False


def _is_member(path: str, one: LibrarySet, image: Inventory) -> bool:
    members = {image.libraries[name].path for name in one.sonames if name in image.libraries}
    folders = {PurePosixPath(folder).name for folder in one.folders}
    return path in members or PurePosixPath(path).parent.name in folders


def _mixed(closure: Closure, loader: Loader, image: Inventory) -> Iterator[Refusal]:
    for one in closure.sets:
        first = next((name for name in one.sonames if name in closure.libraries), one.sonames[0])
        by = f"{first} of the host"
        for name in one.sonames:
            if name not in closure.libraries and name in image.libraries and _is_missed(name, one, closure, image):
                yield _half(name, image.libraries[name].path, by)
        if one.folders and not provider_files(one, loader):
            folder = " ".join(one.folders)
            yield _half(f"providers in {folder}", folder, by)


def _is_missed(soname: str, one: LibrarySet, closure: Closure, image: Inventory) -> bool:
    """Whether something needs a part of a set that the image alone has, and gets it together with the host's parts.

    A provider for a card that this host has none of is missed by nobody.
    """
    if any(soname in library.elf.needed for library in closure.libraries.values()):
        return True
    path = image.libraries[soname].path
    is_broken = any(
        path in users and not provides(closure.libraries[name].elf.versions_provided, users[path])
        for name, users in image.users.items()
        if name in closure.libraries
    )
    users = image.users.get(soname, {})
    return is_broken and any(not is_optional(user) and not _is_member(user, one, image) for user in users)


def _half(name: str, path: str, by: str) -> Refusal:
    return Refusal(
        path,
        "a set that has to come from one side would be mixed: the host does not have all of it",
        name,
        by,
        f"install the host's package with {name}, or name its folder in the profile's search and sets",
    )


def ordered(versions: "frozenset[str] | dict[str, list[str]]") -> list[str]:
    """Symbol versions with numbers compared as numbers: GLIBC_2.9 before GLIBC_2.34."""

    def key(version: str) -> list[tuple[int, int, str]]:
        parts = version.replace("_", ".").split(".")
        return [(1, int(part), "") if part.isdecimal() else (0, 0, part) for part in parts]

    return sorted(versions, key=key)
