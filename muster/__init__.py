"""Muster: works out where it is, and trains PyTorch there.

`entrypoint` leads from a scheduler's variables to an exec, `train` is one rank from its variables to its exit code,
`check` looks at nodes and measures their network, `report` shows what runs left. The modules beside these folders
(errors, exit codes, options) are for all of them, and load no torch.
"""

TYPE_CHECKING = False
if TYPE_CHECKING:
    from pathlib import Path

    ROOT: Path
    """The folder with this package: a clone of the project, the image's copy, or a folder of installed packages."""
    JOBS: Path
    """Profiles of sites and fabrics, and templates of job scripts."""


def __getattr__(name: str) -> "Path":
    # Here and not above: pathlib takes longer to load than all that Ctrl-C needs to have its answer (main.py).
    from pathlib import Path

    if name == "ROOT":
        return Path(__file__).resolve().parent.parent
    if name == "JOBS":
        return Path(__file__).parent / "jobs"
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
