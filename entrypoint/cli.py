"""The commands `train` and `muster`: parse, call, print."""

import json
import os
import re
import shlex
import shutil
import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial, wraps
from importlib.util import find_spec
from itertools import takewhile
from operator import methodcaller
from pathlib import Path
from typing import Annotated, Any

import typer

from muster import interruption
from muster.arguments import command, from_argv, normalise, to_argv, with_homes
from muster.check.options import BenchOptions, DoctorOptions
from muster.config import GUIDE, IN_ONE_PROCESS, STRATEGIES, ConfigFile, Options, check as check_combination, check_here
from muster.config_file import config_of, with_file
from muster.entrypoint import environment, resources, show
from muster.entrypoint.detect import resolve
from muster.entrypoint.detect.allocation import NO_SCHEDULER
from muster.entrypoint.fabric import AUTO, OFF
from muster.entrypoint.launch import frameworks, start
from muster.entrypoint.launch.program import Additions, Program, without_launcher
from muster.entrypoint.options import (
    EnvOptions,
    JobOptions,
    LaunchOptions,
    ProgramOptions,
    ShowOptions,
    TorchrunOptions,
)
from muster.entrypoint.rendezvous import address
from muster.errors import MusterError, explaining, one_line
from muster.help import NAMES as HELP_NAMES, Command
from muster.paths import installed
from muster.units import plural

SETTINGS: dict[str, Any] = {
    # torchrun takes --nproc_per_node as well as --nproc-per-node; so do we.
    "token_normalize_func": methodcaller("replace", "_", "-"),
    "help_option_names": ["-h", "--help"],
}
# Settings of commands with dozens of options.
DETAILED: dict[str, Any] = {**SETTINGS, "help_option_names": list(HELP_NAMES)}

# Checks wait less long for a missing node than a training does.
CHECK_RDZV_TIMEOUT_S = 120

EXAMPLES = {
    "single": "train single --epochs 3\n"
    "train single --model resnet50 --data imagefolder:imagenet\n"
    "train single --name first --resume",
    "dp": "train dp --epochs 3\ntrain dp --model resnet50 --data imagefolder:imagenet\ntrain dp --name first --resume",
    "ddp": "train ddp --epochs 3\n"
    "train ddp --nproc-per-node 4 --model resnet50 --data imagefolder:imagenet\n"
    "srun --ntasks-per-node=1 apptainer exec --nv muster.sif train ddp",
    "fsdp": "train fsdp --model gpt-124m --data tokens:corpus.txt\n"
    "train fsdp --model gpt-1b --data synthetic --max-steps 20 --replicate 2\n"
    "srun --ntasks-per-node=1 apptainer exec --nv muster.sif train fsdp",
    "tp": "train tp --nproc-per-node 2 --model gpt-tiny --data synthetic\n"
    "train tp --model gpt-1b --data tokens:corpus.txt --tensor-parallel 4\n"
    "srun --ntasks-per-node=1 apptainer exec --nv muster.sif train tp",
    "pipeline": "train pipeline --nproc-per-node 2 --model gpt-tiny --data synthetic\n"
    "train pipeline --model gpt-1b --data tokens:corpus.txt --microbatches 8\n"
    "srun --ntasks-per-node=1 apptainer exec --nv muster.sif train pipeline",
    "run": "muster run train.py --epochs 3\n"
    "muster run --nproc-per-node 4 -m package.module\n"
    "srun --ntasks-per-node=1 apptainer exec --nv muster.sif muster run train.py",
    "detect": "muster detect\nmuster detect --record job.env\nmuster detect --env-file job.env --json",
    "doctor": "muster doctor --quick\nsrun --ntasks-per-node=1 apptainer exec --nv muster.sif muster doctor",
    "bench": "muster bench --nproc-per-node 2 --collectives all_reduce\n"
    "srun --ntasks-per-node=1 apptainer exec --nv muster.sif muster bench",
    "env": 'eval "$(muster env)"\ndocker run $(muster env --docker-args) muster train ddp',
}

# typer bundles its command-line parser; the class of its usage errors is only reached by a subclass that it exports.
USAGE_ERROR: type[Exception] = typer.BadParameter.__mro__[1]


