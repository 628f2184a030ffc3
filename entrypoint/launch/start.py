"""The steps of every command that starts ranks, from its options to the exec that replaces this process.

    environment -> Allocation -> Rendezvous -> the command, with the additions of each part to the new process -> exec

`start` runs these steps. A part returns its `Additions`: variables, notes, folders. A dry run prints the result.
"""

import errno
import json
import os
import re
import shlex
import shutil
import signal
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn

from muster import interruption
from muster.entrypoint import environment, resources, show
from muster.entrypoint.detect import families, resolve
from muster.entrypoint.detect.allocation import Allocation
from muster.entrypoint.environment import Environment
from muster.entrypoint.fabric import launch as fabric
from muster.entrypoint.launch import driver, frameworks, home, job, torchrun
from muster.entrypoint.launch.program import Additions, Folder, Launch, Program, where_unset
from muster.entrypoint.options import LaunchOptions
from muster.entrypoint.rendezvous import address, network
from muster.entrypoint.sites import recognise
from muster.errors import ATTEMPT, MusterError, notify
from muster.interfaces import has_one, source_address
from muster.paths import text_of
from muster.units import plural
from muster.variables import LaunchVariable

INIT = "tini"
INTERFACES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")
WARNINGS = (signal.SIGUSR1, signal.SIGUSR2)

MAX_RANKS_PER_CORE = 4
"""Ranks that may share a core without a note: on a laptop a few ranks try what a cluster does."""

UNBOUND = {"openmpi": "mpirun --bind-to none", "jsrun": "jsrun --bind rs", "pals": "mpiexec --cpu-bind none"}
"""The options by which launchers that bind a task to one core by default do not bind it."""

MAX_NODES_TEXT = 100_000
"""The longest list of nodes that a program gets, in characters; a longer one is left out."""


@dataclass(frozen=True)
class Context:
    """The facts about a launch before its command is made.

    Attributes:
        options: the user's, with the site's where the user gave none.
        site: the site whose profile is used; None without one.
        of_site: the variables and notes from this profile.
    """

    env: Environment
    options: LaunchOptions
    allocation: Allocation
    rendezvous: address.Rendezvous
    site: recognise.Recognised | None = None
    of_site: Additions = field(default_factory=Additions)


def start(
    options: LaunchOptions,
    program: Program,
    typed: Sequence[str],
    is_single: bool = False,
    check: Callable[[], None] = lambda: None,
) -> None:
    """Replaces this process by the launch of `program`; returns only after a dry run.

    Args:
        typed: the command line, for errors and for MUSTER_COMMAND.
        is_single: whether it runs in one process, whatever is allocated.
        check: raises MusterError for what this host lacks. Several ranks of our own programs check it themselves.

    Raises:
        MusterError: it can't be started here.
    """
    env = environment_of(options)
    is_dry = options.dry_run or not env.is_live
    if is_dry:
        # The command as it is shown, without --dry-run and --env-file. A script's own options stand behind these.
        number = options.dry_run + (options.env_file is not None)
        asked = "\0--(dry[-_]run|env[-_]file[=\0][^\0]*)(?=\0|$)"
        typed = re.sub(asked, "", "\0".join(typed), count=number).split("\0")
    else:
        os.getcwd()  # where it was removed, torch would say that a library of its own can't be loaded
        # A scheduler's early warnings would end this process: they are blocked until the new process can handle them,
        # which may take a minute; a blocked signal stays blocked through an exec. SIGTERM is not blocked: no training
        # has begun, so it may end the process.
        signal.pthread_sigmask(signal.SIG_BLOCK, WARNINGS)
    context: Context | None = None
    try:
        context = find(env, options, typed, is_single=is_single)
        recognise.check(context.site)
        allocation, options = context.allocation, context.options
        if not is_dry and options.interface:
            _check_interface(options.interface)
        # Otherwise torch would try to connect for 5 minutes, and handle no signal meanwhile.
        if not is_dry and allocation.num_nodes == 1 and allocation.mode != "single" and not source_address("127.0.0.1"):
            wrong, fix = "the loopback interface is down: ranks can't meet on this host", "ip link set lo up, as root"
            raise MusterError(wrong, seen=f"{network.LOOPBACK}: there is no route to 127.0.0.1", fix=fix)
        if not program.is_ours or (not is_dry and allocation.num_nodes == allocation.tasks_on_node == 1):
            check()
        of_driver = Additions() if is_dry else driver.check(allocation, env, program)
        site = context.site.site if context.site else None
        # The fabric's library path contains the driver's.
        of_fabric = fabric.inject(allocation, env, options, program, of_driver.variables, site)
    except MusterError as refusal:
        if not is_dry and (context is None or address.needs_file(context.rendezvous, context.allocation)):
            address.refuse_all(refusal, env, options)
        elif not is_dry and context and program.framework == "torch":
            _tell_agents(refusal, context)
        raise
    if address.needs_file(context.rendezvous, allocation) and not is_dry:
        context = replace(context, rendezvous=address.by_file(context.rendezvous, allocation, env, options))
    launch = plan(context, program, typed, of_driver, of_fabric)
    if is_dry:
        print(show.script(launch))
        return
    if allocation.rank == 0:
        if port := context.rendezvous.master_port:
            network.check_port_free(port, f"{port} from {context.rendezvous.sources['master_port']}")
        shown = allocation if program.framework == "torch" else allocation.of_tasks()
        notify(show.headline(shown, context.rendezvous, launch))
    execute(launch, context.env)


