"""The container that this process is in, and what lets a job's variables and files into it.

Apptainer passes the environment, unless it is told not to (--cleanenv, --containall). Docker and podman pass nothing.
"""

from collections.abc import Mapping
from pathlib import Path

from muster import ROOT

FILESYSTEM = Path("/")

# Of an engine that leaves no mark, such as containerd by itself, only our own image tells.
UNKNOWN = "an unknown engine"

# The first variable or file that is there decides: Apptainer is often started inside another container, Docker never
# inside Apptainer. A pod has neither of the files.
_MARKS: tuple[tuple[str, tuple[str, ...], tuple[str, ...]], ...] = (
    ("apptainer", ("APPTAINER_CONTAINER", "SINGULARITY_CONTAINER"), (".singularity.d",)),
    ("podman", (), ("run/.containerenv",)),
    ("docker", (), (".dockerenv",)),
    ("kubernetes", ("KUBERNETES_SERVICE_HOST",), ()),
)


def engine(variables: Mapping[str, str], root: Path | None = FILESYSTEM, project: Path = ROOT) -> str | None:
    """The engine of the container that a process is in: apptainer, podman, docker, kubernetes, UNKNOWN; or None.

    Args:
        variables: its variables.
        root: its root; None where only the variables are known, as in a recording.
        project: the folder of this project: in its image it holds image.json.

    Source: https://apptainer.org/docs/user/latest/environment_and_metadata.html (APPTAINER_CONTAINER)
    Source: https://docs.podman.io/en/latest/markdown/podman-run.1.html (/run/.containerenv)
    """
    for name, marks, files in _MARKS:
        if any(mark in variables for mark in marks) or (root and any((root / file).exists() for file in files)):
            return name
    return UNKNOWN if root and (project / "image.json").is_file() else None


def way_in(name: str | None, is_own_pid_namespace: bool = False) -> str:
    """What lets a job's variables into a container of this engine."""
    if name == "apptainer":
        option = "--containall" if is_own_pid_namespace else "--cleanenv"
        return (
            f"leave {option} out of apptainer's options, or in each task: "
            f'eval "apptainer exec {option} $(muster env --apptainer-args) IMAGE COMMAND"'
        )
    if name in ("docker", "podman"):
        return f"{name} passes none by itself: {name} run $(muster env --docker-args) IMAGE COMMAND"
    return "into a container pass all of the scheduler's variables"


def bind(name: str | None, path: str) -> str:
    """The option that shows the file `path`, quoted for a shell, to a container of this engine."""
    options = {
        "apptainer": f"apptainer exec --bind {path}",
        "docker": f"docker run --volume {path}:{path}:ro",
        "podman": f"podman run --volume {path}:{path}:ro",
    }
    return options.get(name or "") or f"in a container: {options['apptainer']}, docker run -v {path}:{path}:ro"