def train() -> None:
    """The command `train`."""
    argv = typed = normalise(sys.argv[1:])
    strategy, plain = next(iter(typed), ""), None
    if strategy in STRATEGIES:
        # A file that is missing here may exist on other nodes: so each process reports that it is missing.
        refused = _printed_once() if _config_exists(config_of(typed)) else nullcontext()
        with interruption.command(f"train {strategy}", "--debug" in typed), refused:
            argv = with_file(typed)
        plain = from_argv(argv[1:], LaunchOptions, Options, ConfigFile)
    if plain is None:
        _run(_trainings(), "train", argv, typed)
        return
    with interruption.command(f"train {strategy}", plain[0].debug):
        _train(strategy, *plain)


def _train(strategy: str, options: LaunchOptions, training: Options, _: ConfigFile) -> None:
    """Replaces this process by the launch of a training."""
    with _printed_once():
        check_combination(strategy, training)
    program = Program("module", ("muster.train", strategy, *to_argv(training)), is_ours=True)
    check = partial(check_here, training.model, training.data)
    start.start(options, program, ["train", *sys.argv[1:]], is_single=strategy in IN_ONE_PROCESS, check=check)


def _trainings(act: Callable[[str, LaunchOptions, Options, ConfigFile], None] = _train) -> typer.Typer:
    """The subcommands of `train`; `act` is called with the strategy and the options of a training."""
    app = typer.Typer(
        help="Train PyTorch models, on this machine or in the job that this is part of.",
        epilog=GUIDE,
        context_settings=SETTINGS,
        no_args_is_help=True,
    )
    for strategy, text in STRATEGIES.items():
        _detailed(app, strategy, text)(command(partial(act, strategy), LaunchOptions, Options, ConfigFile))
    app.command("export", cls=Command, help="Write a run's weights as one plain file, for torch.load.")(_export)
    app.command("pack", cls=Command, help="Put images into few tar files, for --data shards:FOLDER.")(_pack)
    app.command("selftest", cls=Command, help="Train here with each strategy, and compare: PASS or FAIL.")(_selftest)
    return app


def _detailed(app: typer.Typer, name: str, text: str, **settings: Any) -> Callable[..., Any]:
    """The decorator `app.command` for a command with more options than fit on one screen: see muster/help.py."""
    return app.command(name, cls=Command, help=text, epilog=EXAMPLES.get(name), context_settings=DETAILED | settings)


def _check(words: Sequence[str], site: str, options: JobOptions) -> None:
    """Checks the command `words` of a job; ends this process if it is one of ours and has a usage error.

    Raises:
        MusterError: it would do nothing in a job with `options` at `site`, or can't run in one.
    """
    typed = normalise(words[1:])
    has_config = _config_exists(config_of(typed))

    def check(strategy: str, launch: LaunchOptions, training: Options, _: ConfigFile) -> None:
        _check_nodes(launch, words, site, options)
        # The arguments of the job script are added after these: --data may be among them.
        needs_data = training.data == Options.data
        if has_config:
            check_combination(strategy, replace(training, data="synthetic") if needs_data else training)

    if words[0] not in ("train", "muster") or typed[:1] in (["export"], ["pack"], ["selftest"]):
        return
    # Options after `muster run` may be a script's.
    if not typed or {*HELP_NAMES, "--version"} & set(typed[:2] if typed[0] == "run" else typed):
        fix = f"{shlex.join(words)}, without a job" if typed else "train ddp, or another strategy"
        raise MusterError("a job with this command would do nothing", seen=shlex.join(words), fix=fix)
    if words[0] == "train":
        _run(_trainings(check), "train", with_file(typed) if has_config else typed, typed)
        return
    app = _commands()
    for each in app.registered_commands:
        callback: Any = each.callback  # commands are parsed, but not run
        each.callback = wraps(callback)(lambda **_: None)  # pyright: ignore
    # The script of `muster run` may be among the arguments of the job script, which are added after these.
    of_run = from_argv(words[2:], *RUN, rest=[]) if typed[0] == "run" else None
    if of_run:
        _check_nodes(of_run[2].applied(of_run[0]), words, site, options)
    elif typed[0] not in {group.name for group in app.registered_groups}:
        _run(app, "muster", list(words[1:]))


