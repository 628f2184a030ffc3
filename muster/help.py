"""The help text of a command: `--help` shows examples and the most used options, `--help-all` all options."""

import re
import shutil
import sys
import textwrap
from collections.abc import Iterator
from typing import Any, get_args

from typer.core import TyperCommand

from muster.config import STRATEGIES_WITH_OPTIONS

NAMES = ("-h", "--help", "--help-all")
"""The options that show a help text; the last one shows all options."""

BRIEF = {
    # Model and data, training
    "model", "data", "image_size", "seq_len", "epochs", "batch_size", "max_steps", "optimizer", "lr",
    "lr_schedule", "weight_decay", "seed",
    # Strategies
    "zero1", "sync_bn", "replicate", "cpu_offload", "tensor_parallel", "pipeline_parallel", "microbatches", "schedule",
    # Speed, run, launch
    "bf16", "compile", "name", "resume", "config", "save_every", "nnodes", "nproc_per_node", "dry_run",
    # Commands of `muster`
    "module", "no_python", "framework", "as_json", "record", "format", "docker_args", "apptainer_args",
}  # fmt: skip
"""The options of trainings and launches that `--help` shows. Those under other headings are all shown."""

TRAINING = ("Model", "Data", "Training", *STRATEGIES_WITH_OPTIONS, "Speed", "Run")
LAUNCH = ("Launch", "This site and its network", "Look first")
"""Headings of options that many commands have; those of a launch come last."""

NAME_WIDTH = 26
MIN_COLUMNS, MAX_COLUMNS = 40, 100
"""The least and the greatest width of a help text; a narrower terminal breaks the lines itself."""


class Command(TyperCommand):
    """A command with such a help text. Its `epilog` has one example a line. With few options it has no `--help-all`."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Writes the help text for a terminal of this width."""
        columns = max(MIN_COLUMNS, min(shutil.get_terminal_size().columns, MAX_COLUMNS))
        is_all = NAMES[-1] in sys.argv or NAMES[-1] not in ctx.help_option_names
        for line in _lines(self, ctx, columns, is_all):
            formatter.write(line + "\n")


def _lines(command: TyperCommand, ctx: Any, columns: int, is_all: bool) -> Iterator[str]:
    arguments = [each for each in ctx.command.params if each.param_type_name != "option"]
    names = [each.metavar if each.required else f"[{each.metavar}]" for each in arguments]
    yield " ".join([f"Usage: {ctx.command_path} [OPTIONS]", *names])
    yield ""
    yield from textwrap.wrap(command.help or "", columns)
    if command.epilog:
        yield ""
        yield "Examples:"
        yield from (f"  {example}" for example in command.epilog.splitlines())
    options = [each for each in ctx.command.params if each.param_type_name == "option" and each.name != "help"]
    of_others = {name for name in STRATEGIES_WITH_OPTIONS if name != command.name}
    options = [each for each in options if each.rich_help_panel not in of_others]
    shown = [each for each in options if is_all or _is_brief(each)]
    groups: dict[str, list[Any]] = {"Arguments": arguments} if arguments else {}
    for parameter in shown:
        groups.setdefault(parameter.rich_help_panel or "Options", []).append(parameter)
    for heading in sorted(groups, key=lambda heading: heading.startswith(LAUNCH)):
        yield ""
        yield f"{'Strategy' if heading in STRATEGIES_WITH_OPTIONS else heading}:"
        for parameter in groups[heading]:
            yield from _row(parameter, columns, is_all)
    yield ""
    if len(shown) < len(options):
        yield f"{len(options) - len(shown)} more options: {ctx.command_path} {NAMES[-1]}"


def _is_brief(parameter: Any) -> bool:
    return parameter.name in BRIEF or not (parameter.rich_help_panel or "").startswith((*TRAINING, *LAUNCH))


def _row(parameter: Any, columns: int, is_all: bool) -> Iterator[str]:
    """The name of an option or argument and its help beside it; below it where the name is long."""
    names = [", ".join(parameter.opts) if parameter.param_type_name == "option" else parameter.metavar]
    # --no-FLAG for a flag that is off by default is only for users who turn it on in a file.
    if parameter.default is not False:
        names += parameter.secondary_opts
    name = f"  {'/'.join(names)} {_values(parameter)}".rstrip()
    words = parameter.help
    if not is_all:  # up to the first full stop or semicolon
        words = re.split(r"[.;] ", words, maxsplit=1)[0].rstrip(".") + "."
    default = parameter.default
    if default not in (None, "") and _values(parameter):
        words += f" [{default:g}]" if isinstance(default, float) else f" [{default}]"
    if is_all and parameter.envvar:
        words += f" [{parameter.envvar}]"
    lines = textwrap.wrap(words, columns - NAME_WIDTH, break_long_words=False, break_on_hyphens=False)
    if len(name) >= NAME_WIDTH:
        yield name
    else:
        yield f"{name:<{NAME_WIDTH}}{lines.pop(0)}"
    yield from (" " * NAME_WIDTH + line for line in lines)


def _values(parameter: Any) -> str:
    """The placeholder for an option's value: its metavar, its choices, N for an int, X for a float, or TEXT."""
    if parameter.param_type_name != "option" or parameter.is_flag:
        return ""
    kind = parameter.type_descriptor.annotation
    choices = "|".join(each for each in get_args(kind) if isinstance(each, str))
    return parameter.metavar or choices or {int: "N", float: "X"}.get(kind, "TEXT")
