"""Where the project's files are: in a clone, in the image, or among installed packages; and what a file says."""

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
"""The folder with this package: a clone of the project, the image's copy, or a folder of installed packages."""

JOBS = Path(__file__).parent / "jobs"
"""Profiles of sites and fabrics, and templates of job scripts."""


def text_of(path: Path) -> str:
    """The content of a file; nothing where it can't be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
