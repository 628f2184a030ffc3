"""FabricPlan -> Staging: links to the host's files in a folder of this user's own, and the variables that lead there.

The process is exec'd away, so nobody could remove the folder: it is named by what is in it, all tasks of a node share
it, and the next run finds it again.
"""

import hashlib
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from entrypoint import homes
from entrypoint.fabric.model import FABRIC_ROOT, FabricPlan
from train.errors import MusterError

NCCL = "libnccl.so.2"
LINKED_AT = FABRIC_ROOT / "lib"
"""Where the options that `muster fabric binds` prints put the libraries."""

FIX = "TMPDIR=FOLDER, one that this user may write to; or --fabric off"

# The loader takes these in LD_LIBRARY_PATH and LD_PRELOAD for separators or for words of its own, NCCL the comma.
_UNUSABLE = re.compile(r"[\s:;,$]")
# libibverbs opens a provider by the file's name, mlx5 -> libmlx5-rdmav34.so, and not by its soname.
_PROVIDER = re.compile(r"(lib.+)-rdmav\d+\.so")


@dataclass(frozen=True)
class Use:
    """What decides which variables a process gets.

    Attributes:
        is_several: whether NCCL has to cross from node to node, so that a network it can't have is an error.
        interface: the one that the user named, which no profile may change.
        host_nccl: the host's NCCL, as it is seen here; None where the image's own is used.
        interfaces: the names of those that the process will see; None takes the host's.
    """

    is_several: bool = False
    interface: str | None = None
    host_nccl: Path | None = None
    interfaces: tuple[str, ...] | None = None


@dataclass(frozen=True)
class Staging:
    """What is done with a plan.

    Attributes:
        folder: where the libraries are found.
        links: the file that each name in the folder leads to; empty where nothing has to be made.
        variables: those that the process gets.
        notes: one line for each thing that the user should know.
    """

    folder: Path
    links: Mapping[str, str] = field(default_factory=dict[str, str])
    variables: Mapping[str, str] = field(default_factory=dict[str, str])
    notes: tuple[str, ...] = ()


def of_host(plan: FabricPlan, env: Mapping[str, str], use: Use) -> Staging:
    """The staging of what `plan` takes of the host that is mounted at its finding's root. Nothing is made yet.

    Raises:
        MusterError: a library has a name that can't be linked, or there is no folder for the links.
    """
    # A link's target is read from the link's own folder, and not from this one.
    root = plan.finding.root.absolute()
    links = {each.soname: f"{root}{each.path}" for each in plan.injected}
    if use.host_nccl:
        links[NCCL] = str(use.host_nccl.absolute())
    for name in links:
        if name in ("", ".", "..") or "/" in name or _UNUSABLE.search(name):
            raise MusterError(
                "a library of the host has a name that can't be linked",
                seen=f"{name!r}, {links[name]}",
                fix="--fabric off, and tell whoever installed it",
            )
    folder = _place(links, env) if links else LINKED_AT
    winners = [each.soname for each in plan.injected if each.wins]
    variables, notes = settings(plan, env, use, folder if links else None, tuple(links), winners)
    return Staging(folder, links, variables, notes)


def of_binds(plan: FabricPlan, env: Mapping[str, str], use: Use, folder: Path = LINKED_AT) -> Staging:
    """The staging where each library is bound into the container at `folder`, under its own name."""
    names = [each.soname for each in plan.injected] + [NCCL] * (use.host_nccl is not None)
    variables, notes = settings(plan, env, use, folder if names else None, names, names)
    return Staging(folder, {}, variables, notes)


def settings(
    plan: FabricPlan,
    env: Mapping[str, str],
    use: Use,
    folder: Path | None,
    names: Sequence[str],
    winners: Iterable[str],
) -> tuple[dict[str, str], tuple[str, ...]]:
    """The variables that lead to the libraries `names` in `folder`, and a note for each value of the user's that stays.

    Args:
        winners: those of which no copy may be found before this one.
    """
    wanted = {name: value for name, value in plan.variables.items() if _fits(name, value, plan, use)}
    forced: dict[str, str] = {}
    if folder is not None:
        forced["LD_LIBRARY_PATH"] = on_path(folder, env.get("LD_LIBRARY_PATH", ""), winners)
        providers = [str(folder / found[1]) for name in names if (found := _PROVIDER.fullmatch(name))]
        # Of the two names for the same thing libibverbs reads the older one first.
        if providers and "RDMAV_DRIVERS" not in env:
            wanted["IBV_DRIVERS"] = ":".join(providers)
        if plan.plugin:
            wanted["NCCL_NET_PLUGIN"] = str(folder / plan.plugin)
        if NCCL in names:
            # libtorch_cuda.so finds NCCL by its own DT_RPATH, which comes before LD_LIBRARY_PATH.
            others = [path for path in re.split(r"[\s:]+", env.get("LD_PRELOAD", "")) if path]
            preloaded = str(folder / NCCL)
            forced["LD_PRELOAD"] = ":".join(dict.fromkeys([preloaded, *others]))
    if plan.net and use.is_several:
        wanted["NCCL_NET"] = plan.net
    notes = [
        f"{name}={env[name]} is yours: it was kept"
        for name in sorted(wanted)
        if env.get(name, wanted[name]) != wanted[name]
    ]
    return forced | {name: value for name, value in wanted.items() if name not in env}, tuple(notes)


