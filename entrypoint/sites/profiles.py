"""The profiles of sites and fabrics, read from jobs/sites and jobs/fabrics, and checked.

The schema has the keys and the types of their values; the rules below refuse invalid values of the right type. The
values end up in job scripts, in variables and in messages: none may contain a line break.
"""

import difflib
import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar, cast

import msgspec

from muster.entrypoint.detect import families
from muster.entrypoint.sites import recognise
from muster.entrypoint.sites.schema import MEANINGS, Context, Fabric, Libraries, Site, facts, holds, resolve
from muster.errors import MusterError

SITES = recognise.SITES
FABRICS = SITES.parent / "fabrics"

P = TypeVar("P", Site, Fabric)

_TIME_LIMIT = r"--time\b(?!-min)|walltime=|\bh_rt=|^-[tW] ?[0-9]+(:|[smhd]?(\s|$))"
# Keys of folders that a container's command gets by --bind.
_BINDS = ("storage.scratch", "storage.node_local", "container.binds")


class BadProfile(MusterError):
    """A profile that can't be used, with its problems: one sentence each."""

    def __init__(self, path: Path, problems: tuple[str, ...]) -> None:
        super().__init__(
            "the profile can't be used",
            seen=f"{path}: {'; '.join(problems)}",
            fix=f"correct {path.name}; docs/sites.md explains each key, and muster site FILE checks it again",
        )
        self.problems = problems


def names_in(folder: Path) -> tuple[str, ...]:
    """The names of the profiles in `folder`, sorted."""
    return tuple(sorted(path.stem for path in folder.glob("*.toml")))


def path_of(name_or_path: str | Path, folder: Path = SITES) -> Path:
    """The file of a site's profile, by its name in `folder`, or by a path: with a slash in it, or .toml at its end."""
    text = str(name_or_path)
    return Path(text) if "/" in text or text.endswith(".toml") else folder / f"{text}.toml"


def load_site(name_or_path: str | Path, folder: Path = SITES, fabrics: Path = FABRICS) -> Site:
    """The valid profile of that name in `folder`, or in that file.

    Args:
        name_or_path: as for `path_of`.
        folder: the folder of the sites' profiles.
        fabrics: the folder of the fabrics that it may extend.

    Raises:
        MusterError: there is none, or it is no valid profile.
    """
    path = path_of(name_or_path, folder)
    if path.parent == folder and path.stem not in names_in(folder):
        raise _unknown("site", str(name_or_path), names_in(folder))
    return _load(path, Site, names_in(fabrics))


def load_fabric(name: str, folder: Path = FABRICS) -> Fabric:
    """The valid profile of the fabric of that name.

    Raises:
        MusterError: there is none, or it is no valid profile.
    """
    if name not in names_in(folder):
        raise _unknown("fabric", name, names_in(folder))
    return _load(folder / f"{name}.toml", Fabric)


def fabrics(folder: Path = FABRICS) -> Mapping[str, Fabric]:
    """All fabrics' profiles, by name."""
    return {name: load_fabric(name, folder) for name in names_in(folder)}


def libraries(site: Site | None, fabric: Fabric, context: Context) -> Libraries:
    """The host's libraries to take in a context: each value is the site's, or the fabric's where the site has none."""
    found = msgspec.structs.asdict(fabric.libraries)
    if site is not None:
        found |= {name: fact for name, fact in msgspec.structs.asdict(site.libraries).items() if fact is not None}
    return Libraries(**{name: fact for name, fact in found.items() if fact is not None and holds(fact.when, context)})


def variables(site: Site | None, fabric: Fabric, context: Context) -> dict[str, str]:
    """The site's and the fabric's variables whose conditions hold; the site's take precedence."""
    return resolve(fabric.variables, context) | (resolve(site.variables, context) if site else {})


