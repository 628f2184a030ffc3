"""The program of each rank, the additions by parts of a launch, and the process that replaces this one."""

import os
import re
import stat
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import dropwhile
from pathlib import Path

from muster.errors import MusterError, explaining


@dataclass(frozen=True)
class Program:
    """The program that each rank runs.

    Attributes:
        kind: a `module`, a `script`, or another `program` (--no-python).
        words: its name or path, then its arguments.
        is_ours: whether it belongs to this project: no module in the user's folders may take its place.
        framework: `torch`: a process for each rank; `jax`, `tensorflow`: one for each task that the launcher started.
        torchrun: further options for torchrun, used where torchrun starts the ranks.
    """

    kind: str
    words: tuple[str, ...]
    is_ours: bool = False
    framework: str = "torch"
    torchrun: tuple[str, ...] = ()

    def agent_words(self) -> list[str]:
        """The positional part of torchrun's command line."""
        return [*{"module": ["-m"], "script": [], "program": ["--no-python"]}[self.kind], *self.words]

    def own_words(self) -> list[str]:
        """The whole command of one rank."""
        return list(self.words) if self.kind == "program" else [sys.executable, "-u", *self.agent_words()]


def without_launcher(words: Sequence[str]) -> list[str] | None:
    """The arguments of `muster run` that replace the launcher at the start of `words`; None if they start with none.

    In each rank, or on each node, such a launcher would start a world of its own.
    """
    name, rest = words[0].rpartition("/")[2], list(words[1:])
    if re.fullmatch(r"python(3(\.\d+)?)?", name):
        rest = list(dropwhile(lambda word: word in ("-u", "-m"), rest))
        return without_launcher(rest) if rest else None
    if name in ("torchrun", "torch.distributed.run", "torch.distributed.launch"):
        return rest
    others = ("deepspeed", "deepspeed.launcher.runner", "accelerate.commands.launch", "composer", "composer.cli")
    pairs = (("accelerate", "launch"), ("fabric", "run"), ("lightning.fabric.cli", "run"))
    if name in others or (name, *rest[:1]) in pairs:
        # Their options are not torchrun's.
        return list(dropwhile(lambda word: not word.endswith(".py"), rest))
    if name == "tune" and rest[:1] == ["run"] and "--config" in rest[3:] and rest[1].startswith("-"):
        # Its options are torchrun's. Without any it starts no processes, and the recipe runs in this one.
        # Source: https://github.com/pytorch/torchtune (torchtune/_cli/run.py)
        recipe = rest.index("--config") - 1
        return [*rest[1:recipe], "--no-python", words[0], "run", *rest[recipe:]]
    return None


@dataclass(frozen=True)
class Folder:
    """A folder to be made before the exec.

    Attributes:
        path: absolute.
        is_private: whether it is this user's alone (mode 0700); a folder that exists already must be so too.
    """

    path: Path
    fix: str
    is_private: bool = False

    def make(self) -> None:
        """Makes the folder if it does not exist.

        Raises:
            MusterError: it can't be made, or is not this user's alone.
        """
        with explaining("a folder can't be made", seen=self.path, fix=self.fix):
            # Neither this nor the check of a private one follows a link that somebody may have put there.
            try:
                self.path.mkdir(mode=0o700 if self.is_private else 0o777, parents=not self.is_private)
            except FileExistsError:
                found = self.path.lstat()
            else:
                return
        # Beside the permissions the mode has the set-group-ID bit, which folders inherit.
        is_own = stat.S_ISDIR(found.st_mode) and found.st_mode & 0o777 == 0o700
        if self.is_private and not (is_own and found.st_uid == os.getuid()):
            wrong = "a folder that must be private to this user belongs to another user, or is open to others"
            raise MusterError(wrong, seen=str(self.path), fix=self.fix)


@dataclass(frozen=True)
class Additions:
    """The additions of one part of the launch to the new process.

    Attributes:
        notes: one line for each thing that the user should know.
        removed: variables that must not be inherited.
        folders: to be made before the start.
    """

    variables: Mapping[str, str] = field(default_factory=dict[str, str])
    notes: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    folders: tuple[Folder, ...] = ()

    @classmethod
    def merged(cls, parts: Sequence["Additions"]) -> "Additions":
        """The union of `parts`; a variable that several set has the value of the last."""
        return cls(
            variables={name: value for part in parts for name, value in part.variables.items()},
            notes=tuple(note for part in parts for note in part.notes),
            removed=tuple(name for part in parts for name in part.removed),
            folders=tuple(folder for part in parts for folder in part.folders),
        )


def where_unset(wanted: Mapping[str, str], env: Mapping[str, str]) -> Additions:
    """The variables of `wanted` that the user has not set; a note names each that the user set to another value."""
    kept = sorted(name for name in wanted if env.get(name, wanted[name]) != wanted[name])
    return Additions(
        {name: value for name, value in wanted.items() if name not in env},
        tuple(f"{name}={env[name]} is yours: it was kept" for name in kept),
    )


@dataclass(frozen=True)
class Launch:
    """The process that is about to replace this one.

    Attributes:
        additions: variables that it gets beside this one's, or does not inherit; notes; folders to be made.
        handles_signals: whether it is ours: it then handles warnings and Ctrl-C, even those that came while it started.
    """

    argv: tuple[str, ...]
    additions: Additions = Additions()
    handles_signals: bool = False

    def environment(self, env: Mapping[str, str]) -> dict[str, str]:
        """All variables of the new process."""
        kept = {name: value for name, value in env.items() if name not in self.additions.removed}
        return kept | dict(self.additions.variables)
