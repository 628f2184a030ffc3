"""From options to the exec that ends this program: what every command that starts ranks does.

environment -> Allocation -> Rendezvous -> Launch, with what the site, the driver and the fabric add -> exec
"""

import errno
import os
import re
import shlex
import shutil
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn

from muster import interruption
from muster.entrypoint import environment, resources
from muster.entrypoint import show as report
from muster.entrypoint.detect import resolve
from muster.entrypoint.detect.allocation import Allocation
from muster.entrypoint.environment import Environment
from muster.entrypoint.fabric import launch as fabric_launch
from muster.entrypoint.launch import additions, debugging, driver, frameworks, torchrun
from muster.entrypoint.launch import home as homes
from muster.entrypoint.launch.additions import Additions
from muster.entrypoint.launch.program import Launch, Program
from muster.entrypoint.options import LaunchOptions
from muster.entrypoint.rendezvous import address as rendezvous
from muster.entrypoint.rendezvous import network
from muster.entrypoint.rendezvous.address import Rendezvous
from muster.entrypoint.sites import defaults, recognise
from muster.entrypoint.sites.defaults import Defaults
from muster.entrypoint.sites.recognise import Recognised
from muster.errors import MusterError
from muster.variables import LaunchVariable

INIT = "tini"
WARNINGS = (signal.SIGUSR1, signal.SIGUSR2)
SPAWN = "muster.entrypoint.agent.spawn"

MOST_RANKS_PER_CORE = 4
"""Ranks that may share a core without a word: a laptop tries with a few what a cluster does."""

MOST_NODES_TEXT = 100_000
"""Characters of the list of nodes that a program is told; of a longer one none."""

MOST_SCRIPT_BYTES = 500_000
"""Of a script that is read for what it expects of its launch."""


@dataclass(frozen=True)
class Place:
    """What is known of a launch before its command is made.

    Attributes:
        allocation: which of the job's processes this is.
        meeting: where the ranks meet.
        site: whose profile was used; None without one. `site.site` is the profile itself.
        defaults: what that gave: the user's options with the site's where there were none, variables and notes.
    """

    allocation: Allocation
    meeting: Rendezvous
    site: Recognised | None
    defaults: Defaults


def environment_of(options: LaunchOptions) -> Environment:
    """This process's environment, or the recorded one that the options name."""
    if options.env_file is None:
        return environment.live()
    # Here and not above: a launch reads none.
    from muster.entrypoint import recording

    return recording.load(Path(options.env_file))


def find(
    env: Environment, options: LaunchOptions, typed: Sequence[str], *, is_single: bool = False, is_start: bool = False
) -> Place:
    """Where the process of `env` stands.

    Args:
        env: its variables.
        options: what the user says about the launch.
        typed: the command, for errors that tell how to start it.
        is_single: whether a world of one is wanted.
        is_start: whether something is to be started: at some sites this image can't run.

    Raises:
        MusterError: it can't be told, or does not fit together; or the image does not run at this site.
    """
    site = recognise.here(env, options)
    if is_start:
        recognise.check(site)
    if is_single and options.nproc_per_node not in (None, "1"):
        raise MusterError(
            "this strategy trains in one process",
            seen=f"--nproc-per-node={options.nproc_per_node}",
            fix="train ddp, or leave --nproc-per-node out",
        )
    allocation = resolve.resolve(env, options, typed, is_single=is_single)
    if is_single:
        allocation = resolve.single(allocation, typed)
    found = defaults.of(site, allocation.num_nodes, env, options)
    gpus = site.site.nodes.gpus if site else None
    missing = resources.without_gpus(env, allocation, options, typed, gpus.value if gpus else 0)
    if missing:
        found = replace(found, notes=(*found.notes, missing))
    try:
        meeting = rendezvous.meet(allocation, env, found.options)
    except MusterError as refusal:
        raise _with_site(refusal, found) from None
    return Place(allocation, _with_sources(meeting, found), site, found)


def _with_sources(meeting: Rendezvous, found: Defaults) -> Rendezvous:
    # The rendezvous takes all options for the user's.
    sources = dict(meeting.sources)
    if "address_suffix" in found.sources:
        profile = f"the address suffix of {found.sources['address_suffix']}"
        sources["master_addr"] = sources["master_addr"].replace("--address-suffix", profile)
    if "interface" in found.sources and sources["interface"] == "--interface":
        sources["interface"] = found.sources["interface"]
    return replace(meeting, sources=sources)


def _with_site(refusal: MusterError, found: Defaults) -> MusterError:
    if not found.sources:
        return refusal
    seen = f"{refusal.seen}; {found.notes[0]}"
    return MusterError(refusal.wrong, seen=seen, fix=f"{refusal.fix}; or --site off", code=refusal.code)


