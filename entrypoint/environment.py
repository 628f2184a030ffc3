"""What a process sees of its job: its variables, its host's name, the files that variables name.

Detection reads this and nothing else, so a recorded environment (recording.py) and the live one go through one code.
"""

import os
import re
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from muster.entrypoint import container

NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
"""The names that a shell takes for variables: no other is read from a file, or printed for a shell."""


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
