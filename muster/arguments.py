"""Dataclasses as command-line options: a typer command from their fields, and their values as arguments again.

The launcher and the programs that it starts read the same definitions, so that each understands what it is passed.
"""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import MISSING, fields
from typing import Any, get_type_hints

import typer


def option(*names: str, help: str, panel: str, **limits: Any) -> Any:
    """A typer option under the heading `panel` of the help text."""
    return typer.Option(*names, help=help, rich_help_panel=panel, **limits)


def normalise(argv: Sequence[str]) -> list[str]:
    """`argv` with a bare `--resume` written out as `--resume latest`."""
    words = list(argv)
    for index in range(len(words) - 1, -1, -1):
        last = index + 1 == len(words)
        if words[index] == "--resume" and (last or words[index + 1].startswith("-")):
            words.insert(index + 1, "latest")
    return words


def command(function: Callable[..., None], *groups: type, **extra: inspect.Parameter) -> Callable[..., None]:
    """A callable for `typer.Typer().command()` whose options are the fields of the dataclasses `groups`.

    It calls `function` with one instance of each group, then the parameters of `extra` (arguments, contexts) by name.
    """
    parameters = list(extra.values())
    for group in groups:
        hints = get_type_hints(group, include_extras=True)
        for field in fields(group):
            default = inspect.Parameter.empty if field.default is MISSING else field.default
            parameters.append(
                inspect.Parameter(
                    field.name, inspect.Parameter.KEYWORD_ONLY, annotation=hints[field.name], default=default
                )
            )

    def call(**values: Any) -> None:
        instances = [group(**{field.name: values.pop(field.name) for field in fields(group)}) for group in groups]
        function(*instances, **values)

    call.__name__ = function.__name__
    call.__doc__ = function.__doc__
    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    call.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return call


def to_argv(options: Any) -> list[str]:
    """The arguments that say what differs from the defaults: what the launcher passes on to the trainer."""
    argv: list[str] = []
    for field in fields(options):
        value = getattr(options, field.name)
        if value == field.default:
            continue
        flag = field.name.replace("_", "-")
        if isinstance(value, bool):
            argv.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            argv.append(f"--{flag}={value}")
    return argv