def _fits(name: str, value: str, plan: FabricPlan, use: Use) -> bool:
    """Whether the profile's value can be used: NCCL and gloo fail where no interface is called so."""
    if not name.endswith("_SOCKET_IFNAME"):
        return True
    if use.interface is not None:
        return False
    interfaces = use.interfaces
    if interfaces is None:
        interfaces = tuple(each.name for each in plan.finding.interfaces)
    if not interfaces or value.startswith("^"):
        return True
    if value.startswith("="):
        return any(part in interfaces for part in value[1:].split(","))
    return any(each.startswith(part) for each in interfaces for part in value.split(",") if part)


def on_path(folder: Path, path: str, winners: Iterable[str]) -> str:
    """The library path `path` with `folder` last, or first where another folder on it has one of `winners`.

    What --nv, forward compatibility or the user put there stays before it.
    """
    others = [element for element in path.split(os.pathsep) if element not in ("", str(folder))]
    is_first = any(os.path.lexists(Path(element) / name) for element in others for name in winners)
    return os.pathsep.join([str(folder), *others] if is_first else [*others, str(folder)])


def _place(links: Mapping[str, str], env: Mapping[str, str]) -> Path:
    """The folder for `links`: one that holds just them and is ours, or a name that nobody has."""
    content = "\0".join(f"{name}\0{target}" for name, target in sorted(links.items()))
    digest = hashlib.sha256(os.fsencode(content)).hexdigest()[:16]
    temporary = _temporary(env)
    if temporary is None:
        raise MusterError(
            "no temporary folder can be written to, for links to the host's libraries",
            seen=f"TMPDIR={env.get('TMPDIR', '')} as uid {os.getuid()}",
            fix=FIX,
        )
    name = f"muster-fabric-{os.getuid()}-{digest}"
    for count in range(100):
        folder = temporary / (f"{name}-{count}" if count else name)
        if not os.path.lexists(folder) or is_ours(folder, links):
            return folder
    raise MusterError(
        "others took all the names for a folder of links to the host's libraries", seen=str(temporary / name), fix=FIX
    )


def _temporary(env: Mapping[str, str]) -> Path | None:
    """The first folder that can be written to, and that can stand in a library path."""
    named = [Path(env[name]).absolute() for name in ("TMPDIR", "TEMP", "TMP") if env.get(name)]
    for folder in (*named, *homes.TEMPORARY, homes.SHARED_MEMORY):
        if os.path.isdir(folder) and os.access(folder, os.W_OK | os.X_OK) and not _UNUSABLE.search(str(folder)):
            return folder
    return None


def is_ours(folder: Path, links: Mapping[str, str]) -> bool:
    """Whether `folder` holds `links` and nothing else, and nobody but this user can change that."""
    try:
        found = folder.lstat()
        if not (stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and stat.S_IMODE(found.st_mode) == 0o700):
            return False
        return {entry.name: os.readlink(entry.path) for entry in os.scandir(folder)} == dict(links)
    except OSError:
        return False


def make(staging: Staging) -> None:
    """Makes the folder with its links, whole or not at all; all tasks of a node may do so at once.

    Raises:
        MusterError: it can't be made, or somebody else has its name by now.
    """
    if not staging.links or is_ours(staging.folder, staging.links):
        return
    fresh: Path | None = None
    try:
        fresh = Path(tempfile.mkdtemp(prefix=f"{staging.folder.name}.", dir=staging.folder.parent))
        for name, target in staging.links.items():
            (fresh / name).symlink_to(target)
        # Onto a folder with something in it, or another's, this fails.
        fresh.rename(staging.folder)
    except OSError as reason:
        if fresh is not None:
            shutil.rmtree(fresh, ignore_errors=True)
        if is_ours(staging.folder, staging.links):
            return
        raise MusterError(
            f"no folder can be made for links to the host's libraries: {reason.strerror}",
            seen=str(staging.folder),
            fix=FIX,
        ) from None
