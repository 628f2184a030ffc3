"""`python -m muster.check doctor OPTIONS`, or bench: one rank of a check of all nodes, or of a measurement."""

import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import TypeVar

from muster import interruption

if __name__ == "__main__":
    interruption.start_rank(f"muster {sys.argv[1]}")

import typer

from muster.arguments import command, from_argv
from muster.check.options import BenchOptions, DoctorOptions
from muster.errors import ExitCode, MusterError
from muster.notices import said_if_slow

Group = TypeVar("Group")


def main() -> None:
    name, *argv = sys.argv[1:]
    options = parse(f"muster {name}", {"doctor": DoctorOptions, "bench": BenchOptions}[name], argv)
    # Here and not above: a misspelt option must not wait for torch.
    with said_if_slow("loading PyTorch", is_said=not interruption.current.is_silent):
        program = import_module(f"muster.check.{name}.run")

    with interruption.clearing_up():
        program.run(options)


def parse(program: str, group: type[Group], argv: Sequence[str]) -> Group:
    """The options, of the class `group`, that `argv` stands for; silences torch, which is loaded next.

    Raises:
        SystemExit: with 2, after three lines, at a usage error; with 0 after --help.
    """
    if not os.environ.get("MUSTER_DEBUG"):
        # The notes of torch's C++ side are nothing that a user can act on.
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    if plain := from_argv(argv, group):
        return plain[0]
    parsed: list[Group] = []

    def keep(options: Group) -> None:
        parsed.append(options)

    app = typer.Typer(add_completion=False)
    app.command()(command(keep, group))
    try:
        typer.main.get_command(app).main(args=list(argv), prog_name=program, standalone_mode=False)
    except typer.TyperException as error:
        seen, fix = f"{program} {' '.join(argv)}", f"{program} --help lists what there is"
        print(MusterError(error.format_message(), seen=seen, fix=fix), file=sys.stderr)
        raise SystemExit(ExitCode.USER_MUST_CHANGE) from None
    if not parsed:
        raise SystemExit(0)  # --help has said what it had to say
    return parsed[0]


if __name__ == "__main__":
    main()
