"""Where the project's files are: in a clone, in the image, or among installed packages."""

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
"""The folder with this package: a clone of the project, the image's copy, or a folder of installed packages."""

JOBS = Path(__file__).parent / "jobs"
"""Profiles of sites and fabrics, and templates of job scripts."""
