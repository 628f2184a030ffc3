"""What a process sees of its job: its variables, its host's name, the files that variables name.

Detectors read this and nothing else, so a recorded environment and the live one go through the same code.

A recording, as `muster detect --env-file` reads it:

    # source:  Slurm 22.05.8, srun -N2
    # host:    node02
    SLURM_JOB_ID=9
    --- file PBS_NODEFILE
    node01
"""

import os
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from muster.entrypoint import container
from muster.errors import MusterError


@dataclass(frozen=True)
class Environment(Mapping[str, str]):
    """The variables of one process, as a mapping, and the host it runs on.

    Attributes:
        variables: name to value.
        host: the host's own name (`socket.gethostname()`), or None where a recording does not tell. `$HOSTNAME` is
            no substitute: srun hands the submitting host's on to every task.
        files: for a recording, the content of the files that variables name, by variable.
        is_live: whether this is the running process: only then may devices, addresses and cores be looked at.
        engine: that of the container which the process is in, as far as it is known.
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


def live() -> Environment:
    """The environment of this process."""
    variables = dict(os.environ)
    return Environment(variables, socket.gethostname(), is_live=True, engine=container.engine(variables))


def load(path: Path) -> Environment:
    """The environment that the recording at `path` holds.

    Raises:
        MusterError: the file can't be read, or a line of it is neither a comment nor NAME=VALUE.
    """
    fix = "muster detect --env-file FILE, with a file of NAME=VALUE lines, as `env` prints them"
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as reason:
        raise MusterError("the recorded environment can't be read", seen=f"{path}: {reason}", fix=fix) from None
    variables: dict[str, str] = {}
    files: dict[str, list[str]] = {}
    host: str | None = None
    lines: list[str] | None = None
    for number, line in enumerate(text.splitlines(), start=1):
        if line.startswith("--- file "):
            lines = files.setdefault(line.removeprefix("--- file ").strip(), [])
        elif lines is not None:
            lines.append(line)
        elif line.startswith("#"):
            key, _, value = line[1:].partition(":")
            if key.strip() == "host":
                host = value.strip() or None
        elif line.strip():
            name, equals, value = line.partition("=")
            if not equals or not name.strip():
                raise MusterError(
                    "a recorded environment has a line that is no NAME=VALUE",
                    seen=f"{path}, line {number}: {line[:80]}",
                    fix=fix,
                )
            variables[name] = value
    contents = {name: "".join(f"{line}\n" for line in content) for name, content in files.items()}
    return Environment(variables, host, contents, engine=container.engine(variables, root=None))