def _check_nodes(launch: LaunchOptions, words: Sequence[str], site: str, options: JobOptions) -> None:
    """Refuses launch options of the command `words` that the nodes of its job would refuse."""
    from muster.entrypoint.jobs.script import Wanted, made_by
    from muster.entrypoint.sites import profiles

    if launch.nproc_per_node != "gpu":  # GPUs are on the job's nodes
        resources.processes_per_node(environment.Environment({}), launch, NO_SCHEDULER)
    if launch.fabric not in (AUTO, OFF):
        profiles.load_fabric(launch.fabric)
    num_nodes = options.nodes
    low, high = launch.min_nodes, launch.num_nodes
    is_fewer = low is not None and high is not None and low <= num_nodes < high
    if high not in (None, num_nodes) and not is_fewer:
        raise MusterError(
            f"--nnodes says {launch.nnodes}, and this job has {plural(num_nodes, 'node')}",
            seen=shlex.join(words),
            fix=made_by(site, replace(Wanted(**vars(options), command=tuple(words)), nodes=high)),
        )
    if launch.node_rank is not None and num_nodes > 1:
        raise MusterError(
            f"--node-rank is for one node, and this job runs the command on all {num_nodes} nodes",
            seen=shlex.join(words),
            fix="leave --node-rank out: each node finds its own",
        )


def _config_exists(config: str | None) -> bool:
    """Whether the file of options `config` exists here, or none is given; a job's may exist only on its nodes."""
    return config is None or os.path.exists(os.path.expanduser(config))


def _export(
    run: Annotated[str, typer.Argument(metavar="RUN", help="The run's folder, or one of its checkpoints.")],
    to: Annotated[str | None, typer.Option(help="The file. Default: weights.pt in the run's folder.")] = None,
) -> None:
    _become("muster.train.export", *([] if to is None else [f"--to={to}"]), "--", run)


def _pack(
    folder: Annotated[str, typer.Argument(metavar="FOLDER", help="CLASS/IMAGE in it, or train/ and val/ above CLASS.")],
    out: Annotated[str, typer.Argument(metavar="OUT", help="A new folder for the tar files.")],
    shard_mb: Annotated[int, typer.Option(help="Largest size of a tar file, in MB.", min=1)] = 1000,
    seed: Annotated[int, typer.Option(help="Seed of the images' random order.", min=0)] = 0,
) -> None:
    _become("muster.train.data.pack", f"--shard-mb={shard_mb}", f"--seed={seed}", "--", folder, out)


def _selftest(
    ranks: Annotated[int | None, typer.Option(help="2, 4 or 8 processes. Default: one a GPU, or 2.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")] = False,
) -> None:
    if ranks not in (None, 2, 4, 8):
        raise MusterError("selftest runs on 2, 4 or 8 ranks", seen=f"--ranks={ranks}", fix="train selftest --ranks 2")
    _become("muster.train.selftest", *([] if ranks is None else [f"--ranks={ranks}"]), *(["--json"] if as_json else []))


def _report(
    runs: Annotated[list[str], typer.Argument(metavar="RUN...", help="Runs, folders of runs, or summary.json files.")],
    output: Annotated[
        str | None, typer.Option(help="The report's folder. Default: report in the one folder given, or else here.")
    ] = None,
) -> None:
    _become("muster.report", *([] if output is None else [f"--output={output}"]), "--", *runs)


def _become(module: str, *arguments: str) -> None:
    """Replaces this process by `python -m module` of ours; no file in the working directory can take its place."""
    if module.startswith("muster.train"):
        os.getcwd()  # raises an error if the directory is gone, for which torch would print an unclear message
    interruption.hold()
    os.execv(sys.executable, [sys.executable, "-P", "-m", module, *arguments])


RUN = (LaunchOptions, ProgramOptions, TorchrunOptions)
"""The options of `muster run`, before the script."""


def muster() -> None:
    """The command `muster`."""
    script: list[str] = []
    plain = from_argv(sys.argv[2:], *RUN, rest=script) if sys.argv[1:2] == ["run"] else None
    if plain and script:
        with interruption.command("muster run", plain[0].debug):
            _run_script(*plain, script=script)
        return
    argv = sys.argv[1:]
    # The words after `muster run` are a script's, which may want them as they are.
    _run(_commands(), "muster", argv if argv[:1] == ["run"] else with_homes(argv), argv)


