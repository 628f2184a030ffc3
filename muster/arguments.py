"""Dataclasses as command-line options: a typer command from their fields, and their values as arguments again.

The launcher and the programs that it starts read the same definitions, so that each understands what it is passed.
"""

import inspect
import math
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import MISSING, fields
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

import typer

WHOLE = re.compile(r"-?[0-9]{1,18}")
NUMBER = re.compile(r"-?([0-9]{1,18}(\.[0-9]{0,18})?|\.[0-9]{1,18})(e-?[0-9]{1,3})?")


def option(*names: str, help: str, panel: str, **limits: Any) -> Any:
    """A typer option under the heading `panel` of the help text."""
    return typer.Option(*names, help=help, rich_help_panel=panel, **limits)


def normalise(argv: Sequence[str]) -> list[str]:
    """`argv` with a bare `--resume` written out as `--resume latest`, and homes as by `with_homes`."""
    words = with_homes(argv)
    for index in range(len(words) - 1, -1, -1):
        last = index + 1 == len(words)
        if words[index] == "--resume" and (last or words[index + 1].startswith("-")):
            words.insert(index + 1, "latest")
    return words


def with_homes(argv: Sequence[str]) -> list[str]:
    """`argv` with the user's home in place of the ~ of `--runs-dir=~/runs`: a shell writes it out after a blank only.

    What follows `--` is another command's.
    """
    end = argv.index("--") if "--" in argv else len(argv)
    words = [re.sub("^(--[^=]+=)(~.*)", lambda option: option[1] + with_home(option[2]), word) for word in argv[:end]]
    return [*words, *argv[end:]]


def with_home(text: str) -> str:
    """`text`, the value of an option, with the user's home in place of a ~ at its beginning."""
    return os.path.expanduser(text) if text == "~" or text.startswith("~/") else text


def command(function: Callable[..., None], *groups: type, **extra: Any) -> Callable[..., None]:
    """A callable for `typer.Typer().command()` whose options are the fields of the dataclasses `groups`.

    It calls `function` with one instance of each group, then with the parameters of which `extra` gives the types, by
    name. What may be None is so by default.
    """
    declared = [
        (name, kind, None if NoneType in get_args(get_args(kind)[0]) else MISSING) for name, kind in extra.items()
    ]
    for group in groups:
        hints = get_type_hints(group, include_extras=True)
        declared += [(field.name, hints[field.name], field.default) for field in fields(group)]
    parameters: list[inspect.Parameter] = []
    for name, kind, value in declared:
        default = inspect.Parameter.empty if value is MISSING else value
        parameters.append(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=kind, default=default))

    def call(**values: Any) -> None:
        for name, value in values.items():
            if isinstance(value, float) and not math.isfinite(value):  # no file of options takes it either
                flag = f"'--{name.replace('_', '-')}'"
                raise typer.BadParameter(f"{value} is no finite number", param_hint=flag)
        instances = [group(**{field.name: values.pop(field.name) for field in fields(group)}) for group in groups]
        function(*instances, **values)

    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    call.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return call


def to_argv(options: Any) -> list[str]:
    """The arguments that say what differs from the defaults: what the launcher passes on to the trainer."""
    argv: list[str] = []
    for field in fields(options):
        if (value := getattr(options, field.name)) == field.default:
            continue
        flag = field.name.replace("_", "-")
        if isinstance(value, bool):
            argv.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            argv.append(f"--{flag}={value}")
    return argv


def from_argv(argv: Sequence[str], *groups: type, rest: list[str] | None = None) -> list[Any] | None:
    """An instance of each of the dataclasses `groups` with the options that `argv` gives; None where typer has to look.

    typer takes a tenth of a second to make a hundred options, for each launch and for each rank. What is misspelt, or
    has a value that its type or limits don't allow, is left to it: it says what is wrong. `rest` takes the words from
    the first on that is no option, as of a script; it is None where all are options.
    """
    values: dict[type, dict[str, Any]] = {group: {} for group in groups}
    known: dict[str, tuple[dict[str, Any], str, Any, Any]] = {}
    for group in groups:
        hints = get_type_hints(group, include_extras=True)
        for field in fields(group):
            kind, info = get_args(hints[field.name])
            for name, meant in _names(field.name, kind, info):
                known[name] = values[group], field.name, meant, (kind, info)
    try:
        for taken, field_name, meant, (kind, info) in known.values():
            if meant is None and info.envvar and os.environ.get(info.envvar):
                taken[field_name] = _value(os.environ[info.envvar], kind, info)
        words = iter(argv)
        for word in words:
            if rest is not None and not word.startswith("-"):
                rest += [word, *words]
                break
            name, equals, text = word.partition("=")
            taken, field_name, meant, (kind, info) = known[name.replace("_", "-")]
            if meant is not None and not equals:
                taken[field_name] = meant
                continue
            text = text if equals else next(words)
            if meant is not None or (not equals and text.startswith("-")):
                return None
            taken[field_name] = _value(text, kind, info)
    except (KeyError, ValueError, StopIteration):
        return None
    return [group(**values[group]) for group in groups]


def _names(field: str, kind: Any, info: Any) -> Iterator[tuple[str, bool | None]]:
    """The names of an option on the command line, and what a flag by that name means; None where a value follows."""
    # In an annotation the first name stands where a default would.
    given = [name for name in (info.default, *(info.param_decls or ())) if isinstance(name, str)]
    usual = f"--{field.replace('_', '-')}"
    is_flag = bool in (kind, *get_args(kind))
    if is_flag and not given:
        given = [f"{usual}/--no-{usual[2:]}"]
    for name in given or [usual]:
        on, _, off = name.partition("/")
        yield on, True if is_flag else None
        if off:
            yield off, False


def _value(text: str, kind: Any, info: Any) -> Any:
    """`text` as a value of the type `kind`; a ValueError where it is none, or beyond the limits of `info`."""
    base = base_of(kind)
    if base in (int, float):
        if not (WHOLE if base is int else NUMBER).fullmatch(text):
            raise ValueError(text)
        value = base(text)
    else:
        value = text
    if not is_allowed(value, kind, info):
        raise ValueError(text)
    return value


def base_of(kind: Any) -> Any:
    """The type of an option's values, None apart: `int` of `int | None`; a Literal stays one."""
    if get_origin(kind) is Literal:
        return kind
    return next((each for each in get_args(kind) if each is not NoneType), kind)


def is_allowed(value: Any, kind: Any, info: Any) -> bool:
    """Whether an option of the type `kind` takes `value`, which is not None, within the limits of `info`."""
    base = base_of(kind)
    if get_origin(base) is Literal:
        return isinstance(value, str) and value in get_args(base)
    if type(value) is not base or (base is float and not math.isfinite(value)):
        return False
    if base not in (int, float):
        return True
    return (info.min is None or value >= info.min) and (info.max is None or value <= info.max)


def limits_of(info: Any) -> str:
    """The values that a number's option takes: "from 1 to 16", "from 1 on"; empty where it takes all."""
    low, high = (f"{limit:g}" if isinstance(limit, float) else limit for limit in (info.min, info.max))
    return "" if low is None else f"from {low} on" if high is None else f"from {low} to {high}"
