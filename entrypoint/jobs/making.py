"""A site's name and a wanted job -> the script; and those scripts that are kept in jobs/."""

import re
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from muster import JOBS
from muster.entrypoint.jobs import kubernetes, quoting, script
from muster.entrypoint.jobs.script import EXTENSIONS, Wanted
from muster.entrypoint.sites import profiles, recognise
from muster.entrypoint.sites.recognise import Recognised
from muster.errors import MusterError

NOTHING_FURTHER: Mapping[str, Any] = MappingProxyType({})


def make(
    name: str,
    wanted: Wanted,
    kind: str | None = None,
    file: str | None = None,
    further: Mapping[str, Any] = NOTHING_FURTHER,
) -> str:
    """The script, or the manifest of that kind, for the site of that name or file.

    Args:
        name: the site's, or its profile's file.
        wanted: the job.
        kind: of the manifest, where it is to be one.
        file: the script's, as its user will type it; None names it after the site.
        further: the options that only a manifest has, as far as they were given; --device is a tuple.

    Raises:
        MusterError: there is no such profile, or it can't be.
    """
    for option, value in (("SITE", name), ("--output-file", file or "")):
        quoting.text(value, option)
    site = profiles.load_site(name)
    # In a job the working directory may be another one.
    known = str(Path(name).absolute()) if "/" in name or name.endswith(".toml") else name
    recognise.check(Recognised(known, f"refused in the profile {known}", site))
    if site.scheduler == "kubernetes":
        return kubernetes.make(known, site, wanted, kind, further)
    words = (*(() if kind is None else ("--kind", kind)), *kubernetes.typed(further))
    if words:
        raise MusterError(
            f"{site.title} takes a script, and no manifest", seen=quoting.words(words), fix=f"muster job {name}"
        )
    return script.script(known, site, wanted, file or f"{Path(name).stem}.{EXTENSIONS[site.scheduler]}")


def kept() -> Mapping[Path, str]:
    """The files of jobs/ that are made of the profiles there, and what they hold."""
    files: dict[Path, str] = {}
    for name in profiles.site_names():
        site = profiles.load_site(name)
        if site.refused is not None:
            continue
        if site.scheduler in EXTENSIONS:
            path = JOBS / f"{name}.{EXTENSIONS[site.scheduler]}"
            files[path] = make(name, Wanted(), file=f"jobs/{path.name}")
        else:
            files |= {JOBS / f"{name}-{kind}.yaml": make(name, Wanted(), kind) for kind in kubernetes.KINDS}
    return files


def stale() -> list[Path]:
    """Scripts in jobs/ that no profile makes any more."""
    made = re.compile(rf".*\.({'|'.join([*EXTENSIONS.values(), 'yaml'])})")
    return sorted(path for path in JOBS.iterdir() if made.fullmatch(path.name) and path not in kept())


def main() -> None:
    """Writes the kept files, and removes those that no profile makes any more."""
    for path, text in kept().items():
        path.write_text(text, encoding="utf-8")
        path.chmod(0o755 if path.suffix != ".yaml" else 0o644)
    for path in stale():
        path.unlink()
        print(f"removed: {path.name}", file=sys.stderr)


if __name__ == "__main__":
    main()
