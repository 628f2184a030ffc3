"""The environment of a process: its variables, its host's name, the files that variables name, its container.

Detection reads this and nothing else, so that a recorded environment (recording.py) and the live one go through the
same code. Apptainer passes variables, except with --cleanenv or --containall. Docker and podman pass none.
"""

import os
import re
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from muster.paths import ROOT

NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
"""The names that a shell takes for variables: no other is read from a file, or printed for a shell."""

FILESYSTEM = Path("/")

# An engine that leaves no mark, such as containerd by itself, is noticed only in our own image.
UNKNOWN = "an unknown engine"

# The first variable or file that is there decides: Apptainer is often started inside another container, Docker never
# inside Apptainer. A pod has neither of the files.
_MARKS: tuple[tuple[str, tuple[str, ...], tuple[str, ...]], ...] = (
    ("apptainer", ("APPTAINER_CONTAINER", "SINGULARITY_CONTAINER"), (".singularity.d",)),
    ("podman", (), ("run/.containerenv",)),
    ("docker", (), (".dockerenv",)),
    ("kubernetes", ("KUBERNETES_SERVICE_HOST",), ()),
)


@dataclass(frozen=True)
class Environment(Mapping[str, str]):
    """The variables of one process, as a mapping, and the host it runs on.

    Attributes:
        host: the host's own name (`socket.gethostname()`), or None where a recording lacks it. `$HOSTNAME` is no
            substitute: srun passes that of the submitting host on to every task.
        files: for a recording, the content of the files that variables name, by variable.
        is_live: whether this is the running process: only then may devices, addresses and cores be looked at.
        engine: the engine of the container that the process is in; None if there is none, or none is known.
    """

    variables: Mapping[str, str]
    host: str | None = None
    files: Mapping[str, str] = field(default_factory=dict[str, str])
    is_live: bool = False
    engine: str | None = None

    def __getitem__(self, name: str) -> str:
        return self.variables[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.variables)

    def __len__(self) -> int:
        return len(self.variables)

    def way_in(self) -> str:
        """Advice on passing a job's variables into a container of this process's engine."""
        name = self.engine
        if name == "apptainer":
            return (
                "leave --cleanenv or --containall out of apptainer's options, or in each task: "
                'eval "apptainer exec --cleanenv $(muster env --apptainer-args) IMAGE COMMAND"'
            )
        if name in ("docker", "podman"):
            return f"{name} passes no variables by itself: {name} run $(muster env --docker-args) IMAGE COMMAND"
        return "if this is in a container, pass all of the scheduler's variables into it"

    def bind_option(self, path: str) -> str:
        """The option that shows the file `path` (quoted for a shell) to a container of this process's engine."""
        bind, volume = f"apptainer exec --bind {path}", f"run --volume {path}:{path}:ro"
        options = {"apptainer": bind, "docker": f"docker {volume}", "podman": f"podman {volume}"}
        return options.get(self.engine or "") or f"in a container: {bind}, docker {volume}"


def container_engine(variables: Mapping[str, str], root: Path | None = FILESYSTEM, project: Path = ROOT) -> str | None:
    """The engine of the container that a process is in: apptainer, podman, docker, kubernetes, UNKNOWN; or None.

    Args:
        root: the process's root folder; None where only the variables are known, as in a recording.
        project: the folder of this project: in its image it holds image.json.

    Source: https://apptainer.org/docs/user/latest/environment_and_metadata.html (APPTAINER_CONTAINER)
    Source: https://docs.podman.io/en/latest/markdown/podman-run.1.html (/run/.containerenv)
    """
    for name, marks, files in _MARKS:
        if any(mark in variables for mark in marks) or (root and any((root / file).exists() for file in files)):
            return name
    return UNKNOWN if root and (project / "image.json").is_file() else None


def live() -> Environment:
    """The environment of this process."""
    variables = dict(os.environ)
    return Environment(variables, socket.gethostname(), is_live=True, engine=container_engine(variables))
