"""Rendezvous -> argv: the only file that knows torchrun's flags.

Source: https://docs.pytorch.org/docs/stable/elastic/run.html
"""

import sys
from pathlib import Path

from entrypoint.allocation import Allocation
from entrypoint.rendezvous import Rendezvous

AGENT = Path(__file__).resolve().parent / "agent.py"


def agent_argv(allocation: Allocation, rendezvous: Rendezvous, timeout_s: int, script: list[str]) -> list[str]:
    """The command that starts this node's ranks.

    Args:
        allocation: in agent mode.
        rendezvous: where the nodes meet.
        timeout_s: how long they wait for each other.
        script: torchrun's positional part: `-m MODULE ARGS`, `SCRIPT ARGS` or `--no-python PROGRAM ARGS`.
    """
    # The agent is started by its path, with -P: a file of the same name in the working directory can't replace it.
    argv = [sys.executable, "-P", str(AGENT)]
    if allocation.num_nodes == 1 and rendezvous.master_port is None:
        # Without --local-addr torchrun uses the host's full name, which need not resolve in a container.
        return [
            *argv,
            "--standalone",
            f"--nproc-per-node={allocation.nproc_per_node}",
            "--local-addr=127.0.0.1",
            *script,
        ]
    return [
        *argv,
        f"--nnodes={allocation.num_nodes}",
        f"--node-rank={allocation.node_rank}",
        f"--nproc-per-node={allocation.nproc_per_node}",
        "--rdzv-backend=static",
        f"--master-addr={rendezvous.master_addr}",
        f"--master-port={rendezvous.master_port}",
        f"--rdzv-id={rendezvous.rdzv_id}",
        f"--rdzv-conf=timeout={timeout_s}",
        "--max-restarts=0",
        *script,
    ]
