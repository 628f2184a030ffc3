"""The variables by which the processes of torch, JAX and TensorFlow find each other, from the same Allocation.

TensorFlow and JAX run one process for each task that the launcher started, not one for each GPU: a task uses all the
GPUs that it sees.
"""

import json

from muster.entrypoint.detect.allocation import Allocation
from muster.entrypoint.rendezvous.address import FIRST_PORT, NUM_PORTS, Rendezvous
from muster.errors import MusterError


def torch(allocation: Allocation, rendezvous: Rendezvous, port: int) -> dict[str, str]:
    """The variables that torch.distributed's `env://` reads, and some that torchrun sets beside them.

    Source: https://docs.pytorch.org/docs/stable/elastic/run.html#environment-variables
    """
    return {
        "RANK": str(allocation.rank),
        "LOCAL_RANK": str(allocation.local_rank),
        "WORLD_SIZE": str(allocation.world_size),
        "LOCAL_WORLD_SIZE": str(allocation.nproc_per_node),
        "GROUP_RANK": str(allocation.node_rank),
        "MASTER_ADDR": rendezvous.address,
        "MASTER_PORT": str(port),
    }


def jax(allocation: Allocation, rendezvous: Rendezvous, port: int) -> dict[str, str]:
    """The variables that `jax.distributed.initialize` reads, and the two numbers that it takes as arguments.

    `initialize(num_processes=int(os.environ["JAX_NUM_PROCESSES"]), process_id=int(os.environ["JAX_PROCESS_ID"]))`

    Source: https://docs.jax.dev/en/latest/_autosummary/jax.distributed.initialize.html
    """
    found = {
        "JAX_COORDINATOR_ADDRESS": f"{bracketed(rendezvous.address)}:{port}",
        "JAX_NUM_PROCESSES": str(allocation.of_tasks().world_size),
        "JAX_PROCESS_ID": str(_index(allocation)),
    }
    if allocation.tasks_on_node > 1 and allocation.gpus_seen > 1:
        found["JAX_LOCAL_DEVICE_IDS"] = str(allocation.local_rank)
    return found


def tensorflow(allocation: Allocation, rendezvous: Rendezvous, port: int) -> dict[str, str]:
    """TF_CONFIG for MultiWorkerMirroredStrategy: the address of every worker, and which of them this is.

    Source: https://www.tensorflow.org/api_docs/python/tf/distribute/cluster_resolver/TFConfigClusterResolver
    """
    if not allocation.hosts and allocation.num_nodes > 1:
        raise MusterError(
            "TensorFlow needs the names of all hosts, and nothing lists them here",
            seen=f"{allocation.num_nodes} nodes started by {allocation.launcher}, no host list",
            fix=f"MUSTER_HOSTS=host1,host2,... in the order of the nodes, all {allocation.num_nodes} of them",
        )
    hosts = allocation.hosts if allocation.num_nodes > 1 else (rendezvous.address,)
    workers = [
        f"{bracketed(host)}:{FIRST_PORT + (port + place - FIRST_PORT) % NUM_PORTS if place else port}"
        for host, count in zip(hosts, allocation.of_tasks().ranks_per_node, strict=True)
        for place in range(count)
    ]
    config = {"cluster": {"worker": workers}, "task": {"type": "worker", "index": _index(allocation)}}
    return {"TF_CONFIG": json.dumps(config)}


VARIABLES = {"torch": torch, "jax": jax, "tensorflow": tensorflow}
"""By framework, the function that returns its variables for this task; MusterError if it needs hosts not known here."""


def _index(allocation: Allocation) -> int:
    # Counted node by node and not by rank: so every task can count the others, however the launcher placed the ranks.
    return sum(allocation.of_tasks().ranks_per_node[: allocation.node_rank]) + allocation.local_rank


def bracketed(host: str) -> str:
    """`host` as it is written before a port: an IPv6 address in brackets."""
    return f"[{host}]" if ":" in host else host
