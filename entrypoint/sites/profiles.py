"""The profiles of sites and fabrics, read from jobs/sites and jobs/fabrics."""

import difflib
import tomllib
from collections.abc import Mapping
from datetime import date
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from entrypoint.sites import checking, recognise
from entrypoint.sites.conditions import Context, resolve
from entrypoint.sites.schema import Fabric, Libraries, Site
from train.errors import MusterError

SITES = recognise.SITES
FABRICS = SITES.parent / "fabrics"

P = TypeVar("P", Site, Fabric)


class BadProfile(MusterError):
    """A profile that can't be used, with all that is wrong with it: one sentence each, which begins with the key."""

    def __init__(self, path: Path, problems: tuple[str, ...]) -> None:
        what = "a value" if len(problems) == 1 else f"{len(problems)} values"
        super().__init__(
            f"the profile has {what} that can't be used",
            seen=f"{path}: {'; '.join(problems)}",
            fix=f"mend {path.name}; docs/sites.md tells what each key means, and muster site check FILE looks again",
        )
        self.problems = problems


def site_names(folder: Path = SITES) -> tuple[str, ...]:
    """The names of the sites' profiles, sorted."""
    return tuple(sorted(path.stem for path in folder.glob("*.toml")))


def fabric_names(folder: Path = FABRICS) -> tuple[str, ...]:
    """The names of the fabrics' profiles, sorted."""
    return tuple(sorted(path.stem for path in folder.glob("*.toml")))


def load_site(
    name_or_path: str | Path, folder: Path = SITES, fabrics: Path = FABRICS, today: date | None = None
) -> Site:
    """The profile of that name in `folder`, or in that file, and nothing wrong with it.

    Args:
        name_or_path: whatever has a slash in it, or ends with .toml, is a path.
        folder: of the sites' profiles.
        fabrics: the folder of those that it may extend.
        today: the day after which nobody can have read a source; None takes the clock's.

    Raises:
        MusterError: there is none, or it is no valid profile.
    """
    return _load(path_of(name_or_path, folder), Site, fabric_names(fabrics), today)


def load_fabric(name: str, folder: Path = FABRICS) -> Fabric:
    """The fabric's profile of that name, and nothing wrong with it.

    Raises:
        MusterError: there is none, or it is no valid profile.
    """
    path = folder / f"{name}.toml"
    if name not in fabric_names(folder):
        raise _unknown("fabric", name, fabric_names(folder), "--fabric {name}")
    return _load(path, Fabric)


def fabrics(folder: Path = FABRICS) -> Mapping[str, Fabric]:
    """All fabrics' profiles, by name."""
    return {name: load_fabric(name, folder) for name in fabric_names(folder)}


def libraries(site: Site | None, fabric: Fabric) -> Libraries:
    """The host's libraries to take: what the site sets, and the fabric's where it sets none."""
    if site is None:
        return fabric.libraries
    own = {name: getattr(site.libraries, name) for name in Libraries.__struct_fields__}
    return msgspec.structs.replace(fabric.libraries, **{name: fact for name, fact in own.items() if fact is not None})


def variables(site: Site | None, fabric: Fabric | None, context: Context) -> dict[str, str]:
    """The variables of both whose conditions hold; the site's win."""
    of_fabric = resolve(fabric.variables, context) if fabric else {}
    return of_fabric | (resolve(site.variables, context) if site else {})


def path_of(name_or_path: str | Path, folder: Path = SITES) -> Path:
    """The file of a site's profile, by its name or its own path.

    Raises:
        MusterError: there is none.
    """
    text = str(name_or_path)
    if isinstance(name_or_path, Path) or "/" in text or text.endswith(".toml"):
        path = Path(text)
        if not _is_file(path):
            raise MusterError("there is no such profile", seen=text, fix="--site FILE, or --site NAME of these: "
                              + " ".join(site_names(folder)))  # fmt: skip
        return path
    path = folder / f"{text}.toml"
    if text not in site_names(folder):
        raise _unknown("site", text, site_names(folder), "--site {name}")
    return path


def read(path: Path) -> dict[str, Any]:
    """The tables of a profile's file, whatever they are.

    Raises:
        MusterError: it can't be read, or is no TOML.
    """
    try:
        return tomllib.loads(text_of(path))
    except (ValueError, RecursionError) as reason:
        # One of syntax ends with "(at line 3, column 7)"; numbers may be too long, tables too deep.
        raise MusterError("the profile is no TOML", seen=f"{path}: {reason}", fix=f"mend {path.name}") from None


def text_of(path: Path) -> str:
    """What a profile's file holds.

    Raises:
        MusterError: it can't be read.
    """
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as reason:
        raise MusterError("the profile can't be read", seen=f"{path}: {reason}", fix="--site FILE") from None


def _load(path: Path, shape: type[P], fabrics: tuple[str, ...] = (), today: date | None = None) -> P:
    tables = read(path)
    try:
        problems = checking.problems(tables, shape, fabrics, today or date.today())
    except RecursionError:
        raise MusterError("the profile's tables are too deep", seen=str(path), fix=f"mend {path.name}") from None
    if "recognise" in tables and _head(path).get("recognise") != tables["recognise"]:
        problems.append('recognise: belongs before the first [table], as recognise.hosts = {value = ["..."], ...}')
    if problems:
        raise BadProfile(path, tuple(problems))
    try:
        return msgspec.convert(tables, shape)
    except msgspec.ValidationError as reason:
        raise BadProfile(path, (str(reason),)) from None


def _is_file(path: Path) -> bool:
    """Whether there is such a file.

    Raises:
        MusterError: it can't be told: its name is too long, or its folder is closed to this user.
    """
    try:
        return path.is_file()
    except OSError as reason:
        raise MusterError("the profile can't be read", seen=f"{path}: {reason.strerror}", fix="--site FILE") from None


def _head(path: Path) -> dict[str, Any]:
    """The tables of a profile's head; none where a line of a longer value was taken for the first table."""
    try:
        return tomllib.loads(recognise.head(text_of(path)))
    except ValueError:
        return {}


def _unknown(what: str, name: str, names: tuple[str, ...], fix: str) -> MusterError:
    nearest = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return MusterError(
        f"there is no {what} of this name",
        seen=f"{name}; there are: {' '.join(names) or 'none'}",
        fix=fix.format(name=(nearest or names or ("off",))[0]) + ("; muster site list" if what == "site" else ""),
    )
