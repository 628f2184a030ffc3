"""Allocation + Rendezvous -> Launch: the argv and the variables, and the exec that ends this program."""

import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

from entrypoint import ROOT, network, resources, torchrun
from entrypoint.allocation import Allocation
from entrypoint.environment import Environment
from entrypoint.options import LaunchOptions
from entrypoint.rendezvous import Rendezvous
from train.errors import MusterError


@dataclass(frozen=True)
class Program:
    """What runs in each rank.

    Attributes:
        kind: how torchrun and python are told: a `module`, a `script`, or another `program` (--no-python).
        words: its name or path, then its arguments.
        is_ours: a trainer of this project: nothing in the user's folders may take its place.
    """

    kind: str
    words: tuple[str, ...]
    is_ours: bool = False

    def torchrun_words(self) -> list[str]:
        """The positional part of torchrun's command line."""
        return [*{"module": ["-m"], "script": [], "program": ["--no-python"]}[self.kind], *self.words]

    def python_words(self) -> list[str]:
        """The whole command of one rank."""
        if self.kind == "program":
            return list(self.words)
        return [sys.executable, "-u", *(["-m"] if self.kind == "module" else []), *self.words]


@dataclass(frozen=True)
class Launch:
    """A process about to be replaced.

    Attributes:
        argv: the command.
        set_variables: variables that it gets, and that the user had not set.
        removed_variables: variables that it must not inherit.
        notes: one line for each thing that the user should know.
    """

    argv: tuple[str, ...]
    set_variables: Mapping[str, str]
    removed_variables: tuple[str, ...]
    notes: tuple[str, ...]

    def environment(self, env: Mapping[str, str]) -> dict[str, str]:
        """All variables of the new process."""
        kept = {name: value for name, value in env.items() if name not in self.removed_variables}
        return kept | dict(self.set_variables)


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
    variables = _variables(allocation, rendezvous, env, notes)
    if allocation.mode == "agent":
        argv = torchrun.agent_argv(allocation, rendezvous, options.rdzv_timeout, program.torchrun_words())
    else:
        argv = program.python_words()
        variables |= _rank_variables(allocation, rendezvous, env)
    if program.is_ours:
        variables |= _ours_first(env)
        variables["MUSTER_COMMAND"] = shlex.join(command)
    if options.debug:
        variables["MUSTER_DEBUG"] = "1"
    if allocation.num_nodes > 1:
        for name in ("MASTER_ADDR", "MASTER_PORT"):
            if rendezvous.sources[name.lower()] == f"{name}, yours":
                notes.append(f"{name}={env[name]} is yours: it was kept")
    # torchrun reads PET_* as the defaults of its own options: inherited ones would change the launch unseen.
    removed = tuple(sorted(name for name in env if name.startswith("PET_")))
    if removed:
        notes.append(f"removed: {', '.join(removed)}")
    return Launch(tuple(argv), variables, removed, tuple(notes))


def _variables(allocation: Allocation, rendezvous: Rendezvous, env: Environment, notes: list[str]) -> dict[str, str]:
    """Defaults for what the user did not set."""
    wanted: dict[str, str] = {}
    cores = resources.cores(env, allocation.cpus_on_node)
    if cores is not None:
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


def _rank_variables(allocation: Allocation, rendezvous: Rendezvous, env: Environment) -> dict[str, str]:
    """The five variables, and the three that torchrun sets beside them."""
    port = rendezvous.master_port
    if port is None:
        port = network.free_port() if env.is_live else 0
    return {
        "RANK": str(allocation.rank),
        "LOCAL_RANK": str(allocation.local_rank),
        "WORLD_SIZE": str(allocation.world_size),
        "LOCAL_WORLD_SIZE": str(allocation.nproc_per_node),
        "GROUP_RANK": str(allocation.node_rank),
        "MASTER_ADDR": rendezvous.master_addr,
        "MASTER_PORT": str(port),
    }


def _ours_first(env: Environment) -> dict[str, str]:
    """What keeps a `train.py` or `train/` in the user's folders from being imported in place of ours."""
    wanted = {"PYTHONSAFEPATH": "1"}
    inherited = env.get("PYTHONPATH", "")
    if inherited:
        # PYTHONPATH comes before the installed packages: ours has to come before it.
        wanted["PYTHONPATH"] = os.pathsep.join([str(ROOT), inherited])
    return wanted


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


def execute(launch: Launch, env: Environment) -> NoReturn:
    """Becomes the new process.

    Raises:
        MusterError: the program can't be started.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        os.execvpe(launch.argv[0], list(launch.argv), launch.environment(env))
    except OSError as reason:
        raise MusterError(
            f"the program can't be started: {reason.strerror}",
            seen=shlex.join(launch.argv[:1]),
            fix="give the path of an executable file, or leave --no-python out",
        ) from None
