"""The options of a rank's command line, before torch is loaded: a misspelt one must not wait for it."""

import os
import sys
from collections.abc import Sequence
from typing import TypeVar

import typer

from muster.arguments import command
from muster.errors import ExitCode, MusterError

Group = TypeVar("Group")


def parse(program: str, group: type[Group], argv: Sequence[str]) -> Group:
    """The options, of the class `group`, that `argv` stands for.

    Raises:
        SystemExit: with 2, after three lines, at a usage error; with 0 after --help.
    """
    parsed: list[Group] = []

    def told(options: Group) -> None:
        parsed.append(options)

    app = typer.Typer(add_completion=False)
    app.command()(command(told, group))
    try:
        typer.main.get_command(app).main(args=list(argv), prog_name=program, standalone_mode=False)
    except typer.TyperException as error:
        seen, fix = f"{program} {' '.join(argv)}", f"{program} --help lists what there is"
        print(MusterError(error.format_message(), seen=seen, fix=fix), file=sys.stderr)
        raise SystemExit(ExitCode.USER_MUST_CHANGE) from None
    if not parsed:
        raise SystemExit(0)  # --help has said what it had to say
    return parsed[0]


def silence_torch() -> None:
    """Keeps the notes of torch's C++ side, which a user can't act on, from the output; to be called before it loads."""
    if not os.environ.get("MUSTER_DEBUG"):
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