def _tell_agents(refusal: MusterError, context: Context) -> None:
    """Becomes an agent that tells the others why this node can't come; returns unless a fixed set of agents waits."""
    allocation, options, rendezvous = context.allocation, context.options, context.rendezvous
    if allocation.mode != "agent" or allocation.num_nodes == 1 or torchrun.is_elastic(allocation, options):
        return
    notify(f"{refusal}\nmuster: telling the other nodes why, for {network.REFUSED_TIMEOUT_S:.0f} s at most")
    text = json.dumps({**refusal.parts, "wrong": f"{context.env.host} can't take part: {refusal.wrong}"})
    options = replace(options, rdzv_timeout=min(options.rdzv_timeout, int(network.REFUSED_TIMEOUT_S)))
    argv = torchrun.agent_argv(allocation, rendezvous, options, ["-"])
    parts = [_of_user(context), Additions({LaunchVariable.REFUSAL: text, "OMP_NUM_THREADS": "1"})]
    execute(Launch(tuple(argv), Additions.merged(parts), handles_signals=True), context.env)


def _check_interface(names: str) -> None:
    """Raises MusterError where this host has none of the interfaces `names`."""
    here = [name for _, name in socket.if_nameindex()]
    if not has_one(here, names):
        seen, fix = f"--interface={names}; there are: {' '.join(here)}", "--interface NAME, with one of them"
        raise MusterError(f"this host has no network interface {names}", seen=seen, fix=fix)


def environment_of(options: LaunchOptions) -> Environment:
    """This process's environment, or the recorded one that the options name."""
    if options.env_file is None:
        return environment.live()
    from muster.entrypoint import recording

    return recording.load(Path(options.env_file))


