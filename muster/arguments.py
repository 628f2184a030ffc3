"""Dataclasses as command-line options: a typer command made from their fields, and conversion to and from arguments.

The launcher and the programs that it starts read the same definitions, so that each understands its arguments.
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
    """`argv` with a bare `--resume` completed to `--resume latest`, and ~ expanded as by `with_homes`."""
    words = with_homes(argv)
    for index in range(len(words) - 1, -1, -1):
        last = index + 1 == len(words)
        if words[index] == "--resume" and (last or words[index + 1].startswith("-")):
            words.insert(index + 1, "latest")
    return words


def with_homes(argv: Sequence[str]) -> list[str]:
    """`argv` with the ~ of `--runs-dir=~/runs` expanded to the user's home: a shell does so only after a blank.

    The words after `--` belong to another command and stay as they are.
    """
    end = argv.index("--") if "--" in argv else len(argv)
    words = [re.sub("^(--[^=]+=)(~.*)", lambda option: option[1] + with_home(option[2]), word) for word in argv[:end]]
    return [*words, *argv[end:]]


def with_home(text: str) -> str:
    """`text`, the value of an option, with a leading ~ expanded to the user's home."""
    return os.path.expanduser(text) if text == "~" or text.startswith("~/") else text


def command(function: Callable[..., None], *groups: type, **extra: Any) -> Callable[..., None]:
    """A callable for `typer.Typer().command()` whose options are the fields of the dataclasses `groups`.

    It calls `function` with one instance of each group, and by keyword with the parameters `extra`, which maps their
    names to types. An extra parameter that may be None is None by default.
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
            if isinstance(value, float) and not math.isfinite(value):  # a file of options refuses it too
                flag = f"'--{name.replace('_', '-')}'"
                raise typer.BadParameter(f"{value} is not a finite number", param_hint=flag)
        instances = [group(**{field.name: values.pop(field.name) for field in fields(group)}) for group in groups]
        function(*instances, **values)

    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    call.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return call


def to_argv(options: Any) -> list[str]:
    """The arguments for the options that differ from their defaults: the launcher passes them on to the trainer."""
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
    """An instance of each of the dataclasses `groups` with the options in `argv`; None where typer has to parse them.

    typer takes a tenth of a second to build a hundred options, for each launch and for each rank. Misspelt options, and
    values that their types or limits don't allow, are left to it: it reports what is wrong. The first word that is no
    option, such as a script, is added to `rest` with all that follow; without `rest` all words have to be options.
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
    """The command-line names of an option, each with the value that it sets as a flag; None if a value follows."""
    # typer.Option's first parameter is `default`: in an annotation it holds the first name.
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
    """`text` as a value of the type `kind`. Raises ValueError where it is none, or is beyond the limits of `info`."""
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
    """The type of an option's values without None: `int` for `int | None`; a Literal is returned as it is."""
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
    """The values that a numeric option takes, in words: "from 1 to 16", "of at least 1"; empty where it takes all."""
    low, high = (f"{limit:g}" if isinstance(limit, float) else limit for limit in (info.min, info.max))
    return "" if low is None else f"of at least {low}" if high is None else f"from {low} to {high}"
