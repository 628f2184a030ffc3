"""`python -m train.plan`: prints a plan, as a table or for programs."""

import sys
from collections.abc import Sequence

import typer

from train.arguments import command
from train.errors import USER_MUST_CHANGE, MusterError
from train.options import Options
from train.plan import planner
from train.plan.hardware import Hardware


def read(argv: Sequence[str]) -> tuple[Hardware, Options]:
    """What `argv` asks for.

    Raises:
        MusterError: an option or value that does not exist.
        SystemExit: with code 0, after --help.
    """
    parsed: list[tuple[Hardware, Options]] = []
    app = typer.Typer(add_completion=False)

    def chosen(machines: Hardware, options: Options) -> None:
        parsed.append((machines, options))

    app.command()(command(chosen, Hardware, Options))
    try:
        typer.main.get_command(app).main(args=list(argv), prog_name="train plan", standalone_mode=False)
    except typer.TyperException as error:
        seen = " ".join(["train plan", *argv])
        raise MusterError(error.format_message(), seen=seen, fix="train plan --help lists what there is") from None
    if not parsed:
        raise SystemExit(0)  # --help has said what it had to say
    return parsed[0]


def main() -> None:
    try:
        machines, options = read(sys.argv[1:])
        plan = planner.make(options, planner.here(machines))
    except MusterError as error:
        print(error, file=sys.stderr)
        sys.exit(error.code)
    # Here and not above: bad options must not wait for rich.
    from train.plan import table

    print(table.as_json(plan)) if machines.json else table.show(plan)
    sys.exit(0 if plan.choice is not None else USER_MUST_CHANGE)


if __name__ == "__main__":
    main()
