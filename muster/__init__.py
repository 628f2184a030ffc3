"""Muster: works out where it is, and trains PyTorch there.

`entrypoint` leads from a scheduler's variables to an exec, `train` is one rank from its variables to its exit code,
`check` looks at nodes and measures their network, `report` shows what runs left. The modules beside these folders
(errors, exit codes, options) are for all of them, and load no torch.
"""

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
"""The folder with this package: a clone of the project, the image's copy of it, or a folder of installed packages."""

JOBS = Path(__file__).parent / "jobs"
"""Profiles of sites and fabrics, and templates of job scripts."""