def start(
    options: LaunchOptions,
    program: Program,
    typed: Sequence[str],
    is_single: bool = False,
    check: Callable[[], None] = lambda: None,
) -> None:
    """Becomes the launch of `program`; returns only where nothing is to be started.

    Args:
        options: what the user said of the launch.
        program: what runs in each rank.
        typed: the command line, for errors and for trainers that start anew.
        is_single: whether it runs in one process, whatever is allocated.
        check: refuses what this host does not have. Called where this process is the only one of the launch: of several
            each would say the same, or one would leave the others waiting. They find out together, as ranks.

    Raises:
        MusterError: it can't be started here.
    """
    if options.spawn is not None:
        options = replace(options, nproc_per_node=str(options.spawn))
    env = environment_of(options)
    is_dry = options.dry_run or not env.is_live
    if not is_dry:
        # A scheduler's early warnings would end this process: they are kept until the one that it becomes is ready to
        # hear them, which may take a minute; what is held stays held through an exec. SIGTERM is not: before anything
        # is learnt it may as well end the process.
        signal.pthread_sigmask(signal.SIG_BLOCK, WARNINGS)
    try:
        here = find(env, options, typed, is_single=is_single, is_start=True)
        allocation, meeting = here.allocation, here.meeting
        if not is_dry and allocation.num_nodes == allocation.tasks_on_node == 1:
            check()
        found = Additions() if is_dry else driver.check(allocation, env, program)
        site = here.site.site if here.site else None
        fabric = fabric_launch.inject(allocation, env, options, program, found.variables, site)
    except MusterError as refusal:
        if not is_dry:
            rendezvous.refuse_all(refusal, env, options)
        raise
    if rendezvous.is_open(meeting, allocation) and not is_dry:
        meeting = rendezvous.by_file(meeting, allocation, env, here.defaults.options)
    planned = plan(allocation, meeting, env, here.defaults.options, program, typed)
    # The fabric's library path has the driver's in it; a site's values come before its fabric's.
    for more in (found, fabric, here.defaults):
        planned = planned.with_more(more.variables, more.notes)
    if here.site and program.is_ours:
        planned = planned.with_more({LaunchVariable.SITE_FOUND: here.site.name}, ())
    debug = debugging.folder_of(meeting.rdzv_id, Path.cwd())
    if options.debug_distributed:
        planned = planned.with_more(*debugging.plan(env, debug, has_gpus=allocation.gpus_seen > 0))
    if is_dry:
        print(report.script(planned))
        return
    listens = allocation.node_rank == 0 and (allocation.mode == "agent" or allocation.rank == 0)
    if listens and meeting.master_port is not None:
        port, source = meeting.master_port, meeting.sources["master_port"]
        network.check_port_free(port, f"{port} from {source}")
    if options.debug_distributed:
        debugging.make(debug)
    if allocation.rank == 0:
        shown = allocation if program.framework == "torch" else allocation.of_tasks()
        print(report.headline(shown, meeting, planned), file=sys.stderr)
    execute(planned, env)


def plan(
    allocation: Allocation,
    meeting: Rendezvous,
    env: Environment,
    options: LaunchOptions,
    program: Program,
    command: Sequence[str],
) -> Launch:
    """The command and the variables for `program` in this place."""
    notes = list(allocation.notes)
    home = homes.plan(env)
    variables = _variables(allocation, meeting, env, notes) | dict(home.variables)
    notes += home.notes
    notes += _of_script(program, allocation, env)
    if env.is_live and os.getpid() == 1 and not _init(env):
        notes.append(f"this is process 1, and there is no {INIT} to pass SIGTERM on and to reap: docker run --init")
    port = meeting.master_port
    if port is None:
        port = network.free_port() if env.is_live else 0
    if allocation.mode == "agent" and options.spawn and program.framework == "torch":
        argv = _spawn_argv(allocation, meeting, port, program)
    elif allocation.mode == "agent" and program.framework == "torch":
        argv = torchrun.agent_argv(allocation, meeting, options, [*program.torchrun, *program.agent_words()])
        variables |= torchrun.agent_variables(allocation, options)
    else:
        _refuse_torchruns(allocation, options, program)
        if program.torchrun:
            notes.append(
                f"torchrun does not start these ranks, and its options do nothing: {shlex.join(program.torchrun)}"
            )
        argv = program.own_words()
        variables |= frameworks.variables(program.framework, allocation, meeting, port)
    if program.is_ours:
        # A file in the user's working directory must not take the place of a library's module.
        variables["PYTHONSAFEPATH"] = "1"
        variables |= of_the_job(allocation, env)
        variables[LaunchVariable.COMMAND] = shlex.join(command)
    if options.debug:
        variables["MUSTER_DEBUG"] = "1"
    for source in (meeting.sources["master_addr"], meeting.sources["master_port"]):
        name, yours, _ = source.partition(", yours")
        if yours:
            notes.append(f"{name}={env[name]} is yours: it was kept")
    # torchrun reads PET_* as the defaults of its own options: inherited ones would change the launch unseen. And a job
    # that a rank submits inherits what the rank's own launch had set.
    removed = tuple(sorted(name for name in env if name.startswith("PET_") or name in tuple(LaunchVariable)))
    if removed:
        notes.append(f"removed: {', '.join(removed)}")
    hears = program.is_ours or torchrun.AGENT in argv or SPAWN in argv
    return Launch(tuple(argv), variables, removed, tuple(notes), home.folder, hears)


