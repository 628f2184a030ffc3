"""flux run: which task of a Flux job this process is.

    FLUX_TASK_RANK=3 FLUX_TASK_LOCAL_ID=1 FLUX_JOB_SIZE=4 FLUX_JOB_NNODES=2

Tasks lie in blocks unless the user asked for another taskmap; the local id shows which. The variables of a scheduler
around the instance, and of the launcher that started Flux itself, are still there: they are not the task's.

Source: https://flux-framework.readthedocs.io/projects/flux-core/en/latest/man7/flux-environment.html
"""

from entrypoint import variables
from entrypoint.allocation import Hosts, Rejected, Task
from entrypoint.environment import Environment
from entrypoint.schedulers.flux import FIX
from train.errors import MusterError

_NAMES = ("FLUX_TASK_RANK", "FLUX_JOB_SIZE", "FLUX_TASK_LOCAL_ID", "FLUX_JOB_NNODES")


def detect(env: Environment, job: Hosts | None) -> Task | Rejected | None:
    """The Flux task that this process is, or None outside a Flux job.

    Raises:
        MusterError: its variables are incomplete, contradict each other, or leave the node open.
    """
    if not any(name in env for name in (*_NAMES, "FLUX_JOB_ID")):
        return None
    rank, size, local_rank, num_nodes = (variables.number(env, name, FIX) for name in _NAMES)
    seen = variables.seen(env, *_NAMES)
    if not (rank < size and 1 <= num_nodes <= size):
        raise MusterError("Flux's variables contradict each other", seen=seen, fix=FIX)
    # Flux speaks PMI to its own tasks: other values are those of a launcher inside the task.
    if env.get("PMI_RANK", str(rank)) != str(rank) or env.get("PMI_SIZE", str(size)) != str(size):
        raise MusterError(
            "Flux and another launcher disagree on which process this is",
            seen=f"{seen} {variables.seen(env, 'PMI_RANK', 'PMI_SIZE')}",
            fix=f"{FIX}, without mpiexec inside the task",
        )
    if size % num_nodes:
        raise MusterError("the nodes have different numbers of tasks", seen=seen, fix=FIX)
    local_size = size // num_nodes
    if rank % local_size != local_rank:
        raise MusterError(
            "the tasks don't lie in blocks, a node after the other, so which node this is can't be told",
            seen=seen,
            fix="flux run without --taskmap",
        )
    node_rank = rank // local_size
    known = job.hosts if job and len(job.hosts) == num_nodes else ()
    _check_own(known, node_rank, env, seen)
    return Task(
        launcher="flux",
        node_rank=node_rank,
        local_rank=local_rank,
        rank=rank,
        tasks_per_node=(local_size,) * num_nodes,
        hosts=known or ((env.host,) if num_nodes == 1 and env.host and not (job and job.hosts) else ()),
        notes=(f"node rank {node_rank}: Flux gives none; tasks are taken to lie in blocks of {local_size} a node",)
        if num_nodes > 1
        else (),
        sources={
            "launcher": f"FLUX_TASK_RANK={rank}",
            "num_nodes": f"FLUX_JOB_NNODES={num_nodes}",
            "node_rank": f"FLUX_TASK_RANK={rank} in blocks of {local_size}",
            "local_rank": f"FLUX_TASK_LOCAL_ID={local_rank}",
            "rank": f"FLUX_TASK_RANK={rank}",
            "tasks_on_node": variables.seen(env, "FLUX_JOB_SIZE", "FLUX_JOB_NNODES"),
        },
    )


def _check_own(hosts: tuple[str, ...], node_rank: int, env: Environment, seen: str) -> None:
    if hosts and variables.own_index(hosts, env, seen, FIX) not in (None, node_rank):
        raise MusterError(
            "MUSTER_HOSTS and Flux's ranks put this host at different places", seen=f"{env.host}: {seen}", fix=FIX
        )
