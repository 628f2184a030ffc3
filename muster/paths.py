"""Paths of the project's files (in a clone, in the image, installed), contents of files, and versions of packages."""

import errno
import stat
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
"""The folder with this package: a clone of the project, the image's copy, or a folder of installed packages."""

JOBS = Path(__file__).parent / "jobs"
"""Profiles of sites and fabrics, and templates of job scripts."""


def check_regular(path: Path) -> None:
    """Raises OSError unless `path` is a regular file: a reader of a pipe without a writer would wait for ever."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError(errno.EINVAL, "it is no regular file", str(path))


def content_of(path: Path) -> bytes:
    """The content of a regular file. Raises OSError where there is none, or it can't be read."""
    check_regular(path)
    return path.read_bytes()


def text_of(path: Path) -> str:
    """The content of a regular file as text; empty where there is none, or it can't be read."""
    try:
        return content_of(path).decode(errors="replace")
    except OSError:
        return ""


def image(root: Path = ROOT) -> str:
    """The version and the revision of the container image that this runs in; empty outside of one."""
    import json  # here and not above: a launch has no use for it

    try:
        described = json.loads(text_of(root / "image.json"))
        return described["version"] + (f" ({described['revision'][:12]})" if described.get("revision") else "")
    except (ValueError, KeyError):  # no file, or a damaged one
        return ""


def installed(package: str) -> str | None:
    """The version of a package; None where it is not installed as one, or a site has built it without metadata."""
    from importlib import metadata  # here and not above: a launch has no use for it

    return next((found.version for found in metadata.distributions(name=package)), None)
