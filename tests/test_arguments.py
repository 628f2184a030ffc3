"""Options that need no parser are read as typer reads them, and all others are left to typer."""

from dataclasses import fields
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest
import typer

from muster.arguments import command, from_argv, to_argv
from muster.check.options import BenchOptions, DoctorOptions
from muster.config import Options
from muster.entrypoint.options import LaunchOptions, ProgramOptions, TorchrunOptions


def by_typer(argv: list[str], *groups: type) -> list[Any]:
    found: list[Any] = []
    app = typer.Typer(add_completion=False)
    app.command()(command(lambda *instances: found.extend(instances), *groups))
    typer.main.get_command(app).main(args=argv, prog_name="x", standalone_mode=False)
    return found


def each_option(*groups: type, flags: bool) -> list[str]:
    """Arguments that give every option a value, if possible not its default."""
    argv: list[str] = []
    for group in groups:
        hints = get_type_hints(group, include_extras=True)
        for field in fields(group):
            kind, info = get_args(hints[field.name])
            given = [name for name in (info.default, *(info.param_decls or ())) if isinstance(name, str)]
            name, _, off = (given[0] if given else f"--{field.name.replace('_', '-')}").partition("/")
            if get_origin(kind) is Literal or any(get_origin(each) is Literal for each in get_args(kind)):
                literal = kind if get_origin(kind) is Literal else get_args(kind)[0]
                argv += [name, get_args(literal)[-1]]
            elif bool in (kind, *get_args(kind)):
                off = off or ("" if given else f"--no-{name[2:]}")
                argv += [off if off and not flags else name]
            elif int in (kind, *get_args(kind)):
                argv += [f"{name}={max(7, info.min or 0)}"]
            elif float in (kind, *get_args(kind)):
                value = (info.min or 0) + 0.25
                argv += [name, str(value if info.max is None else min(value, info.max))]
            else:
                argv += [name, "some text"]
    return argv


@pytest.mark.parametrize("groups", [(LaunchOptions, Options), (LaunchOptions, DoctorOptions), (BenchOptions,)])
@pytest.mark.parametrize("flags", [True, False])
def test_every_option_is_read_as_by_typer(groups: tuple[type, ...], flags: bool) -> None:
    argv = each_option(*groups, flags=flags)
    found = from_argv(argv, *groups)
    assert found is not None
    assert found == by_typer(argv, *groups)
    assert from_argv([], *groups) == [group() for group in groups]


def test_what_the_launcher_passes_on_is_read_back() -> None:
    (options,) = from_argv(each_option(Options, flags=True), Options) or [None]
    assert from_argv(to_argv(options), Options) == [options]


def test_an_underscore_is_a_hyphen() -> None:
    assert from_argv(["--batch_size=7"], Options) == [Options(batch_size=7)]


def test_of_two_that_say_the_same_the_last_one_counts() -> None:
    assert from_argv(["--epochs=2", "--epochs", "3"], Options) == [Options(epochs=3)]


def test_a_variable_gives_a_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MUSTER_INTERFACE", "ib0")
    assert from_argv([], LaunchOptions) == [LaunchOptions(interface="ib0")]
    assert from_argv(["--interface=ib1"], LaunchOptions) == [LaunchOptions(interface="ib1")]


@pytest.mark.parametrize(
    "argv",
    [
        ["--help"],
        ["--epoch=3"],
        ["--lr=abc"],
        ["--lr=nan"],
        ["--epochs=-3"],
        ["--epochs", "-3"],
        ["--epochs=1_000"],
        ["--epochs=" + "9" * 40],
        ["--epochs"],
        ["--optimizer=adam"],
        ["--bf16=1"],
        ["ddp"],
        ["--", "--epochs=3"],
        ["--epochs=3", "x"],
    ],
)
def test_what_is_not_plain_is_left_to_typer(argv: list[str]) -> None:
    assert from_argv(argv, Options) is None


@pytest.mark.parametrize(
    ("argv", "script"),
    [
        (["x.py"], ["x.py"]),
        (["--nproc-per-node=2", "x.py", "--nnodes=9", "--", "-h"], ["x.py", "--nnodes=9", "--", "-h"]),
        (["--nproc-per-node", "2", "-m", "package.module", "y"], ["package.module", "y"]),
        (["--standalone", "-t", "3", "x.py", "--debug"], ["x.py", "--debug"]),
        (["--debug"], []),
    ],
)
def test_words_from_a_script_on_are_its_own(argv: list[str], script: list[str]) -> None:
    groups = (LaunchOptions, ProgramOptions, TorchrunOptions)
    rest: list[str] = []
    found = from_argv(argv, *groups, rest=rest)
    assert rest == script
    assert found == by_typer(argv[: len(argv) - len(script)], *groups)


@pytest.mark.parametrize("argv", [["--no-such", "x.py"], ["--nproc-per-node"], ["--help", "x.py"]])
def test_what_is_wrong_before_a_script_is_left_to_typer(argv: list[str]) -> None:
    assert from_argv(argv, LaunchOptions, ProgramOptions, TorchrunOptions, rest=[]) is None
