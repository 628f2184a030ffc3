"""Processes by multiprocessing, without torchrun: for debuggers, notebooks and those who learnt it so.

The launcher execs this module. Each process gets the variables that torchrun would set, and then runs the
program in the interpreter it already is.
"""

import argparse
import os
import runpy
import sys

from torch.multiprocessing.spawn import ProcessExitedException, spawn  # pyright: ignore[reportUnknownVariableType]

from muster.errors import ExitCode


def run(local_rank: int, options: argparse.Namespace) -> None:
    """Runs the program as rank `local_rank` of this node."""
    rank = options.node_rank * options.nproc_per_node + local_rank
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(local_rank),
        WORLD_SIZE=str(options.nnodes * options.nproc_per_node),
        LOCAL_WORLD_SIZE=str(options.nproc_per_node),
        GROUP_RANK=str(options.node_rank),
        MASTER_ADDR=options.master_addr,
        MASTER_PORT=str(options.master_port),
    )
    sys.argv = [options.program, *options.arguments]
    if options.module:
        if "PYTHONSAFEPATH" not in os.environ:
            sys.path.insert(0, os.getcwd())
        runpy.run_module(options.program, run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, os.path.dirname(os.path.abspath(options.program)))
        runpy.run_path(options.program, run_name="__main__")


def main() -> int:
    """The exit code of this node's processes."""
    options = parse()
    try:
        spawn(run, args=(options,), nprocs=options.nproc_per_node)
    except ProcessExitedException as error:
        return (
            error.exit_code if error.exit_code in (ExitCode.USER_MUST_CHANGE, ExitCode.PREEMPTED) else ExitCode.FAILED
        )
    return 0


def parse() -> argparse.Namespace:
    """The options, named as torchrun's."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("nnodes", "node-rank", "nproc-per-node", "master-port"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--master-addr", required=True)
    parser.add_argument("-m", "--module", action="store_true")
    parser.add_argument("program")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
