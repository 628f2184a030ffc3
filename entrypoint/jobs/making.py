"""A site's name and a wanted job -> the script; and those scripts that are kept in jobs/."""

import re
import sys
from collections.abc import Mapping
from pathlib import Path

from entrypoint import ROOT
from entrypoint.jobs import context, kubernetes, manifest, quoting, render
from entrypoint.jobs.context import EXTENSIONS
from entrypoint.jobs.manifest import Further
from entrypoint.jobs.wanted import Wanted
from entrypoint.sites import profiles
from entrypoint.sites.schema import Site
from train.errors import MusterError

JOBS = ROOT / "jobs"
NOTHING_FURTHER = Further()


def make(
    name: str,
    wanted: Wanted,
    kind: str | None = None,
    file: str | None = None,
    further: Further = NOTHING_FURTHER,
) -> str:
    """The script, or the manifest of that kind, for the site of that name or file.

    Args:
        name: the site's, or its profile's file.
        wanted: the job.
        kind: of the manifest, where it is to be one.
        file: the script's, as its user will type it; None names it after the site.
        further: what only a manifest can be asked for.

    Raises:
        MusterError: there is no such profile, or it can't be.
    """
    for option, value in (("SITE", name), ("--output-file", file or "")):
        quoting.text(value, option)
    site = _load(name)
    # In a job the working directory may be another one.
    known = str(Path(name).absolute()) if is_file(name) else name
    context.check(known, site)
    if site.scheduler == "kubernetes":
        return manifest.make(known, site, wanted, kind, further)
    words = (*(() if kind is None else ("--kind", kind)), *further.words)
    if words:
        raise MusterError(
            f"{site.title} takes a script, and no manifest", seen=quoting.words(words), fix=f"muster job {name}"
        )
    return render.script(known, site, wanted, file or f"{Path(name).stem}.{EXTENSIONS[site.scheduler]}")


def _load(name: str) -> Site:
    try:
        return profiles.load_site(name)
    except profiles.BadProfile:
        raise
    except MusterError as error:
        fix = error.fix.replace("--site ", "muster job ").replace("muster site list", "muster job list")
        raise MusterError(error.wrong, seen=error.seen, fix=fix) from None


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
            files |= {JOBS / f"{name}-{kind}.yaml": make(name, Wanted(), kind) for kind in kinds()}
    return files


def stale() -> list[Path]:
    """Scripts in jobs/ that no profile makes any more."""
    made = re.compile(rf".*\.({'|'.join([*EXTENSIONS.values(), 'yaml'])})")
    return sorted(path for path in JOBS.iterdir() if made.fullmatch(path.name) and path not in kept())


def kinds() -> tuple[str, ...]:
    """The kinds of manifests for Kubernetes."""
    return kubernetes.KINDS


def is_file(name: str) -> bool:
    """Whether a site is named by its file."""
    return "/" in name or name.endswith(".toml")


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