def _commands() -> typer.Typer:
    """The app with the commands of `muster`."""
    from muster.entrypoint.fabric import commands as fabric_commands
    from muster.entrypoint.sites import commands as site_commands

    app = typer.Typer(
        help="Start programs on all nodes of a job, and see what was found about it.",
        context_settings=SETTINGS,
        no_args_is_help=True,
    )
    words = Annotated[list[str], typer.Argument(metavar="SCRIPT [ARGS]...", help="The program, then its arguments.")]
    run = "Start SCRIPT on all ranks of this job, in torchrun's place."
    _detailed(app, "run", run, allow_interspersed_args=False)(command(_run_script, *RUN, script=words))
    _detailed(app, "detect", "Show what was found, where it came from, what would run.")(
        command(_detect, LaunchOptions, ShowOptions)
    )
    doctor = "Look at all nodes of this job: what is wrong, and where."
    _detailed(app, "doctor", doctor)(command(partial(_start_check, "doctor"), LaunchOptions, DoctorOptions))
    bench = "Measure how fast ranks reach each other, and by which network."
    _detailed(app, "bench", bench)(command(partial(_start_check, "bench"), LaunchOptions, BenchOptions))
    app.command("report", cls=Command, help="Show what runs measured, and how they scale, on one page.")(_report)
    site = Annotated[str, typer.Argument(metavar="SITE", help="A site's profile, by name or file; or list.")]
    last = typer.Argument(metavar="-- COMMAND", help="What runs on each node. Default: train ddp.")
    app.command("job", cls=Command, help="Print a job script for a site; 'muster job list' names them.")(
        command(_job, JobOptions, site=site, command=Annotated[list[str] | None, last])
    )
    app.command("site", cls=Command, help="Show the profile of this site, or of another one.")(site_commands.site)
    fabric_commands.add_to(app)
    _detailed(app, "env", "Print variables for other frameworks, or a container's options.")(
        command(_env, LaunchOptions, EnvOptions)
    )
    app.command("version", cls=Command, help="Show what is installed, and the libraries that torch loads.")(_version)
    return app


def _run_script(options: LaunchOptions, how: ProgramOptions, torchrun: TorchrunOptions, script: list[str]) -> None:
    own = without_launcher(["python", "-m", *script] if how.module else script)
    place = 0
    if re.fullmatch(r"(.*/)?(mpirun|mpiexec|orterun|prterun|srun)(\..*)?", script[0]):  # mpiexec.hydra, mpirun.openmpi
        place = next((at for at, word in enumerate(script) if re.fullmatch(r"(.*/)?python[0-9.]*|.*\.py", word)), 0)
    if how.framework == "torch" and (own is not None or place):
        options_given = sys.argv[2 : len(sys.argv) - len(script)]
        kept = [word for word in options_given if word not in ("-m", "--module", "--no-python")]
        rest = script[place:] if place else own
        wrong = "this launcher would start ranks of its own in each rank: muster run takes its place"
        raise MusterError(
            f"each rank would start {script[0]} again: muster run has to come after it" if place else wrong,
            seen=shlex.join(["muster", *sys.argv[1:]]),
            fix=shlex.join([*script[:place], "muster", "run", *kept, *(rest or ["SCRIPT.py"])]),
        )
    if re.fullmatch(r"python(3(\.\d+)?)?", script[0]) and how.framework == "torch" and not how.no_python:
        # As it is typed after mpirun and srun: python, its -u, perhaps -m.
        script = script[2 if script[1:2] == ["-u"] else 1 :]
        if script[:1] == ["-m"]:
            how, script = replace(how, module=True), script[1:]
        if not script or script[0].startswith("-"):
            fix = shlex.join(["muster", "run", "--no-python", *sys.argv[2:]]) if script else "muster run SCRIPT.py"
            raise MusterError("no script after python", seen=shlex.join(["muster", *sys.argv[1:]]), fix=fix)
    if how.module and how.no_python:
        raise MusterError("a module can't run without python", seen="-m with --no-python", fix="give one of the two")
    kind = "module" if how.module else "program" if how.no_python else "script"
    if how.framework != "torch" and kind == "script" and not script[0].endswith(".py"):
        kind = "program"
    program = Program(kind, tuple(script), framework=how.framework, torchrun=torchrun.passed_on())
    start.start(torchrun.applied(options), program, ["muster", *sys.argv[1:]], check=partial(_check_program, program))


def _check_program(program: Program) -> None:
    """Raises MusterError where this host can't start `program`: it does not exist, or is of another kind."""
    path = program.words[0]
    if program.kind == "module":
        _check_is_module(path)
    elif program.kind == "script":
        # Where this user may not look, os.path.isdir returns False, and Path.is_dir raises an OSError.
        is_folder = os.path.isdir(path)
        script = os.path.join(path, "__main__.py") if is_folder else path  # what python runs of a folder
        if not os.path.isfile(script):
            wrong = "a folder without __main__.py is no script" if is_folder else "there is no such script"
            shown = shlex.quote(os.path.join(path, "SCRIPT.py")) if is_folder else "SCRIPT.py"
            fix = f"muster run {shown}, muster run -m MODULE or muster run --no-python PROGRAM"
            raise MusterError(wrong, seen=path, fix=fix)
        _check_is_python(script, program.words[1:])
    elif shutil.which(path) is None:
        fix = "the path of an executable file, such as ./PROGRAM; for a Python script: python SCRIPT"
        raise MusterError("there is no such program, or it can't be run", seen=path, fix=fix)


