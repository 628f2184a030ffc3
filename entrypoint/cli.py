"""The commands `train` and `muster`: parse, call, print."""

import inspect
import json
import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from entrypoint import detection, driver, environment, frameworks, launch, passing, recording, rendezvous, report
from entrypoint.allocation import Allocation
from entrypoint.environment import Environment
from entrypoint.options import EnvOptions, LaunchOptions, ProgramOptions, ShowOptions, VersionOptions
from entrypoint.program import Program
from entrypoint.rendezvous import Rendezvous
from train.arguments import command, normalise, to_argv
from train.combinations import WHICH
from train.combinations import check as check_combination
from train.errors import MusterError, one_line
from train.options import IN_ONE_PROCESS, STRATEGIES, Options
from train.plan.hardware import Hardware


# torchrun takes --nproc_per_node as well as --nproc-per-node; so do we.
def _with_hyphens(name: str) -> str:
    return name.replace("_", "-")


SETTINGS: dict[str, Any] = {"token_normalize_func": _with_hyphens, "help_option_names": ["-h", "--help"]}

HELP = {
    "single": "Train in one process: what every other strategy is measured against.",
    "dp": "Train in one process over all its GPUs by threads (DataParallel): for comparison, ddp is faster.",
    "ddp": "Train with a replica of the model on each rank (DistributedDataParallel).",
    "fsdp": "Train with weights, gradients and optimizer cut over the ranks (fully_shard).",
    "tp": "Train a transformer with each layer's matrices cut over neighbouring ranks (tensor and sequence parallel).",
    "pipeline": "Train a transformer with its layers dealt out to neighbouring ranks, which take turns.",
}

# typer carries its command-line parser inside; the class of its usage errors is reached by one that it exports.
USAGE_ERROR: type[Exception] = typer.BadParameter.__mro__[1]


def train() -> None:
    """The command `train`."""
    app = typer.Typer(
        help="Train PyTorch models, on this machine or in the job that this is part of.",
        epilog=WHICH,
        context_settings=SETTINGS,
        no_args_is_help=True,
        add_completion=False,
    )
    for strategy in STRATEGIES:

        def start(options: LaunchOptions, training: Options, strategy: str = strategy) -> None:
            check_combination(strategy, training)
            program = Program("module", ("train", strategy, *to_argv(training)), is_ours=True)
            _start(options, program, _typed("train"), is_single=strategy in IN_ONE_PROCESS)

        app.command(strategy, help=HELP[strategy])(command(start, LaunchOptions, Options))
    app.command("export", help="Write a run's weights as one plain file, for torch.load and torchvision.")(_export)
    app.command("selftest", help="Train with each strategy on this machine, and compare: PASS or FAIL.")(_selftest)
    app.command("plan", help="Estimate what each strategy holds on a GPU, and name the simplest that fits.")(
        command(_plan, Hardware, Options)
    )
    _run(app, "train", normalise(sys.argv[1:]))


def _export(
    run: Annotated[str, typer.Argument(help="The run's folder, or one of its checkpoints.")],
    to: Annotated[str | None, typer.Option(help="The file. Default: weights.pt in the run's folder.")] = None,
    last: Annotated[
        bool, typer.Option("--last", help="With --ema: the weights of the last step, not their average.")
    ] = False,
) -> None:
    _become("train.export", *([] if to is None else [f"--to={to}"]), *(["--last"] if last else []), "--", run)


def _selftest(
    ranks: Annotated[int | None, typer.Option(help="2, 4 or 8 processes. Default: one a GPU, or 2.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a list for programs.")] = False,
) -> None:
    _become("train.selftest", *([] if ranks is None else [f"--ranks={ranks}"]), *(["--json"] if as_json else []))


def _plan(machines: Hardware, training: Options) -> None:
    _become("train.plan", *to_argv(machines), *to_argv(training))


def _become(module: str, *arguments: str) -> None:
    """Turns this process into `python -m module`, ours, whatever lies in the working directory."""
    env = {**os.environ, **launch.ours_first(os.environ)}
    os.execve(sys.executable, [sys.executable, "-m", module, *arguments], env)


def muster() -> None:
    """The command `muster`."""
    app = typer.Typer(
        help="Start programs on all nodes of a job, and see what was found about it.",
        context_settings=SETTINGS,
        no_args_is_help=True,
        add_completion=False,
    )
    app.command("detect", help="Show what was found, where it came from, and the command that would run.")(
        command(_detect, LaunchOptions, ShowOptions)
    )
    app.command(
        "env", help="Print the variables by which a framework's processes find each other, or options for a container."
    )(command(_env, LaunchOptions, EnvOptions))
    app.command("version", help="Show what is installed: this image, torch, and the libraries that it really loads.")(
        command(_version, VersionOptions)
    )
    script = Annotated[list[str], typer.Argument(metavar="SCRIPT [ARGS]...", help="The program, then its arguments.")]
    app.command(
        "run",
        help="Start SCRIPT on all ranks of this job; takes torchrun's place.",
        context_settings={**SETTINGS, "allow_interspersed_args": False},
    )(
        command(
            _run_script,
            LaunchOptions,
            ProgramOptions,
            script=inspect.Parameter("script", inspect.Parameter.KEYWORD_ONLY, annotation=script),
        )
    )
    _run(app, "muster", sys.argv[1:])


