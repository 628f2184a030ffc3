"""Rendezvous -> argv: the only file that knows torchrun's flags.

Source: https://docs.pytorch.org/docs/stable/elastic/run.html
"""

import sys

from muster.entrypoint.detect.allocation import Allocation
from muster.entrypoint.options import LaunchOptions
from muster.entrypoint.rendezvous.address import Rendezvous

AGENT = "muster.entrypoint.agent"


def agent_argv(allocation: Allocation, rendezvous: Rendezvous, options: LaunchOptions, script: list[str]) -> list[str]:
    """The command of the agent that starts this node's ranks.

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
        # 0 for several nodes in the static form: with restarts, several nodes are elastic.
        f"--max-restarts={options.num_restarts}",
        *script,
    ]


def is_elastic(allocation: Allocation, options: LaunchOptions) -> bool:
    """Whether nodes may come, go or restart, which the static rendezvous does not allow."""
    return allocation.num_nodes > 1 and (options.num_restarts > 0 or options.min_nodes is not None)


def agent_variables(allocation: Allocation, options: LaunchOptions) -> dict[str, str]:
    """Variables that the agent needs beside its arguments."""
    # The agents' store, which workers would share, still has the keys of the workers before them: restarts failed in
    # 3 of 7 tries over several nodes, and always on one. With a store of the workers' own none did.
    restarts = options.num_restarts or is_elastic(allocation, options)
    return {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"} if restarts else {}


def _static(allocation: Allocation, rendezvous: Rendezvous, options: LaunchOptions) -> list[str]:
    return [
        f"--nnodes={allocation.num_nodes}",
        f"--node-rank={allocation.node_rank}",
        "--rdzv-backend=static",
        f"--master-addr={rendezvous.address}",
        f"--master-port={rendezvous.master_port or 0}",  # on one node 0: a free port
        f"--rdzv-conf=timeout={options.rdzv_timeout}",
    ]


def _elastic(allocation: Allocation, rendezvous: Rendezvous, options: LaunchOptions) -> list[str]:
    conf = {
        # 1 on exactly one node: a taken port then fails at once, instead of all nodes waiting for each other.
        "is_host": int(allocation.node_rank == 0),
        "join_timeout": options.rdzv_timeout,
        # Seconds after which a store that no longer answers counts as lost with its host.
        "read_timeout": 30,
        # Seconds for which the fewest nodes that are enough wait for further ones.
        "last_call_timeout": 30,
        # Intervals of 5 s without a keep-alive after which a node is dead. The nodes' clocks are compared for this.
        "keep_alive_max_attempt": 6,
    }
    return [
        f"--nnodes={options.min_nodes or allocation.num_nodes}:{allocation.num_nodes}",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint={rendezvous.address}:{rendezvous.master_port}",
        # On every node: this address identifies the node, and node 0's becomes the workers' MASTER_ADDR.
        *([f"--local-addr={rendezvous.local_addr}"] if rendezvous.local_addr else []),
        "--rdzv-conf=" + ",".join(f"{name}={value}" for name, value in conf.items()),
    ]
