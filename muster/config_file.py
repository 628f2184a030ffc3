"""Options in a file: `train STRATEGY --config FILE` reads one, and each run writes its own, config.toml.

    strategy = "ddp"

    [training]
    epochs = 3

A file is read by the launcher, or by a rank, before torch is loaded.
"""

import difflib
import json
import os
import stat
from collections.abc import Sequence
from dataclasses import fields
from typing import Any, Literal, get_args, get_origin, get_type_hints

from muster.arguments import base_of, is_allowed, to_argv, with_home
from muster.config import OF_STRATEGY, STRATEGIES, Options
from muster.errors import MusterError
from muster.hints import MEANT

MOST_BYTES = 1 << 16
"""Of a file of options: one of a run has about 1,500."""


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
    """`argv` (`["ddp", "--config=FILE", "--epochs=3"]`), with what the file says before the user's own options.

    Raises:
        MusterError: the file can't be read, or says what the strategy does not have.
    """
    file = config_of(argv)
    if file is None or argv[0] not in STRATEGIES:
        return list(argv)
    return [argv[0], *to_argv(read(file, argv[0])), *argv[1:]]


def read(path: str, strategy: str) -> Options:
    """The options that the file at `path` gives to a training by `strategy`.

    Raises:
        MusterError: the file can't be read, is no TOML, or says what there is not.
    """
    known = sections()
    hints = get_type_hints(Options, include_extras=True)
    given: dict[str, Any] = {}
    for section, table in load(path).items():
        if section == "strategy":
            _check_strategy(path, table)
            continue
        _check_section(path, section, table, known)
        for name, value in table.items():
            if known.get(name) != section:
                raise _unknown(path, section, name, known)
            kind, info = get_args(hints[name])
            if base_of(kind) is float and type(value) is int:
                value = float(value)
            # No argument of a process has a zero byte in it, and ranks get theirs as arguments.
            if not is_allowed(value, kind, info) or (isinstance(value, str) and "\0" in value):
                expected = _expected(kind, info)
                raise MusterError(
                    f"{name} takes {expected}", seen=_line(path, section, name, value), fix=f"{name} = {expected}"
                )
            if section in OF_STRATEGY and section != strategy and value != getattr(Options, name):
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
        MusterError: it is not there, is no plain file, or no TOML.
    """
    fix = "--config FILE, such as runs/NAME/config.toml; in a container, see that its folder is bound into it"

    def opener(path: str, flags: int) -> int:
        return os.open(path, flags | os.O_NONBLOCK)  # a pipe that nobody writes to must not hold the launch

    try:
        with open(os.path.expanduser(path), "rb", opener=opener) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise MusterError("options are read from a plain file only", seen=f"--config {path}", fix=fix)
            content = file.read(MOST_BYTES + 1)
    except OSError as reason:
        if isinstance(reason, IsADirectoryError):
            fix = f"--config {os.path.join(path, 'config.toml')}"
        wrong = f"the file of options can't be read: {reason.strerror}"
        raise MusterError(wrong, seen=f"--config {path}", fix=fix) from None
    if len(content) > MOST_BYTES:
        wrong = f"the file is larger than any file of options: more than {MOST_BYTES} bytes"
        raise MusterError(wrong, seen=f"--config {path}", fix=fix)
    # Here and not above: most launches read no file.
    import tomllib

    try:
        return tomllib.loads(content.decode("utf-8-sig"))
    except (ValueError, RecursionError) as reason:
        raise MusterError(
            "the file of options is no TOML", seen=f"--config {path}: {reason}", fix=f"mend {path}: https://toml.io"
        ) from None


def _check_strategy(path: str, strategy: Any) -> None:
    """Refuses what is no strategy's name. The command line has one too, which may be another, and is taken."""
    if not isinstance(strategy, str) or strategy not in STRATEGIES:
        near = difflib.get_close_matches(str(strategy), STRATEGIES, n=1)
        raise MusterError(
            "there is no such strategy",
            seen=f"--config {path}: strategy = {_shown(strategy)}",
            fix=f"strategy = {toml_value((near or ['ddp'])[0])}; there are: {', '.join(STRATEGIES)}",
        )


