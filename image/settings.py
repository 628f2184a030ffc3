"""How this machine reaches its package indexes, for a build to use and to forget.

pip's settings, its CA bundle and apt's proxies are written to files of a private folder; an engine shows them to the
build as secrets, in /run/secrets, and no layer holds them. Folders that pip is told to look in are bound.

Source: https://pip.pypa.io/en/stable/topics/configuration/ (the files, their order, PIP_* above all of them)
"""

import configparser
import re
import shutil
import ssl
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

from train.errors import MusterError

# What of pip's settings says where packages come from; the rest is this machine's own business.
PIP_OPTIONS = ("index-url", "extra-index-url", "find-links", "no-index", "trusted-host", "proxy", "timeout", "retries")
# Of apt's: how to get there, and how far to trust a mirror's dates.
APT_OPTIONS = re.compile(
    r"^Acquire::(https?::(Proxy|Pipeline-Depth|Verify-\w+)|Check-(Valid-Until|Date)|Retries)\b.*;$"
)


@dataclass(frozen=True)
class Settings:
    """What a build is shown of this machine.

    Attributes:
        secrets: files by the name that the recipe knows them by.
        folders: folders in which pip looks for files, and where the build sees each: in /run, so that nothing of this
            machine's paths is left in the image.
    """

    secrets: Mapping[str, Path]
    folders: Mapping[Path, str]


def collect(folder: Path, env: Mapping[str, str], apt_sources: str = "", can_bind: bool = True) -> Settings:
    """This machine's settings, written to files in `folder`, which is private and goes after the build.

    Args:
        folder: an existing folder.
        env: the environment.
        apt_sources: a file in the form of /etc/apt/sources.list, used in place of the base image's own.
        can_bind: whether the engine can show a folder of this machine to a build.

    Raises:
        MusterError: pip is told to look in folders only, and the engine can't show them.
    """
    folders: dict[Path, str] = {}
    options = seen_by_build(pip_options(env), folders)
    if folders and not can_bind:
        options = without_folders(options)
        print(
            f"note: docker can't show folders to a build, pip does without {', '.join(map(str, folders))}", flush=True
        )
        folders = {}
    texts = {
        "pip.conf": "".join(["[global]\n", *(f"{name} = {value}\n" for name, value in sorted(options.items()))]),
        "apt.conf": apt_conf(apt_options(), bool(apt_sources)),
    }
    for name, text in texts.items():
        (folder / name).write_text(text)
    bundle = ca_bundle(env)
    if bundle is not None:
        shutil.copyfile(bundle, folder / "ca.pem")
    if apt_sources:
        shutil.copyfile(apt_sources, folder / "apt.sources")
    return Settings({path.name: path for path in sorted(folder.iterdir())}, folders)


def pip_options(env: Mapping[str, str]) -> dict[str, str]:
    """Those of PIP_OPTIONS that are set, as pip would find them."""
    home = env.get("HOME", "")
    config = env.get("XDG_CONFIG_HOME") or f"{home}/.config"
    files = ["/etc/xdg/pip/pip.conf", "/etc/pip.conf", f"{home}/.pip/pip.conf", f"{config}/pip/pip.conf"]
    found: dict[str, str] = {}
    for path in [*files, env.get("PIP_CONFIG_FILE", "")]:
        parser = configparser.RawConfigParser()
        if not path or not parser.read(path, encoding="utf-8"):
            continue
        for section in ("global", "install"):
            if parser.has_section(section):
                found.update({name.replace("_", "-"): value for name, value in parser.items(section)})
    for name, value in env.items():
        if name.startswith("PIP_"):
            found[name[4:].lower().replace("_", "-")] = value
    return {name: " ".join(found[name].split()) for name in PIP_OPTIONS if found.get(name)}


def seen_by_build(options: Mapping[str, str], folders: dict[Path, str]) -> dict[str, str]:
    """pip's options as they have to be inside the build; the folders of this machine that they name go to `folders`."""
    seen = dict(options)
    for name in ("index-url", "extra-index-url", "find-links"):
        places = []
        for place in options.get(name, "").split():
            parts = urlsplit(place)
            path = Path(unquote(parts.path))
            if parts.scheme in ("", "file") and path.is_dir():
                # The pages of an index in FOLDER/simple point to files beside that folder.
                shown = path.parent if path.name == "simple" else path
                inside = folders.setdefault(shown, f"/run/packages/{len(folders)}")
                place = f"file://{inside}/{path.relative_to(shown)}".rstrip("/.")
            places.append(place)
        if places:
            seen[name] = " ".join(places)
    return seen


def without_folders(options: Mapping[str, str]) -> dict[str, str]:
    """pip's options without the folders of this machine.

    Raises:
        MusterError: nothing else is left to look in.
    """
    if "no-index" in options or options.get("index-url", "").startswith("file:"):
        raise MusterError(
            "docker can't show a folder of this machine to a build, and pip is told to look in nothing else",
            seen=" ".join(f"{name}={value}" for name, value in options.items() if name in ("index-url", "no-index")),
            fix="make image ENGINE=podman",
        )
    left = dict(options)
    for name in ("extra-index-url", "find-links"):
        places = [place for place in options.get(name, "").split() if "/run/packages/" not in place]
        left[name] = " ".join(places)
    return {name: value for name, value in left.items() if value}


def ca_bundle(env: Mapping[str, str]) -> Path | None:
    """The file of certificates that this machine trusts; None where there is none."""
    places = [env.get(name, "") for name in ("PIP_CERT", "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE")]
    places += [ssl.get_default_verify_paths().cafile or "", "/etc/ssl/certs/ca-certificates.crt"]
    return next((Path(place) for place in places if place and Path(place).is_file()), None)


def apt_options() -> list[str]:
    """Lines of this machine's apt configuration that say how to reach a mirror; none without apt."""
    try:
        said = subprocess.run(["apt-config", "dump"], capture_output=True, text=True, timeout=60, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    return [line for line in said.splitlines() if APT_OPTIONS.match(line)]


def apt_conf(options: Sequence[str], has_sources: bool) -> str:
    """apt's configuration for the build."""
    lines = [
        *options,
        # Its own user may not read secrets.
        'APT::Sandbox::User "root";',
        'Acquire::https::CAInfo "/run/secrets/ca.pem";',
    ]
    if has_sources:
        lines += ['Dir::Etc::SourceList "/run/secrets/apt.sources";', 'Dir::Etc::SourceParts "/dev/null";']
    return "".join(f"{line}\n" for line in lines)
