"""Allocation + Rendezvous -> Launch: the argv and the variables, and the exec that ends this program."""

import os
import shlex
import shutil
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn

from muster.entrypoint import frameworks, homes, network, resources, torchrun
from muster.entrypoint.allocation import Allocation
from muster.entrypoint.environment import Environment
from muster.entrypoint.options import LaunchOptions
from muster.entrypoint.program import Program
from muster.entrypoint.rendezvous import Rendezvous
from muster.errors import MusterError

INIT = "tini"
WARNINGS = (signal.SIGUSR1, signal.SIGUSR2)
SPAWN = "muster.entrypoint.spawn"

MOST_NODES_TEXT = 100_000
"""Characters of the list of nodes that a program is told; of a longer one none."""


@dataclass(frozen=True)
class Launch:
    """A process about to be replaced.

    Attributes:
        argv: the command.
        set_variables: variables that it gets, and that the user had not set.
        removed_variables: variables that it must not inherit.
        notes: one line for each thing that the user should know.
        home: the folder to be made for HOME; None where there is one.
        hears: whether the new process hears a scheduler's warnings, and wants those that came while it started.
    """

    argv: tuple[str, ...]
    set_variables: Mapping[str, str]
    removed_variables: tuple[str, ...]
    notes: tuple[str, ...]
    home: Path | None = None
    hears: bool = False

    def environment(self, env: Mapping[str, str]) -> dict[str, str]:
        """All variables of the new process."""
        kept = {name: value for name, value in env.items() if name not in self.removed_variables}
        return kept | dict(self.set_variables)

    def with_more(self, variables: Mapping[str, str], notes: Sequence[str]) -> "Launch":
        """This launch with `variables` set too, and `notes` after its own."""
        return replace(self, set_variables={**self.set_variables, **variables}, notes=(*self.notes, *notes))


def plan(
    allocation: Allocation,
    rendezvous: Rendezvous,
    env: Environment,
    options: LaunchOptions,
    program: Program,
    command: Sequence[str],
) -> Launch:
    """The command and the variables for `program` in this place."""
    notes = list(allocation.notes)
    home = homes.plan(env)
    variables = _variables(allocation, rendezvous, env, notes) | dict(home.variables)
    notes += [*home.notes, *_init_notes(env)]
    port = rendezvous.master_port
    if port is None:
        port = network.free_port() if env.is_live else 0
    if allocation.mode == "agent" and options.spawn and program.framework == "torch":
        argv = _spawn_argv(allocation, rendezvous, port, program)
    elif allocation.mode == "agent" and program.framework == "torch":
        argv = torchrun.agent_argv(allocation, rendezvous, options, program.agent_words())
        variables |= torchrun.agent_variables(allocation, options)
    else:
        argv = program.own_words()
        variables |= frameworks.variables(program.framework, allocation, rendezvous, port)
    if program.is_ours:
        # A file in the user's working directory must not take the place of a library's module.
        variables["PYTHONSAFEPATH"] = "1"
        variables |= of_the_job(allocation, env)
        variables["MUSTER_COMMAND"] = shlex.join(command)
        if program.failure != 1:
            variables["MUSTER_FAILURE"] = str(program.failure)
    if options.debug:
        variables["MUSTER_DEBUG"] = "1"
    for source in (rendezvous.sources["master_addr"], rendezvous.sources["master_port"]):
        name, yours, _ = source.partition(", yours")
        if yours:
            notes.append(f"{name}={env[name]} is yours: it was kept")
    # torchrun reads PET_* as the defaults of its own options: inherited ones would change the launch unseen. And a job
    # that a rank submits inherits the name of that rank's agent, which the new ranks would miss (train/parent.py).
    removed = tuple(sorted(name for name in env if name.startswith("PET_") or name == "MUSTER_LAUNCH"))
    if removed:
        notes.append(f"removed: {', '.join(removed)}")
    hears = program.is_ours or torchrun.AGENT in argv
    return Launch(tuple(argv), variables, removed, tuple(notes), home.folder, hears)


