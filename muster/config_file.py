"""Options in a file: `train STRATEGY --config FILE` reads one, and each run writes its own, config.toml.

    strategy = "ddp"

    [training]
    epochs = 3

A file is read by the launcher, or by a rank, before torch is loaded.
"""

import difflib
import json
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from muster.arguments import base_of, is_allowed, limits_of, to_argv, with_home
from muster.config import SECTIONS, STRATEGIES, STRATEGIES_WITH_OPTIONS, Options
from muster.errors import MusterError, explaining
from muster.hints import ALIASES
from muster.paths import check_regular

MAX_BYTES = 1 << 16
"""The largest size of a file of options; a run's own has about 1,500 bytes."""


def config_of(argv: Sequence[str]) -> str | None:
    """The file that `--config` names in `argv`; None without one."""
    file = None
    for word, following in zip(argv, [*argv[1:], None], strict=False):
        if word.startswith("--config="):
            file = word.partition("=")[2]
        elif word == "--config" and following is not None:
            file = following
    return file


def with_file(argv: Sequence[str]) -> list[str]:
    """`argv` (`["ddp", "--config=FILE", "--epochs=3"]`), with the file's options before the user's own.

    Raises:
        MusterError: the file can't be read, or `read` refuses its content.
    """
    file = config_of(argv)
    if file is None or argv[0] not in STRATEGIES:
        return list(argv)
    return [argv[0], *to_argv(read(file, argv[0])), *argv[1:]]


def read(path: str, strategy: str) -> Options:
    """The options that the file at `path` gives to a training by `strategy`.

    Raises:
        MusterError: the file can't be read, is no TOML, or has a section, option or value that it must not have.
    """
    types: dict[str, Any] = {field.name: field.type for field in fields(Options)}
    given: dict[str, Any] = {}
    for section, table in load(path).items():
        if section == "strategy":
            _check_strategy(path, table)
            continue
        _check_section(path, section, table)
        for name, value in table.items():
            if SECTIONS.get(name) != section:
                raise _unknown(path, section, name)
            kind, info = get_args(types[name])
            if base_of(kind) is float and type(value) is int:
                with suppress(OverflowError):  # an int larger than any float is refused below
                    value = float(value)
            # Ranks get their options as arguments, in which a zero byte is impossible.
            if not is_allowed(value, kind, info) or (isinstance(value, str) and "\0" in value):
                expected = _expected(kind, info)
                raise MusterError(
                    f"{name} takes {expected}", seen=_line(path, section, name, value), fix=f"{name} = {expected}"
                )
            if section in STRATEGIES_WITH_OPTIONS and section != strategy and value != getattr(Options, name):
                raise MusterError(
                    f"the strategy {strategy} has no option {name}",
                    seen=_line(path, section, name, value),
                    fix=f"'train {section} --config {path}', or take the line out of the file",
                )
            given[name] = with_home(value) if isinstance(value, str) else value
    return Options(**given)


def load(path: str) -> dict[str, Any]:
    """The tables of the file at `path`.

    Raises:
        MusterError: it does not exist, is no regular file, is too large, can't be read, or is no TOML.
    """
    file, seen = Path(os.path.expanduser(path)), f"--config {path}"
    fix = "--config FILE, such as runs/NAME/config.toml; in a container, see that its folder is bound into it"
    if os.path.isfile(file / "config.toml"):  # Path.is_file raises for a name that is too long
        fix = f"--config {os.path.join(path, 'config.toml')}"
    with explaining("the file of options can't be read", seen=seen, fix=fix):
        check_regular(file)
        if file.stat().st_size > MAX_BYTES:
            wrong = f"the file of options is larger than {MAX_BYTES} bytes"
            raise MusterError(wrong, seen=seen, fix=fix)
        content = file.read_bytes()
    # Here and not above: most launches read no file.
    import tomllib

    try:
        return tomllib.loads(content.decode("utf-8-sig"))
    except (ValueError, RecursionError) as reason:
        wrong, fix = "the file of options is no TOML", f"correct {path}: https://toml.io"
        raise MusterError(wrong, seen=f"{seen}: {reason}", fix=fix) from None