def _of_script(program: Program, allocation: Allocation, env: Environment) -> list[str]:
    """What a script that was made for another launch would do here; nothing of one that reads torchrun's variables."""
    text = ""
    with suppress(OSError, ValueError):
        path = Path(program.words[0])
        if program.kind == "script" and path.is_file() and path.stat().st_size < MOST_SCRIPT_BYTES:
            text = path.read_text(encoding="utf-8", errors="replace")
    name, num_ranks = Path(program.words[0]).name, allocation.nproc_per_node
    is_agent = allocation.mode == "agent"
    notes: list[str] = []
    for number in ("SLURM_PROCID", "SLURM_LOCALID"):
        if is_agent and num_ranks > 1 and number in text and number in env and not re.search(r"\bRANK\b", text):
            notes.append(
                f"{name} reads {number}, which is the same in this task's {num_ranks} ranks: let it read RANK and "
                f"LOCAL_RANK, or start a task for each rank: srun --ntasks-per-node={num_ranks} muster run {name}"
            )
            break
    if num_ranks > 1 and re.search(r"\b(mp|multiprocessing)\.(spawn|start_processes)\(", text):
        one = "--nproc-per-node 1" if is_agent else "one task on each node"
        notes.append(f"{name} starts processes itself, and here in each of a node's {num_ranks} ranks: give it {one}")
    # DeepSpeed's scripts have the option too, and it reads the variable.
    if (found := re.search(r"--local[_-]rank\b", text)) and not re.search("LOCAL_RANK|deepspeed", text):
        notes.append(f"{name} takes {found[0]}, which no rank is given: let it read LOCAL_RANK, as under torchrun")
    return notes


def _refuse_torchruns(allocation: Allocation, options: LaunchOptions, program: Program) -> None:
    """Refuses what torchrun alone could do, where it starts no ranks."""
    given = {
        "--max-restarts": options.max_restarts,
        "--nnodes": options.nnodes if options.min_nodes is not None else None,
        "--numa-binding": options.numa_binding,
        "--nproc-per-node": options.nproc_per_node if allocation.mode == "agent" else None,
    }
    for name, value in given.items():
        if value:
            is_worker = allocation.mode == "worker"
            starter = (
                "the scheduler starts each rank here" if is_worker else "one process is started here, not by torchrun"
            )
            raise MusterError(
                f"{starter}, and {name} is torchrun's work",
                seen=f"{name}={value}, {allocation.tasks_on_node} tasks on this node, --framework {program.framework}",
                fix=f"one task on each node, or leave {name} out" if is_worker else f"leave {name} out",
            )


def _variables(allocation: Allocation, meeting: Rendezvous, env: Environment, notes: list[str]) -> dict[str, str]:
    """Defaults for what the user did not set."""
    wanted: dict[str, str] = {}
    set_by_user = dict(env)
    cores = resources.cores(env, allocation.cpus_on_node)
    if cores is not None:
        if cores == 1 and allocation.job_id is not None and env.is_live:
            notes.append("this process has one core: its ranks and data workers share it; ask for more CPUs a task")
        num_cores, num_ranks = max(cores, allocation.cpus_on_node or 0), allocation.nproc_per_node
        if num_ranks > MOST_RANKS_PER_CORE * num_cores:
            notes.append(
                f"{num_ranks} ranks on this node share {num_cores} core{'' if num_cores == 1 else 's'}: they slow each "
                f"other down, and each takes memory; --nproc-per-node {num_cores} starts one for each core"
            )
        threads = resources.threads_per_rank(
            cores, allocation.cpus_on_node, allocation.nproc_per_node, allocation.tasks_on_node
        )
        by_default = allocation.default_threads
        if by_default is not None:
            set_by_user.pop("OMP_NUM_THREADS")
            threads = min(threads, int(by_default))
            if str(threads) != by_default:
                notes.append(
                    f"OMP_NUM_THREADS={by_default} was set by {allocation.scheduler}: {threads} for each of this "
                    f"node's {allocation.nproc_per_node} ranks was taken"
                )
        wanted["OMP_NUM_THREADS"] = str(threads)
    if meeting.interface is not None:
        wanted["NCCL_SOCKET_IFNAME"] = wanted["GLOO_SOCKET_IFNAME"] = meeting.interface
    found = additions.defaults(wanted, set_by_user)
    notes += found.notes
    return dict(found.variables)