def find(env: Environment, options: LaunchOptions, typed: Sequence[str], *, is_single: bool = False) -> Context:
    """Detects the allocation, site and rendezvous of the process of `env`; `typed` is its command, for errors.

    Raises:
        MusterError: they can't be detected, or contradict each other.
    """
    if options.spawn is not None:
        if options.nproc_per_node not in (None, str(options.spawn)):
            seen = f"--spawn={options.spawn} --nproc-per-node={options.nproc_per_node}"
            raise MusterError("two numbers of processes were given", seen=seen, fix="leave --nproc-per-node out")
        options = replace(options, nproc_per_node=str(options.spawn))
    job_id, *given = env.get(LaunchVariable.RANK_VARIABLES, "").split() or [""]
    # A rank that submitted this job passed on the variables of its own launch, which are right only in its own job.
    with suppress(MusterError):  # it comes again below, where the user's options may decide
        if given and families.find_job(env)[0].job_id not in (None, job_id):
            env = replace(env, variables={name: env[name] for name in env if f"{name}={env[name]}" not in given})
    site = recognise.here(env, options)
    if is_single and options.nproc_per_node not in (None, "1"):
        raise MusterError(
            "this strategy trains in one process",
            seen=f"{options.nproc_name}={options.nproc_per_node}",
            fix="train ddp, or leave it out",
        )
    allocation = resolve.resolve(env, options, typed, is_single=is_single)
    asked, of_site = options, Additions()
    if site:
        from muster.entrypoint.sites import defaults

        options, of_site = defaults.of(site, allocation.num_nodes, env, asked)
    try:
        rendezvous = address.meet(allocation, env, options)
    except MusterError as refusal:
        if options == asked:
            raise
        seen, fix = f"{refusal.seen}; {of_site.notes[0]}", f"{refusal.fix}; or --site off"
        raise MusterError(refusal.wrong, seen=seen, fix=fix, code=refusal.code) from None
    if site and options.interface != asked.interface:
        # The rendezvous names the option as the source, as if the user had given it.
        rendezvous = replace(rendezvous, sources={**rendezvous.sources, "interface": f"the profile {site.name}"})
    gpus = site.site.nodes.gpus if site else None
    if missing := resources.without_gpus(env, allocation, options, typed, gpus.value if gpus else 0):
        of_site = replace(of_site, notes=(*of_site.notes, missing))
    return Context(env, options, allocation, rendezvous, site, of_site)


def plan(context: Context, program: Program, typed: Sequence[str], *more: Additions) -> Launch:
    """The command and the variables of the new process; `more` are further additions, such as the driver's.

    Raises:
        MusterError: the program can't be started in this way.
    """
    env, options, allocation, rendezvous = context.env, context.options, context.allocation, context.rendezvous
    if (port := rendezvous.master_port) is None:
        port = network.free_port() if env.is_live else 0
    program, of_job = job.find(program, allocation, env)
    argv, of_command = _command(context, program, port)
    parts = [
        Additions(notes=allocation.notes),
        _threads(allocation, env),
        Additions(resources.granted_gpus(env, allocation.job)),
        # The network interface for NCCL and gloo.
        where_unset(dict.fromkeys(INTERFACES, rendezvous.interface) if rendezvous.interface else {}, env),
        home.find(env) if env.is_live and env.engine else Additions(),
        Additions(notes=_notes_on_script(program, allocation, env)),
        of_command,
        Additions(for_ours(context, typed) if program.is_ours else {}),
        of_job,
        _of_user(context),
        *more,
        context.of_site,
    ]
    if options.debug_distributed:
        parts.append(debug_settings(env, rendezvous.rdzv_id, has_gpus=allocation.gpus_seen > 0))
    return Launch(tuple(argv), Additions.merged(parts), handles_signals=program.is_ours or torchrun.AGENT in argv)


def _command(context: Context, program: Program, port: int) -> tuple[list[str], Additions]:
    """The command that starts this node's ranks, or that of the one rank which this process becomes; its variables."""
    allocation, options = context.allocation, context.options
    if allocation.mode == "agent" and program.framework == "torch":
        if options.spawn and (program.torchrun or program.kind == "program"):
            raise MusterError(
                "--spawn starts only Python scripts and modules, and takes no options of torchrun",
                seen=shlex.join([*program.torchrun, *program.agent_words()[:2]]),
                fix="leave --spawn out",
            )
        # With torchrun's --run-path a rank runs the program in the interpreter that multiprocessing has started.
        script = [*(["--run-path"] if options.spawn else []), *program.torchrun, *program.agent_words()]
        argv = torchrun.agent_argv(allocation, context.rendezvous, options, script)
        return argv, Additions(torchrun.agent_variables(allocation, options))
    _refuse_torchruns(allocation, options, program)
    variables = frameworks.VARIABLES[program.framework](allocation, context.rendezvous, port)
    if program.framework == "torch":
        if not program.is_ours and allocation.scheduler != "slurm":
            # With it Lightning compares its number of processes with WORLD_SIZE; without, it waits for processes that
            # nobody starts. Under Slurm it uses Slurm's variables, and can put its job back into the queue.
            # Source: https://github.com/Lightning-AI/pytorch-lightning (fabric/plugins/environments/torchelastic.py)
            variables["TORCHELASTIC_RUN_ID"] = context.rendezvous.rdzv_id
        given = [f"{name}={value}" for name, value in variables.items()]
        variables[LaunchVariable.RANK_VARIABLES] = " ".join([allocation.job_id or "-", *given])
    unused = f"torchrun does not start these ranks, so its options have no effect: {shlex.join(program.torchrun)}"
    return program.own_words(), Additions(variables, (unused,) if program.torchrun else ())


