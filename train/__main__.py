"""`python -m muster.train STRATEGY OPTIONS`: one rank of a training run."""

import os
import sys

from muster import interruption

if __name__ == "__main__":
    interruption.start_rank(" ".join(["train", *sys.argv[1:2]]))

import gc
from collections.abc import Sequence

import typer

from muster.arguments import command, from_argv, normalise
from muster.config import STRATEGIES, ConfigFile, Options
from muster.config_file import with_file
from muster.errors import MusterError, notify_if_slow
from muster.train.health.parent import Guard


def parse(argv: Sequence[str]) -> tuple[str, Options]:
    """Parses `argv`, such as `["ddp", "--epochs=3"]`; returns the strategy and the options.

    Raises:
        typer.TyperException: a strategy, option or value that does not exist.
        MusterError: the file of `--config` can't be used.
        SystemExit: with code 0, after --help.
    """
    argv = with_file(argv)
    if argv and argv[0] in STRATEGIES and (plain := from_argv(argv[1:], Options, ConfigFile)):
        return argv[0], plain[0]
    # Imported only here: options that need no error message and no help are parsed without typer's commands.
    from muster import help

    parsed: list[tuple[str, Options]] = []
    app = typer.Typer(add_completion=False)
    for strategy in STRATEGIES:

        def chosen(options: Options, _: ConfigFile, strategy: str = strategy) -> None:
            parsed.append((strategy, options))

        settings = {"help_option_names": list(help.NAMES)}
        app.command(strategy, cls=help.Command, help=STRATEGIES[strategy], context_settings=settings)(
            command(chosen, Options, ConfigFile)
        )
    typer.main.get_command(app).main(args=normalise(argv), prog_name="train", standalone_mode=False)
    if not parsed:
        raise SystemExit(0)  # after --help
    return parsed[0]


def read(argv: Sequence[str]) -> tuple[str, Options]:
    """Parses `argv` as `parse` does; a usage error is reported in three lines, and ends the process with code 2."""
    with interruption.command(interruption.current.command):
        try:
            return parse(argv)
        except typer.TyperException as error:
            fix = "python -m muster.train STRATEGY --help lists what there is"
            seen = " ".join(["train", *(argv or ["no arguments"])])
            raise MusterError(error.format_message(), seen=seen, fix=fix) from None


def main() -> None:
    interruption.start_rank(" ".join(["train", *sys.argv[1:2]]))  # also where another program calls this
    guard = Guard()
    gc.disable()  # until the training begins (train/health/memory.py)
    strategy, options = read(sys.argv[1:])
    if not os.environ.get("MUSTER_DEBUG"):
        # Hides messages of torch's C++ code that a user can't act on: reverse look-ups of addresses, retries.
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    # Imported only here: the error for a misspelt option must not wait for torch.
    with notify_if_slow("loading PyTorch", is_shown=not interruption.current.is_silent):
        from muster.train.process import run_process

    run_process(strategy, options, guard)


if __name__ == "__main__":
    main()