def _check_strategy(path: str, strategy: Any) -> None:
    """Refuses an unknown strategy. The command line names one too: where they differ, the command line's is used."""
    if not isinstance(strategy, str) or strategy not in STRATEGIES:
        near = difflib.get_close_matches(str(strategy), STRATEGIES, n=2) or ["ddp"]
        raise MusterError(
            "there is no such strategy",
            seen=f"--config {path}: strategy = {_shown(strategy)}",
            fix=f"strategy = {' or '.join(map(toml_value, near))}; there are: {', '.join(STRATEGIES)}",
        )


def _check_section(path: str, section: str, table: Any) -> None:
    """Refuses an unknown section, and an option outside of any section."""
    if section not in SECTIONS.values():
        if not isinstance(table, dict):
            raise _unknown(path, "", section)
        names = list(dict.fromkeys(SECTIONS.values()))
        near = difflib.get_close_matches(section.lower(), names, n=1)
        fix = f"[{near[0]}]" if near else f"there are: {', '.join(names)}"
        raise MusterError(f"there is no section [{section}]", seen=f"--config {path}: [{section}]", fix=fix)
    if not isinstance(table, dict):
        raise MusterError(
            f"{section} is the name of a section, not of an option",
            seen=f"--config {path}: {section} = {_shown(table)}",
            fix=f"a line [{section}], and below it NAME = VALUE",
        )


def _unknown(path: str, section: str, name: str) -> MusterError:
    """The error for an option that does not exist, or not in this section."""
    word = name.replace("-", "_").lower()
    meant = ALIASES.get(f"--{word.replace('_', '-')}", "").partition(" ")[0].lstrip("-").replace("-", "_")
    near = [each for each in (word, meant) if each in SECTIONS] or difflib.get_close_matches(word, SECTIONS, n=1)
    if near:
        fix = f"{near[0]}, in the section [{SECTIONS[near[0]]}]"
    else:
        fix = "'train ddp --help-all' lists what there is; options of the launch are for the command line only"
    place = f"[{section}] " if section else ""
    wrong = f"there is no option {name} in [{section}]" if section else f"{name} is not in a section"
    return MusterError(wrong, seen=f"--config {path}: {place}{name}", fix=fix)


def _line(path: str, section: str, name: str, value: Any) -> str:
    return f"--config {path}: [{section}] {name} = {_shown(value)}"


def _shown(value: Any) -> str:
    """A value as it is written in the file; a list or a table only as [...] or {...}."""
    if isinstance(value, (str, bool, int, float)):
        return toml_value(value)
    return "[...]" if isinstance(value, list) else "{...}" if isinstance(value, dict) else str(value)


def _expected(kind: Any, info: Any) -> str:
    """The values that an option takes, in words."""
    base = base_of(kind)
    if get_origin(base) is Literal:
        return " or ".join(toml_value(choice) for choice in get_args(base))
    words = {str: "a text in quotes", bool: "true or false", int: "a whole number", float: "a number"}[base]
    return f"{words} {limits_of(info)}".rstrip()


NOT_SAVED = ("name", "resume")
"""Options that a run's config.toml leaves out, so that it starts another run: in a new folder, from the beginning."""


def to_toml(strategy: str, options: Options) -> str:
    """`options` as the text of a TOML file with which `--config` starts the same training again.

    Options that are None are left out, and so are the options of other strategies and those of `NOT_SAVED`.

    Source: https://toml.io/en/v1.0.0
    """
    tables: dict[str, dict[str, Any]] = {}
    for name, section in SECTIONS.items():
        value = getattr(options, name)
        of_another = section in STRATEGIES_WITH_OPTIONS and section != strategy
        if value is not None and not of_another and name not in NOT_SAVED:
            tables.setdefault(section, {})[name] = value
    lines = [f"strategy = {toml_value(strategy)}"]
    for section, values in tables.items():
        lines += ["", f"[{section}]", *(f"{name} = {toml_value(value)}" for name, value in values.items())]
    return "".join(f"{line}\n" for line in lines)


def toml_value(value: str | float) -> str:
    """`value` in TOML's notation."""
    if not isinstance(value, str):
        return repr(value).lower()
    # A path may have bytes that are no text, which TOML can't express.
    return json.dumps(value.encode(errors="replace").decode(), ensure_ascii=False).replace("\x7f", "\\u007f")