def _refuse_torchruns(allocation: Allocation, options: LaunchOptions, program: Program) -> None:
    """Refuses options that need torchrun, where torchrun does not start the ranks."""
    given = {
        "--max-restarts": options.max_restarts,
        "--nnodes": options.nnodes if options.min_nodes is not None else None,
        "--numa-binding": options.numa_binding,
        options.nproc_name: options.nproc_per_node if allocation.mode == "agent" else None,
    }
    tasks = allocation.tasks_on_node
    for name, value in given.items():
        if value:
            raise MusterError(
                f"{name} is an option of torchrun, which does not start the ranks here",
                seen=f"{name}={value}, {allocation.mode}, {tasks} tasks on this node, --framework {program.framework}",
                fix=f"leave {name} out" + ("; or one task on each node" if allocation.mode == "worker" else ""),
            )


def _threads(allocation: Allocation, env: Environment) -> Additions:
    """OMP_NUM_THREADS, where the user did not set it."""
    cpus_on_node, num_ranks = allocation.job.cpus_on_node, allocation.nproc_per_node
    if (cores := resources.cores(env, allocation.job)) is None:
        return Additions()
    notes: list[str] = []
    # A launcher may bind an agent to the threads of one core, and the ranks inherit the binding.
    is_bound = cores == 1 or (allocation.mode == "agent" and cores < num_ranks)
    if is_bound and allocation.job_id is not None and env.is_live:
        has, it = ("one core", "it") if cores == 1 else (f"{cores} cores", "them")
        unbound = f", or {UNBOUND[allocation.launcher]}" if allocation.launcher in UNBOUND else ""
        notes.append(f"this process has {has}: ranks and data workers share {it}; ask for more CPUs a task{unbound}")
    num_cores = max(cores, cpus_on_node or 0)
    if num_ranks > MAX_RANKS_PER_CORE * num_cores:
        notes.append(
            f"{num_ranks} ranks on this node share {plural(num_cores, 'core')}: they slow each "
            f"other down, and each takes memory; --nproc-per-node {num_cores} starts one for each core"
        )
    threads = resources.threads_per_rank(cores, cpus_on_node, num_ranks, allocation.tasks_on_node)
    if (of_scheduler := allocation.job.default_threads) is None:
        found = where_unset({"OMP_NUM_THREADS": str(threads)}, env)
        return Additions(found.variables, (*notes, *found.notes))
    threads = min(threads, int(of_scheduler))
    if str(threads) != of_scheduler:
        notes.append(
            f"OMP_NUM_THREADS={of_scheduler} was set by {allocation.scheduler}: {threads} for each of this node's "
            f"{num_ranks} ranks is used"
        )
    return Additions({"OMP_NUM_THREADS": str(threads)}, tuple(notes))


def _of_user(context: Context) -> Additions:
    """Notes on the user's variables that are kept, and the variables that must not be inherited."""
    env, sources = context.env, context.rendezvous.sources
    notes: list[str] = []
    for source in (sources["master_addr"], sources["master_port"]):
        name, yours, _ = source.partition(", yours")
        if yours:
            notes.append(f"{name}={env[name]} is yours: it was kept")
    # torchrun reads PET_* as the defaults of its own options: inherited ones would change the launch unseen. And a job
    # that a rank submits inherits what the rank's own launch had set.
    of_launch = (*LaunchVariable, "TORCHELASTIC_RUN_ID")
    removed = tuple(sorted(name for name in env if name.startswith("PET_") or name in of_launch))
    if removed:
        notes.append(f"removed: {', '.join(removed)}")
    if env.is_live and os.getpid() == 1 and not _init(env):
        notes.append(f"this is process 1, with no {INIT} to pass SIGTERM on and reap processes: docker run --init")
    return Additions({"MUSTER_DEBUG": "1"} if context.options.debug else {}, tuple(notes), removed)


