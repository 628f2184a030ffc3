"""The launch options: how many, where, and what to do instead of starting. Shared by every launching command."""

from dataclasses import dataclass
from typing import Annotated

from train.options import option

LAUNCH, LOOK = "Launch (found by itself in a job)", "Look first"


@dataclass(frozen=True, kw_only=True)
class LaunchOptions:
    """What the user says about the launch; what is None is found out."""

    nnodes: Annotated[int | None, option("--nnodes", help="Number of nodes.", panel=LAUNCH, min=1)] = None
    node_rank: Annotated[
        int | None, option("--node-rank", help="Which of them this is, from 0.", panel=LAUNCH, min=0)
    ] = None
    nproc_per_node: Annotated[
        str | None,
        option("--nproc-per-node", help="Processes on each node: a number, gpu, cpu or auto.", panel=LAUNCH),
    ] = None
    master_addr: Annotated[
        str | None, option("--master-addr", help="Name or address of the node with node rank 0.", panel=LAUNCH)
    ] = None
    master_port: Annotated[
        int | None, option("--master-port", help="Free port on that node.", panel=LAUNCH, min=1, max=65535)
    ] = None
    rdzv_timeout: Annotated[
        int,
        option("--rdzv-timeout", help="Seconds that the nodes wait for each other at the start.", panel=LAUNCH, min=1),
    ] = 900
    dry_run: Annotated[
        bool, option("--dry-run", help="Print the command and the variables it would get; start nothing.", panel=LOOK)
    ] = False
    env_file: Annotated[
        str | None,
        option("--env-file", help="Read a recorded environment, not this process's; implies --dry-run.", panel=LOOK),
    ] = None
    debug: Annotated[bool, option("--debug", help="Show tracebacks.", panel=LOOK)] = False


@dataclass(frozen=True, kw_only=True)
class ProgramOptions:
    """How `muster run` starts the user's program, in torchrun's words."""

    module: Annotated[bool, option("-m", "--module", help="SCRIPT is a module, as in python -m.", panel=LAUNCH)] = False
    no_python: Annotated[
        bool, option("--no-python", help="SCRIPT is a program of its own, not run by python.", panel=LAUNCH)
    ] = False


@dataclass(frozen=True, kw_only=True)
class ShowOptions:
    """How `muster detect` answers."""

    as_json: Annotated[bool, option("--json", help="For programs.", panel=LOOK)] = False
