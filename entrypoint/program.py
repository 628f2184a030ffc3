"""What runs in each rank, and how torchrun and python are told."""

import sys
from dataclasses import dataclass


@dataclass(frozen=True)
class Program:
    """What runs in each rank.

    Attributes:
        kind: a `module`, a `script`, or another `program` (--no-python).
        words: its name or path, then its arguments.
        is_ours: a trainer of this project: nothing in the user's folders may take its place.
        framework: `torch`: a process for each rank; `jax`, `tensorflow`: one for each task that the launcher started.
        failure: the exit code of a launch that failed, for a program whose own 1 says something else.
    """

    kind: str
    words: tuple[str, ...]
    is_ours: bool = False
    framework: str = "torch"
    failure: int = 1

    def agent_words(self) -> list[str]:
        """The positional part of torchrun's command line, and of spawn.py's."""
        return [*{"module": ["-m"], "script": [], "program": ["--no-python"]}[self.kind], *self.words]

    def own_words(self) -> list[str]:
        """The whole command of one rank."""
        if self.kind == "program":
            return list(self.words)
        return [sys.executable, "-u", *(["-m"] if self.kind == "module" else []), *self.words]