def _notes_on_script(program: Program, allocation: Allocation, env: Environment) -> tuple[str, ...]:
    """Notes on a script that was written for another launcher; none on a script that reads torchrun's variables."""
    if program.kind != "script":
        return ()
    script = Path(program.words[0])
    name, text, num_ranks = script.name, text_of(script), allocation.nproc_per_node
    is_agent = allocation.mode == "agent"
    notes: list[str] = []
    number = next((each for each in ("SLURM_PROCID", "SLURM_LOCALID") if each in text and each in env), None)
    if is_agent and num_ranks > 1 and number and not re.search(r"\bRANK\b", text):
        notes.append(
            f"{name} reads {number}, which is the same in this task's {num_ranks} ranks: let it read RANK and "
            f"LOCAL_RANK, or start a task for each rank: srun --ntasks-per-node={num_ranks} muster run {name}"
        )
    asks_mpi = re.search(r"^\s*(from|import) mpi4py\b", text, re.MULTILINE)
    if is_agent and num_ranks > 1 and asks_mpi and find_spec("mpi4py"):
        notes.append(
            f"{name} may take its rank from MPI, for which each of this node's {num_ranks} ranks runs alone: "
            f"let it read RANK and WORLD_SIZE, or start a task for each rank: mpirun -np NUMBER muster run {name}"
        )
    if num_ranks > 1 and re.search(r"\b(mp|multiprocessing)\.(spawn|start_processes)\(", text):
        one = "--nproc-per-node 1" if is_agent else "one task on each node"
        notes.append(f"{name} starts processes itself, in each of a node's {num_ranks} ranks: start it with {one}")
    for word in program.words[1:]:
        found = re.match(r"--((nproc.per|nnodes|node.rank|master.addr|master.port|rdzv|standalone)[\w-]*)", word)
        if found and not re.search(re.sub("[-_]", "[-_]", found[1]), text):
            notes.append(f"{name} gets {found[0]}, given after it; options of muster run come before the script")
    # DeepSpeed's scripts have the option too, but DeepSpeed reads the variable.
    if (found := re.search(r"--local[_-]rank\b", text)) and not re.search("LOCAL_RANK|deepspeed", text):
        notes.append(f"{name} takes {found[0]}, which no rank gets: let it read LOCAL_RANK, as under torchrun")
    # It is the same under torchrun. Source: https://github.com/huggingface/accelerate (src/accelerate/state.py)
    on_cpus = allocation.world_size > 1 and not allocation.gpus_seen and "ACCELERATE_USE_CPU" not in env
    is_told = "cpu=True" in text or any(re.match("--(use[-_])?cpu(=|$)", word) for word in program.words[1:])
    if on_cpus and not is_told and re.search(r"(\bAccelerator|TrainingArguments)\b", text):
        notes.append(f"{name} uses Accelerate; since 1.13 each rank trains alone on CPUs: set ACCELERATE_USE_CPU=true")
    return tuple(notes)


def for_ours(context: Context, typed: Sequence[str]) -> dict[str, str]:
    """The variables that describe the launch and the job to our own programs.

    The nodes have the scheduler's names, in the order of node_rank: so an error can name one that does not come.
    """
    allocation = context.allocation
    nodes = ",".join(allocation.hosts) if allocation.num_nodes > 1 else ""
    variables: dict[str, object] = {
        # A file in the user's working directory must not take the place of a library's module.
        "PYTHONSAFEPATH": "1",
        LaunchVariable.COMMAND: shlex.join(typed),
        LaunchVariable.SITE_FOUND: context.site.name if context.site else None,
        LaunchVariable.SCHEDULER: allocation.scheduler if allocation.scheduler not in ("local", "manual") else None,
        # The kernel starts no program with a longer variable than 128 KiB: some 9,000 nodes.
        LaunchVariable.NODES: nodes if 0 < len(nodes) < MAX_NODES_TEXT else None,
        ATTEMPT: allocation.attempt if allocation.attempt and not context.env.get(ATTEMPT) else None,
        LaunchVariable.SCHEDULER_START_TIME: allocation.job.start_time,
        LaunchVariable.SCHEDULER_END_TIME: allocation.job.end_time,
    }
    return {name: str(value) for name, value in variables.items() if value is not None}