def _run_script(options: LaunchOptions, how: ProgramOptions, script: list[str]) -> None:
    if how.module and how.no_python:
        raise MusterError("a module is run by python", seen="-m with --no-python", fix="give one of the two")
    kind = "module" if how.module else "program" if how.no_python or how.framework != "torch" else "script"
    if kind == "script" and not Path(script[0]).is_file():
        raise MusterError(
            "there is no such script",
            seen=script[0],
            fix="muster run SCRIPT.py, muster run -m MODULE or muster run --no-python PROGRAM",
        )
    _start(options, Program(kind, tuple(script), framework=how.framework), _typed("muster"), is_single=False)


def _detect(options: LaunchOptions, show: ShowOptions) -> None:
    env = _environment(options)
    if show.record is not None:
        # Before anything is detected: what can't be is what one records.
        recording.write(env, Path(show.record), "muster detect --record")
        print(f"written: {show.record}; muster detect --env-file reads it", file=sys.stderr)
        return
    typed = ["train", "ddp"]
    program = Program("module", ("train", "ddp"), is_ours=True)
    allocation, meeting = _place(env, options, typed, is_single=False)
    planned = launch.plan(allocation, meeting, env, options, program, typed)
    if env.engine:
        planned = planned.with_more({}, [f"in a container: {env.engine}"])
    print(report.as_json(allocation, meeting, planned) if show.as_json else report.table(allocation, meeting, planned))


def _env(options: LaunchOptions, wanted: EnvOptions) -> None:
    env = _environment(options)
    if wanted.docker_args or wanted.apptainer_args:
        found = passing.docker(env) if wanted.docker_args else passing.apptainer(env)
        for note in found.notes:
            print(f"muster: {one_line(note)}", file=sys.stderr)
        print(" ".join(found.words))
        return
    allocation, meeting = _place(env, options, ["muster", "env"], is_single=False)
    port = meeting.master_port or rendezvous.FIRST_PORT
    print(report.exports(frameworks.variables(wanted.format or "torch", allocation, meeting, port)))


def _version(show: VersionOptions) -> None:
    # Here and not above: only this command reads packages' metadata.
    from entrypoint import version

    found = version.values()
    print(json.dumps(found, indent=2) if show.as_json else version.text(found))


def _start(options: LaunchOptions, program: Program, typed: list[str], is_single: bool) -> None:
    if options.spawn is not None:
        options = replace(options, nproc_per_node=str(options.spawn))
    env = _environment(options)
    is_dry = options.dry_run or not env.is_live
    try:
        allocation, meeting = _place(env, options, typed, is_single)
        found = driver.Found() if is_dry else driver.check(allocation, env, program)
    except MusterError as refusal:
        if not is_dry:
            rendezvous.refuse_all(refusal, env, options)
        raise
    if rendezvous.is_open(meeting, allocation) and not is_dry:
        meeting = rendezvous.by_file(meeting, allocation, env, options)
    planned = launch.plan(allocation, meeting, env, options, program, typed).with_more(found.variables, found.notes)
    if is_dry:
        print(report.script(planned))
        return
    launch.check(allocation, meeting)
    if allocation.rank == 0:
        print(report.headline(allocation, meeting, planned), file=sys.stderr)
    launch.execute(planned, env)


def _place(
    env: Environment, options: LaunchOptions, typed: Sequence[str], is_single: bool
) -> tuple[Allocation, Rendezvous]:
    allocation = detection.allocate(env, options, typed, is_single=is_single)
    if is_single:
        allocation = detection.single(allocation, typed)
    return allocation, rendezvous.meet(allocation, env, options)


def _environment(options: LaunchOptions) -> Environment:
    return environment.load(Path(options.env_file)) if options.env_file else environment.live()


def _typed(name: str) -> list[str]:
    return [name, *sys.argv[1:]]


def _run(app: typer.Typer, name: str, argv: list[str]) -> None:
    """Runs the command and exits with its code: 0, or 2 with three lines on stderr."""
    debug = "--debug" in argv or bool(os.environ.get("MUSTER_DEBUG"))
    try:
        typer.main.get_command(app).main(args=argv, prog_name=name, standalone_mode=False)
    except MusterError as error:
        if debug:
            raise
        print(error, file=sys.stderr)
        sys.exit(error.code)
    except USAGE_ERROR as error:
        if debug:
            raise
        if str(error):
            print(_usage(error, [name, *argv]), file=sys.stderr)
        # Without a message it was the command alone, and its help has been shown.
        sys.exit(2)


def _usage(error: Any, typed: list[str]) -> MusterError:
    context = error.ctx
    path = context.command_path if context else typed[0]
    nearest = getattr(error, "possibilities", None)
    if nearest:
        return MusterError(error.message, seen=shlex.join(typed), fix=f"{path} {nearest[0]}")
    wrong = str(error.format_message()).replace("Value error, ", "").rstrip(".")
    return MusterError(wrong, seen=shlex.join(typed), fix=f"{path} --help lists what there is")