def _spawn_argv(allocation: Allocation, meeting: Rendezvous, port: int, program: Program) -> list[str]:
    """The command that starts this node's ranks by multiprocessing, in torchrun's place."""
    if program.torchrun:
        raise MusterError("--spawn does without torchrun", seen=shlex.join(program.torchrun), fix="leave --spawn out")
    if program.kind == "program":
        raise MusterError(
            "--spawn runs Python in processes of its own, and no other program",
            seen=shlex.join(["--no-python", *program.words[:1]]),
            fix="leave --spawn out",
        )
    return [
        sys.executable,
        "-P",
        "-m",
        SPAWN,
        f"--nnodes={allocation.num_nodes}",
        f"--node-rank={allocation.node_rank}",
        f"--nproc-per-node={allocation.nproc_per_node}",
        f"--master-addr={meeting.address}",
        f"--master-port={port}",
        *program.agent_words(),
    ]


def of_the_job(allocation: Allocation, env: Mapping[str, str]) -> dict[str, str]:
    """What our programs want to know of the job: its nodes, scheduler, attempt, and its limit in unix seconds.

    The nodes are by node_rank, as the scheduler calls them: so one that does not come has a name.
    """
    wanted: dict[str, str] = {}
    if allocation.scheduler not in ("local", "manual"):
        wanted[LaunchVariable.SCHEDULER] = allocation.scheduler
    if allocation.num_nodes > 1 and len(allocation.hosts) == allocation.num_nodes:
        nodes = ",".join(allocation.hosts)
        # The kernel starts no program with a longer variable than 128 KiB: some 9,000 nodes.
        if len(nodes) < MOST_NODES_TEXT:
            wanted[LaunchVariable.NODES] = nodes
    if allocation.attempt and not env.get("MUSTER_ATTEMPT"):
        wanted["MUSTER_ATTEMPT"] = str(allocation.attempt)
    if allocation.start_time is not None:
        wanted[LaunchVariable.SCHEDULER_START_TIME] = str(allocation.start_time)
    if allocation.end_time is not None:
        wanted[LaunchVariable.SCHEDULER_END_TIME] = str(allocation.end_time)
    return wanted


def _init(env: Environment) -> list[str]:
    """The words that go before the command where this process is the first of its container.

    The kernel keeps signals from such a process that it has no handler for, so that SIGTERM would not end it, and gives
    it all orphans, which nobody would reap. tini does both: it stays the first, and starts the command. It passes
    signals on to that alone (no `-g`): the agent tells its ranks, and a trainer that is to write a checkpoint at
    SIGTERM must not lose its data workers to it.

    Source: https://github.com/krallin/tini#why-tini
    """
    is_first = os.getpid() == 1 and shutil.which(INIT, path=env.get("PATH"))
    return [INIT, "--"] if is_first else []


def execute(launch: Launch, env: Environment) -> NoReturn:
    """Becomes the new process.

    Raises:
        MusterError: the program can't be started.
    """
    if launch.home:
        homes.make(launch.home)
    if launch.hears:
        interruption.hold()
    else:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, WARNINGS)
    sys.stdout.flush()
    sys.stderr.flush()
    argv = [*_init(env), *launch.argv]
    variables = launch.environment(env)
    try:
        os.execvpe(argv[0], argv, variables)
    except OSError as reason:
        if reason.errno == errno.E2BIG:
            longest = max(variables, key=lambda name: len(variables[name]), default="")
            raise MusterError(
                "the kernel starts no program with such long variables or arguments",
                seen=f"the longest variable, {longest}, has {len(variables.get(longest, ''))} characters; "
                f"the arguments have {sum(map(len, argv))}",
                fix="fewer nodes where it lists them all, as TF_CONFIG does; else a file in place of so long a value",
            ) from None
        raise MusterError(
            f"the program can't be started: {reason.strerror}",
            seen=shlex.join(launch.argv[:1]),
            fix="give the path of an executable file; a script of Python: without --no-python, or python SCRIPT",
        ) from None
