"""What runs in each rank, and the process that this one becomes to start it."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path


@dataclass(frozen=True)
class Program:
    """What runs in each rank.

    Attributes:
        kind: a `module`, a `script`, or another `program` (--no-python).
        words: its name or path, then its arguments.
        is_ours: a trainer of this project: nothing in the user's folders may take its place.
        framework: `torch`: a process for each rank; `jax`, `tensorflow`: one for each task that the launcher started.
        torchrun: further options of torchrun's.
    """

    kind: str
    words: tuple[str, ...]
    is_ours: bool = False
    framework: str = "torch"
    torchrun: tuple[str, ...] = ()

    def agent_words(self) -> list[str]:
        """The positional part of torchrun's command line, and of spawn.py's."""
        return [*{"module": ["-m"], "script": [], "program": ["--no-python"]}[self.kind], *self.words]

    def own_words(self) -> list[str]:
        """The whole command of one rank."""
        if self.kind == "program":
            return list(self.words)
        return [sys.executable, "-u", *(["-m"] if self.kind == "module" else []), *self.words]


@dataclass(frozen=True)
class Launch:
    """A process about to be replaced.

    Attributes:
        argv: the command.
        set_variables: variables that it gets, and that the user had not set.
        removed_variables: variables that it must not inherit.
        notes: one line for each thing that the user should know.
        home: the folder to be made for HOME; None where there is one.
        hears: whether the new process is ours: it hears warnings and Ctrl-C, those too that came while it started.
    """

    argv: tuple[str, ...]
    set_variables: Mapping[str, str]
    removed_variables: tuple[str, ...]
    notes: tuple[str, ...]
    home: Path | None = None
    hears: bool = False

    def environment(self, env: Mapping[str, str]) -> dict[str, str]:
        """All variables of the new process."""
        kept = {name: value for name, value in env.items() if name not in self.removed_variables}
        return kept | dict(self.set_variables)

    def with_more(self, variables: Mapping[str, str], notes: Sequence[str]) -> "Launch":
        """This launch with `variables` set too, and `notes` after its own."""
        return replace(self, set_variables={**self.set_variables, **variables}, notes=(*self.notes, *notes))