def _check_section(path: str, section: str, table: Any, known: dict[str, str]) -> None:
    """Refuses a section that there is not, and what is not in one."""
    names = list(dict.fromkeys(known.values()))
    if section in names and not isinstance(table, dict):
        raise MusterError(
            f"{section} is a section, with options in it",
            seen=f"--config {path}: {section} = {_shown(table)}",
            fix=f"a line [{section}], and below it NAME = VALUE",
        )
    if section in names:
        return
    if not isinstance(table, dict):
        raise _unknown(path, "", section, known)
    near = difflib.get_close_matches(section.lower(), names, n=1)
    raise MusterError(
        f"there is no section [{section}]",
        seen=f"--config {path}: [{section}]",
        fix=f"[{near[0]}]" if near else f"there are: {', '.join(names)}",
    )


def _unknown(path: str, section: str, name: str, known: dict[str, str]) -> MusterError:
    """The error for an option that there is not, or not in this section."""
    word = name.replace("-", "_").lower()
    meant = MEANT.get(f"--{word.replace('_', '-')}", "").partition(" ")[0].lstrip("-").replace("-", "_")
    near = [each for each in (word, meant) if each in known] or difflib.get_close_matches(word, known, n=1)
    if near:
        fix = f"{near[0]}, in the section [{known[near[0]]}]"
    else:
        fix = "'train ddp --help-all' lists what there is; options of the launch are given on the command line alone"
    place = f"[{section}] " if section else ""
    wrong = f"there is no option {name} in [{section}]" if section else f"{name} stands in no section"
    return MusterError(wrong, seen=f"--config {path}: {place}{name}", fix=fix)


def _line(path: str, section: str, name: str, value: Any) -> str:
    return f"--config {path}: [{section}] {name} = {_shown(value)}"


def _shown(value: Any) -> str:
    """A value as it stands in the file; of a list or a table only that it is one."""
    if isinstance(value, (str, bool, int, float)):
        return toml_value(value)
    return "[...]" if isinstance(value, list) else "{...}" if isinstance(value, dict) else str(value)


def _expected(kind: Any, info: Any) -> str:
    """What an option takes, in words."""
    base = base_of(kind)
    if get_origin(base) is Literal:
        return " or ".join(toml_value(choice) for choice in get_args(base))
    words = {str: "a text in quotes", bool: "true or false", int: "a whole number", float: "a number"}[base]
    low, high = info.min, info.max
    if low is not None and high is not None:
        return f"{words} from {low:g} to {high:g}"
    return f"{words} from {low:g} on" if low is not None else words


ONE_RUNS_OWN = ("name", "resume")
"""Options that a run's config.toml leaves out: by it another run starts, in a new folder and from the beginning."""


def sections() -> dict[str, str]:
    """The section of config.toml in which each option stands: a heading of the help text, or the option's strategy."""
    hints = get_type_hints(Options, include_extras=True)
    return {field.name: hints[field.name].__metadata__[0].rich_help_panel.lower() for field in fields(Options)}


def to_toml(strategy: str, options: Options) -> str:
    """`options` as a file in TOML, by which the same training starts again: `--config`.

    What was not given and has no default of its own is left out, and so are the options of other strategies and those
    of `ONE_RUNS_OWN`.

    Source: https://toml.io/en/v1.0.0
    """
    tables: dict[str, dict[str, Any]] = {}
    for name, section in sections().items():
        value = getattr(options, name)
        of_another = section in OF_STRATEGY and section != strategy
        if value is not None and not of_another and name not in ONE_RUNS_OWN:
            tables.setdefault(section, {})[name] = value
    lines = [f"strategy = {toml_value(strategy)}"]
    for section, values in tables.items():
        lines += ["", f"[{section}]", *(f"{name} = {toml_value(value)}" for name, value in values.items())]
    return "".join(f"{line}\n" for line in lines)


def toml_value(value: str | float) -> str:
    """`value` as TOML has it."""
    if not isinstance(value, str):
        return repr(value).lower()
    # A path's bytes may be no text, which TOML has no way to write.
    text = value.encode(errors="replace").decode()
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