def _check_is_python(path: str, arguments: Sequence[str]) -> None:
    fix = "a script that this user may read, on every node"
    with explaining("the script can't be read", seen=path, fix=fix), open(path, "rb") as file:
        first = file.readline(200)
    if first.startswith(b"\x7fELF") or (first.startswith(b"#!") and b"python" not in first):
        seen = "a compiled program" if first.startswith(b"\x7fELF") else first.decode(errors="replace").strip()
        # Without a folder it would be looked for on PATH.
        fix = shlex.join(["muster", "run", "--no-python", path if "/" in path else f"./{path}", *arguments])
        raise MusterError(f"{path} is no Python script", seen=one_line(seen), fix=fix)


def _check_is_module(name: str) -> None:
    sys.path.append("")  # python -m looks in the working directory too
    with suppress(ValueError):  # of an empty name
        if find_spec(name.partition(".")[0]) and not name.endswith(".py"):
            return
    fix = "muster run SCRIPT.py, or muster run -m MODULE by a name without .py, from the folder that it is in"
    raise MusterError("there is no such module", seen=name, fix=fix)


def _start_check(name: str, options: LaunchOptions, checks: DoctorOptions | BenchOptions) -> None:
    """Starts doctor or bench (muster/check) on the ranks, as a training is started."""
    if not any(word.startswith(("--rdzv-timeout", "--rdzv_timeout")) for word in sys.argv):
        options = replace(options, rdzv_timeout=CHECK_RDZV_TIMEOUT_S)
    program = Program("module", ("muster.check", name, *to_argv(checks)), is_ours=True)
    start.start(options, program, ["muster", *sys.argv[1:]])


def _detect(options: LaunchOptions, wanted: ShowOptions) -> None:
    env = start.environment_of(options)
    if wanted.record is not None:
        from muster.entrypoint import recording

        # Before detection, which may fail: recordings are made above all where it does.
        recording.save(env, Path(wanted.record))
        print(one_line(f"written: {wanted.record}; muster detect --env-file reads it"), file=sys.stderr)
        return
    typed = ["train", "ddp"]
    context = start.find(env, options, typed)
    of_container = Additions(notes=(f"in a container: {env.engine}",) if env.engine else ())
    planned = start.plan(context, Program("module", ("muster.train", "ddp"), is_ours=True), typed, of_container)
    print((show.as_json if wanted.as_json else show.as_table)(context, planned))


def _job(options: JobOptions, site: str, command: list[str] | None) -> None:
    from muster.entrypoint.jobs import making
    from muster.entrypoint.jobs.script import COMMAND, Wanted
    from muster.entrypoint.sites.commands import print_list

    if site == "list":
        if command:
            wrong, fix = "list is no site: it shows the sites' names", f"muster job SITE -- {shlex.join(command)}"
            raise MusterError(wrong, seen=shlex.join(["muster", *sys.argv[1:]]), fix=fix)
        print_list()
        return
    if command:
        _check(command, site, options)
    print(making.make(site, Wanted(**vars(options), command=tuple(command or COMMAND))), end="")


def _env(options: LaunchOptions, wanted: EnvOptions) -> None:
    env = start.environment_of(options)
    if wanted.docker_args or wanted.apptainer_args:
        from muster.entrypoint import container

        found = container.docker(env) if wanted.docker_args else container.apptainer(env)
        for note in found.notes:
            print(f"muster: {one_line(note)}", file=sys.stderr)
        print(" ".join(found.words))
        return
    context = start.find(env, options, ["muster", "env"])
    allocation = context.allocation
    if context.rendezvous.master_addr is None:  # a launch would agree on it by a file
        wrong, seen = "the address of node rank 0 is unknown here", context.rendezvous.sources["master_addr"]
        fix = "--master-addr HOST, the same in each process; or muster run SCRIPT, which finds it by a file"
        raise MusterError(wrong, seen=f"{allocation.num_nodes} nodes, no list of them; a launch uses {seen}", fix=fix)
    port = context.rendezvous.master_port or address.FIRST_PORT
    given, name = context.options.nproc_per_node, options.nproc_name
    if given and allocation.mode == "agent" and allocation.nproc_per_node > 1:
        raise MusterError(
            "a shell is one process, and muster env starts no others",
            seen=f"{name}={given}",
            fix=f"muster run SCRIPT starts them; or start one task for each of them, without {name}",
        )
    found = frameworks.VARIABLES[wanted.format or "torch"](allocation.of_tasks(), context.rendezvous, port)
    print(show.exports(found))