def debug_settings(env: Mapping[str, str], rdzv_id: str, *, has_gpus: bool) -> Additions:
    """The variables of `--debug-distributed`, by which torch and NCCL log what they do; those that the user set stay.

    Files are written to one folder for all nodes. Source of each variable:
        TORCH_DISTRIBUTED_DEBUG, TORCH_CPP_LOG_LEVEL: https://docs.pytorch.org/docs/stable/distributed.html
        TORCH_LOGS: https://docs.pytorch.org/docs/stable/logging.html
        TORCH_NCCL_*: https://docs.pytorch.org/docs/stable/torch_nccl_environment_variables.html
        TORCH_FR_*: https://docs.pytorch.org/tutorials/unstable/flight_recorder_tutorial.html
        NCCL_DEBUG*: https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html
    """
    folder = Path.cwd() / "runs" / f"debug-{re.sub(r'[^A-Za-z0-9._-]+', '-', rdzv_id).strip('.-')}"
    # NCCL expands % in the file's name.
    logs = f"{str(folder).replace('%', '%%')}/nccl.%h.%p.log"
    wanted = {
        # DETAIL: the ranks compare each collective before it runs: the first that differs is an error, not a hang.
        # Over gloo it crashes DistributedDataParallel's constructor (torch 2.10 and 2.15: SIGSEGV, seen by us).
        "TORCH_DISTRIBUTED_DEBUG": "DETAIL" if has_gpus else "INFO",
        "TORCH_LOGS": "distributed",
        # With INFO, and DETAIL, every call of a store is a line, and the agents call theirs every second.
        "TORCH_CPP_LOG_LEVEL": "WARNING",
        # How many collectives the flight recorder keeps of each rank; 2000 by default.
        "TORCH_FR_BUFFER_SIZE": "20000",
        "TORCH_FR_DUMP_TEMP_FILE": f"{folder}/flight_rank_",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_NCCL_DESYNC_DEBUG": "1",
        "NCCL_DEBUG": "INFO",
        "NCCL_DEBUG_SUBSYS": "INIT,NET,ENV",
        "NCCL_DEBUG_FILE": logs,
    }
    found = where_unset(wanted, env)
    where = f"--debug-distributed: NCCL's log and the flight recorder's files are written to {folder}"
    # NCCL does not make the folder.
    made = Folder(folder, "--debug-distributed writes files: start in a folder that you may write to")
    return Additions(found.variables, (where, *found.notes), folders=(made,))


def _init(env: Environment) -> list[str]:
    """The words before the command that start it under tini, if this process is the first of its container.

    To the first process the kernel delivers only signals that have a handler, so that SIGTERM would not end it; and all
    orphans become its children, which nobody would reap. tini stays the first process, handles signals and reaps. It
    passes signals on to the command alone (no `-g`): the agent passes them on to its ranks, and a trainer that writes a
    checkpoint at SIGTERM must not lose its data workers to the signal.

    Source: https://github.com/krallin/tini#why-tini
    """
    return [INIT, "--"] if os.getpid() == 1 and shutil.which(INIT, path=env.get("PATH")) else []


def execute(launch: Launch, env: Environment) -> NoReturn:
    """Replaces this process by that of `launch`.

    Raises:
        MusterError: the program can't be started.
    """
    for folder in launch.additions.folders:
        folder.make()
    if launch.handles_signals:
        interruption.hold()
    else:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, WARNINGS)
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):  # of a full disk, or a reader that is gone
            stream.flush()
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
                fix="fewer nodes, if it lists them all, as TF_CONFIG does; else put the long value into a file",
            ) from None
        raise MusterError(
            f"the program can't be started: {reason.strerror}",
            seen=shlex.join(launch.argv[:1]),
            fix="give the path of an executable file; a Python script: without --no-python, or python SCRIPT",
        ) from None
