"""Rendezvous -> argv: the only file that knows torchrun's flags.

Source: https://docs.pytorch.org/docs/stable/elastic/run.html
"""

import sys

from muster.entrypoint.detect.allocation import Allocation
from muster.entrypoint.options import LaunchOptions
from muster.entrypoint.rendezvous.address import Rendezvous

AGENT = "muster.entrypoint.agent"


def agent_argv(allocation: Allocation, rendezvous: Rendezvous, options: LaunchOptions, script: list[str]) -> list[str]:
    """The command that starts this node's ranks, where an agent does.

    `script` is torchrun's positional part: `-m MODULE ARGS`, `SCRIPT ARGS` or `--no-python PROGRAM ARGS`.
    """
    form = _elastic if is_elastic(allocation, options) else _static
    return [
        # With -P nothing in the working directory can take the agent's place.
        *(sys.executable, "-P", "-m", AGENT),
        *([f"--numa-binding={options.numa_binding}"] if options.numa_binding else []),
        *form(allocation, rendezvous, options),
        f"--nproc-per-node={allocation.nproc_per_node}",
        f"--rdzv-id={rendezvous.rdzv_id}",
        # 0 in the static form of several nodes: those that restart are elastic.
        f"--max-restarts={options.num_restarts}",
        *script,
    ]


def is_elastic(allocation: Allocation, options: LaunchOptions) -> bool:
    """Whether nodes may come, go or restart: the static rendezvous can't do that."""
    return allocation.num_nodes > 1 and (options.num_restarts > 0 or options.min_nodes is not None)


def agent_variables(allocation: Allocation, options: LaunchOptions) -> dict[str, str]:
    """Variables that the agent needs beside its arguments."""
    # In the agents' store, which workers would share, lies what those before them said: restarts failed in 3 of 7
    # tries over several nodes, and always on one. With a store of the workers' own none did.
    restarts = options.num_restarts or is_elastic(allocation, options)
    return {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"} if restarts else {}


def _static(allocation: Allocation, rendezvous: Rendezvous, options: LaunchOptions) -> list[str]:
    return [
        f"--nnodes={allocation.num_nodes}",
        f"--node-rank={allocation.node_rank}",
        "--rdzv-backend=static",
        f"--master-addr={rendezvous.address}",
        f"--master-port={rendezvous.master_port or 0}",  # of one node: 0 takes a free one
        f"--rdzv-conf=timeout={options.rdzv_timeout}",
    ]


def _elastic(allocation: Allocation, rendezvous: Rendezvous, options: LaunchOptions) -> list[str]:
    conf = {
        # On exactly one node: a taken port then fails at once, where all would wait for each other.
        "is_host": int(allocation.node_rank == 0),
        "join_timeout": options.rdzv_timeout,
        # Seconds after which a store that no longer answers counts as lost with its host.
        "read_timeout": 30,
        # For which nodes that are enough wait for those that may still come.
        "last_call_timeout": 30,
        # Of 5 s each: then a node that sends nothing is dead. It is compared to the other nodes' clocks.
        "keep_alive_max_attempt": 6,
    }
    return [
        f"--nnodes={options.min_nodes or allocation.num_nodes}:{allocation.num_nodes}",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint={rendezvous.address}:{rendezvous.master_port}",
        # On every node: it is the node's identity, and what the workers are told of the master.
        *([f"--local-addr={rendezvous.local_addr}"] if rendezvous.local_addr else []),
        "--rdzv-conf=" + ",".join(f"{name}={value}" for name, value in conf.items()),
    ]
