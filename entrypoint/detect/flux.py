"""Flux: the job's id and its number of nodes; and which task of the job this process is.

    FLUX_JOB_ID=ƒnhnrsZ or fnhnrsZ     no number
    FLUX_JOB_NNODES=2
    FLUX_URI=local:///...              alone: a shell or script that owns an instance of Flux, and is no task of it
    FLUX_TASK_RANK=3 FLUX_TASK_LOCAL_ID=1 FLUX_JOB_SIZE=4

The names of the nodes are not in the environment. Tasks lie in blocks unless the user asked for another taskmap; the
local id shows which. The variables of a scheduler around the instance, and of the launcher that started Flux itself,
are still there: they are not the task's.

Source: https://flux-framework.readthedocs.io/projects/flux-core/en/latest/man7/flux-environment.html
"""

import re

from muster.entrypoint import variables
from muster.entrypoint.allocation import Hosts, Rejected, Task
from muster.entrypoint.environment import Environment
from muster.errors import MusterError

FIX = "start the command by Flux itself: `flux run -N NODES -n NODES --exclusive train ddp`"

FIX_HOSTS = "where the nodes share no folder, set MASTER_ADDR to the first one's name"


def job(env: Environment) -> Hosts | None:
    """The Flux job, or the instance of Flux, that `env` belongs to, or None where there is none.

    Raises:
        MusterError: its variables can't be right.
    """
    if not any(name in env for name in ("FLUX_JOB_ID", "FLUX_TASK_RANK", "FLUX_URI")):
        return None
    is_job = "FLUX_JOB_ID" in env or "FLUX_TASK_RANK" in env
    job_id = env.get("FLUX_JOB_ID")
    if is_job and not re.fullmatch(r"[ƒf][0-9A-Za-z]+", job_id or ""):
        raise MusterError("FLUX_JOB_ID is missing or no job id", seen=f"FLUX_JOB_ID={job_id}", fix=FIX)
    num_nodes = variables.number(env, "FLUX_JOB_NNODES", FIX) if is_job else None
    source = variables.seen(env, "FLUX_JOB_NNODES") or variables.seen(env, "FLUX_URI")
    return Hosts(
        scheduler="flux",
        job_id=job_id,
        attempt=0,
        hosts=(),
        num_nodes=num_nodes,
        launch=launch(num_nodes),
        problem=MusterError("Flux does not say which nodes its job has", seen=source, fix=FIX_HOSTS if is_job else FIX),
        sources={
            "scheduler": variables.seen(env, "FLUX_JOB_ID") or variables.seen(env, "FLUX_URI"),
            "job_id": variables.seen(env, "FLUX_JOB_ID") or "none: a shell of the instance",
            "attempt": "Flux does not count restarts",
            "hosts": "Flux names no hosts",
            "num_nodes": source,
        },
    )


def launch(num_nodes: int | None) -> str:
    """The line that starts `{command}` on each node of an instance of Flux; NODES where their number is not known."""
    nodes = num_nodes or "NODES"
    return f"flux run -N {nodes} -n {nodes} --exclusive {{command}}"


_NAMES = ("FLUX_TASK_RANK", "FLUX_JOB_SIZE", "FLUX_TASK_LOCAL_ID", "FLUX_JOB_NNODES")


def task(env: Environment, job: Hosts | None) -> Task | Rejected | None:
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
