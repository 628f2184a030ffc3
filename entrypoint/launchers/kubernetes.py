"""Pods of a training job: which of them this is. The variables are told in schedulers/kubernetes.py."""

from entrypoint.allocation import Hosts, Rejected, Task
from entrypoint.environment import Environment
from entrypoint.schedulers import kubernetes


def detect(env: Environment, job: Hosts | None) -> Task | Rejected | None:
    """The pod that this process is in, as the one task of a node, or None outside a job of several pods.

    Raises:
        MusterError: the variables contradict each other.
    """
    found = kubernetes.pods(env)
    if found is None or found.num_pods is None:
        return None
    return Task(
        launcher="kubernetes",
        node_rank=found.rank,
        local_rank=0,
        rank=found.rank,
        tasks_per_node=(1,) * found.num_pods,
        hosts=job.hosts if job and len(job.hosts) == found.num_pods else found.hosts,
        sources={
            "launcher": found.rank_source,
            "num_nodes": found.num_source,
            "hosts": found.host_source,
            "node_rank": found.rank_source,
            "local_rank": "one process a pod",
            "tasks_on_node": "one process a pod",
        },
    )
