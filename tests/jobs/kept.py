"""The job scripts and manifests in jobs/: `make jobs` renders them again from the profiles there."""

from collections.abc import Mapping
from pathlib import Path

from muster.entrypoint.jobs import kubernetes, making
from muster.entrypoint.jobs.script import EXTENSIONS, Wanted
from muster.entrypoint.sites import profiles
from muster.paths import JOBS


def kept() -> Mapping[Path, str]:
    """The files, with the contents that they have to have."""
    files: dict[Path, str] = {}
    for name in profiles.names_in(profiles.SITES):
        site = profiles.load_site(name)
        if site.refused is not None:
            continue
        if site.scheduler in EXTENSIONS:
            path = JOBS / f"{name}.{EXTENSIONS[site.scheduler]}"
            files[path] = making.make(name, Wanted(), f"jobs/{path.name}")
        else:
            files |= {JOBS / f"{name}-{kind}.yaml": making.make(name, Wanted(kind=kind)) for kind in kubernetes.KINDS}
    return files


def main() -> None:
    for path, text in kept().items():
        path.write_text(text, encoding="utf-8")
        path.chmod(0o755 if path.suffix != ".yaml" else 0o644)


if __name__ == "__main__":
    main()