def _variables(allocation: Allocation, rendezvous: Rendezvous, env: Environment, notes: list[str]) -> dict[str, str]:
    """Defaults for what the user did not set."""
    wanted: dict[str, str] = {}
    cores = resources.cores(env, allocation.cpus_on_node)
    if cores is not None:
        if cores == 1 and allocation.job_id is not None and env.is_live:
            notes.append("this process has one core: its ranks and data workers share it; ask for more CPUs a task")
        threads = resources.threads_per_rank(
            cores, allocation.cpus_on_node, allocation.nproc_per_node, allocation.tasks_on_node
        )
        wanted["OMP_NUM_THREADS"] = str(threads)
    if rendezvous.interface is not None:
        wanted["NCCL_SOCKET_IFNAME"] = wanted["GLOO_SOCKET_IFNAME"] = rendezvous.interface
    for name in sorted(set(wanted) & set(env)):
        if env[name] != wanted[name]:
            notes.append(f"{name}={env[name]} is yours: it was kept")
    return {name: value for name, value in wanted.items() if name not in env}


def _spawn_argv(allocation: Allocation, rendezvous: Rendezvous, port: int, program: Program) -> list[str]:
    """The command that starts this node's ranks by multiprocessing, in torchrun's place."""
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
        f"--master-addr={rendezvous.address}",
        f"--master-port={port}",
        *program.agent_words(),
    ]


def of_the_job(allocation: Allocation, env: Mapping[str, str]) -> dict[str, str]:
    """What our programs want to know of the job: its nodes, scheduler, attempt, and its limit in unix seconds.

    The nodes are by node_rank, as the scheduler calls them: so one that does not come has a name.

    Source: https://slurm.schedmd.com/sbatch.html (SLURM_JOB_START_TIME, SLURM_JOB_END_TIME: 23.02 and newer)
    """
    wanted: dict[str, str] = {}
    if allocation.scheduler not in ("local", "manual"):
        wanted["MUSTER_SCHEDULER"] = allocation.scheduler
    if allocation.num_nodes > 1 and len(allocation.hosts) == allocation.num_nodes:
        nodes = ",".join(allocation.hosts)
        # The kernel starts no program with a longer variable than 128 KiB: some 9,000 nodes.
        if len(nodes) < MOST_NODES_TEXT:
            wanted["MUSTER_NODES"] = nodes
    if allocation.attempt:
        wanted["MUSTER_ATTEMPT"] = str(allocation.attempt)
    for which in ("START", "END"):
        if env.get(f"SLURM_JOB_{which}_TIME"):
            wanted[f"MUSTER_SCHEDULER_{which}_TIME"] = env[f"SLURM_JOB_{which}_TIME"]
    return {name: value for name, value in wanted.items() if not env.get(name)}


def check(allocation: Allocation, rendezvous: Rendezvous) -> None:
    """Returns if this place is ready for the start.

    Raises:
        MusterError: the rendezvous port is taken on the node that has to listen on it.
    """
    listens = allocation.node_rank == 0 and (allocation.mode == "agent" or allocation.rank == 0)
    if listens and rendezvous.master_port is not None:
        network.check_port_free(
            rendezvous.master_port, f"{rendezvous.master_port} from {rendezvous.sources['master_port']}"
        )


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


def _init_notes(env: Environment) -> list[str]:
    if not env.is_live or os.getpid() != 1 or _init(env):
        return []
    return [f"this is process 1, and there is no {INIT} to pass SIGTERM on and to reap: docker run --init"]


def hold_warnings() -> None:
    """Keeps a scheduler's early warnings until the process that this one becomes is ready to hear them.

    Without it they would end it: the time from here to a training's first step may be a minute. What is held stays held
    through an exec. SIGTERM is not: before anything is learnt it may as well end the process.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, WARNINGS)


def execute(launch: Launch, env: Environment) -> NoReturn:
    """Becomes the new process.

    Raises:
        MusterError: the program can't be started.
    """
    if launch.home:
        homes.make(launch.home)
    if not launch.hears:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, WARNINGS)
    sys.stdout.flush()
    sys.stderr.flush()
    argv = [*_init(env), *launch.argv]
    try:
        os.execvpe(argv[0], argv, launch.environment(env))
    except OSError as reason:
        raise MusterError(
            f"the program can't be started: {reason.strerror}",
            seen=shlex.join(launch.argv[:1]),
            fix="give the path of an executable file, or leave --no-python out",
        ) from None