def _load(path: Path, shape: type[P], fabrics: tuple[str, ...] = ()) -> P:
    try:
        text = path.read_text(encoding="utf-8-sig")
        tables = tomllib.loads(text)
        profile = msgspec.convert(tables, shape)
        head = tomllib.loads(recognise.head(text))
    except FileNotFoundError:
        fix = "a file that exists, or the name of a profile: muster site list"
        raise MusterError("there is no such profile", seen=str(path), fix=fix) from None
    except msgspec.ValidationError as reason:
        problem = str(reason)
        for words, meaning in MEANINGS.items():
            problem = problem.replace(words, meaning)
        raise BadProfile(path, (problem,)) from None
    except recognise.UNREADABLE as reason:
        raise MusterError("the profile can't be read", seen=f"{path}: {reason}", fix=f"correct {path}") from None
    problems = list(_rules(profile, fabrics))
    if head.get("recognise") != tables.get("recognise"):
        problems.append('recognise: belongs before the first [table], as recognise.hosts = {value = ["..."], ...}')
    if problems:
        raise BadProfile(path, tuple(problems))
    return profile


def _rules(profile: Site | Fabric, fabrics: tuple[str, ...]) -> Iterator[str]:
    if isinstance(profile, Site):
        if profile.scheduler not in families.schedulers():
            yield f'scheduler: "{profile.scheduler}" is none of {" ".join(families.schedulers())}'
        if profile.extends is not None and profile.extends not in fabrics:
            yield f'extends: there is no fabric "{profile.extends}"; there are: {" ".join(fabrics)}'
    if not profile.title.strip():
        yield "title: is empty"
    for key, fact in facts(profile):
        if fact.source not in profile.sources:
            there = " ".join(profile.sources) or "none"
            yield f'{key}.source: there is no [sources] key "{fact.source}"; there are: {there}'
        if fact.when is not None and key.startswith("recognise."):
            yield f"{key}.when: keys of recognise take no condition"
        for text in _texts(fact.value):
            if wrong := _wrong(key, text):
                yield f'{key}: "{text}" {wrong}'


def _texts(value: Any) -> list[str]:
    """The texts of a value, which may be one, a list of them, or a table of variables."""
    if isinstance(value, dict):
        return list(cast("dict[str, str]", value).values())
    values = cast("tuple[Any, ...]", value) if isinstance(value, tuple) else (value,)
    return [text for text in values if isinstance(text, str)]


def _wrong(key: str, text: str) -> str | None:
    """The problem with a `text` in the value of `key`, or None."""
    if not text.strip() and not key.startswith("variables."):
        return "is empty: leave out what is not known"
    if key == "launch.directives" and text.startswith("#"):
        return "leave its #SBATCH, #PBS, #BSUB or #$ out"
    if key == "launch.directives" and re.search(
        r"--nodes\b|-nnodes\b|^-N ?[0-9]+(\s|$)|\bselect=|" + _TIME_LIMIT, text
    ):
        return "asks for nodes or for time: muster job --nodes and --time do that"
    if key == "launch.directives" and re.search(r"--gres\S*\bgpu\b|--gpus|(?<!-)-gpu\b|ngpus|^-G ?[0-9]+(\s|$)", text):
        return "asks for GPUs: launch.gpus does that, as in --gres=gpu:{gpus}"
    is_folder = key in _BINDS or key.startswith("caches.")
    if is_folder and re.search(r"""^~|[$`"'\\;&|<>()*?!]""", recognise.VARIABLE.sub("", text)):
        return "is no plain folder: $NAME or ${NAME} may be in it, and nothing else that a shell would act on"
    if key in _BINDS and "," in text:
        return "has a comma: a container's command would take the rest for another folder"
    if key.startswith("recognise.") and not re.search(r"[A-Za-z0-9]", re.sub(r"\[[^]]*\]", "", text)):
        return "matches everything: every host would be this site"
    return None


def _unknown(what: str, name: str, names: tuple[str, ...]) -> MusterError:
    near = "".join(f"{each}, or " for each in difflib.get_close_matches(name.lower(), names, n=1))
    fix = f"{near}one of these: {' '.join(names) or 'none'}"
    return MusterError(f"there is no {what} of this name", seen=name, fix=fix)