def _version(as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")] = False) -> None:
    from muster.entrypoint import version

    found = version.values()
    print(json.dumps(found, indent=2) if as_json else version.text(found))


def _run(app: typer.Typer, name: str, argv: list[str], typed: Sequence[str] | None = None) -> None:
    """Runs the command `argv`; an error ends this process with three lines on stderr, which show it as `typed`."""
    if argv[:1] == ["--version"]:
        with interruption.command(f"{name} --version"):
            print(f"{name} {installed('muster') or 'of unknown version'}")
        return
    asked = [command for command in app.registered_commands if command.name == next(iter(argv), None)]
    if asked:
        # typer builds the options of all commands at once: those of the others would take a fifth of the launch's time.
        app.registered_commands, app.registered_groups = asked, []
        app.callback()(lambda: None)  # without a callback, typer drops the name of a single command
    parser = typer.main.get_command(app)
    # What follows -- is another command's.
    is_debugged = "--debug" in takewhile(lambda word: word != "--", argv)
    path = " ".join([name, *argv[: len(asked)]])
    explained = nullcontext()
    if argv[:1] == ["--install-completion"]:  # which writes below the user's home
        fix = f"HOME=FOLDER, where you may write; or put what {name} --show-completion prints into your shell's file"
        explained = explaining("the completion can't be installed", seen=os.path.expanduser("~"), fix=fix)
    with interruption.command(path, is_debugged), explained:
        try:
            parser.main(args=argv, prog_name=name, standalone_mode=False)
        except USAGE_ERROR as error:
            if str(error):
                with _printed_once():
                    raise _usage(error, [name, *(argv if typed is None else typed)], path) from None
            # Without a message the command was given alone, and its help has been shown.
            sys.exit(2)


@contextmanager
def _printed_once() -> Generator[None]:
    """A context for an error that all processes of a launch meet: rank 0 raises it, the others exit with its code."""
    try:
        yield
    except MusterError as error:
        with suppress(MusterError):
            if resolve.resolve(environment.live(), LaunchOptions(), ["train"]).rank:
                sys.exit(error.code)
        raise


def _usage(error: Any, typed: list[str], path: str) -> MusterError:
    context = error.ctx
    path = context.command_path if context else path
    from muster import hints

    asked, parameter = getattr(error, "option_name", None), getattr(error, "param", None)
    if asked is not None and context:
        # The parser takes -epochs for several options of one letter, and names only -e.
        whole = next((word for word in typed if len(asked) == 2 and re.match(rf"-\w*{asked[1]}\w", word)), asked)
        fix = hints.of_option(whole.partition("=")[0], context.command.params, path, typed)
        return MusterError(error.message.replace(asked, whole), seen=shlex.join(typed), fix=fix)
    wrong, _, meant = str(error.format_message()).replace("Value error, ", "").rstrip(".").partition(". Did you mean ")
    if meant:
        fix = " or ".join(f"{path} {name}" for name in re.findall("'(.+?)'", meant))
        return MusterError(wrong, seen=shlex.join(typed), fix=fix)
    fix = hints.of_value(parameter, path) if parameter is not None else None
    is_missing = wrong.startswith("Missing argument") and path == "muster run"
    if is_missing and typed[-2].startswith("-") and os.path.isfile(typed[-1]):
        wrong = f"no script is left: {typed[-1]} was taken for the value of {typed[-2]}"
        fix = f"{path} {typed[-2]} VALUE {shlex.quote(typed[-1])}"
    if path == "muster" and {"train", *STRATEGIES} & set(typed[1:2]):
        # As in `docker run muster train ddp`, where `muster` is the image.
        fix = shlex.join(["train", *typed[2 if typed[1] == "train" else 1 :]])
    if path == "train" and typed[1].lower() in STRATEGIES:
        fix = shlex.join(["train", typed[1].lower(), *typed[2:]])
    extra = "options begin with --, and values with blanks need quotes; " if "extra argument" in wrong else ""
    return MusterError(wrong, seen=shlex.join(typed), fix=fix or f"{extra}{path} --help lists what there is")
