"""Flux: the job's number of nodes, and this process's task.

    FLUX_JOB_ID=ƒnhnrsZ or fnhnrsZ     not a number
    FLUX_JOB_NNODES=2
    FLUX_URI=local:///...              alone: a shell or script that owns an instance of Flux, and is no task of it
    FLUX_TASK_RANK=3 FLUX_TASK_LOCAL_ID=1 FLUX_JOB_SIZE=4

The names of the nodes are not in the environment. Ranks lie in blocks, a node after the other, unless the user asked
for another taskmap; the local id shows which. The variables of a scheduler around the instance, and of the launcher
that started Flux itself, are still set, but do not describe the task.

Source: https://flux-framework.readthedocs.io/projects/flux-core/en/latest/man7/flux-environment.html
"""

import re

from muster.entrypoint.detect.allocation import Job, Task
from muster.entrypoint.detect.hostlist import whole_number
from muster.entrypoint.detect.mpi import Names, Ranks, by_rank
from muster.entrypoint.detect.reader import Reader
from muster.entrypoint.environment import Environment
from muster.errors import MusterError

TASK_NAMES = Names("FLUX_TASK_RANK", "FLUX_JOB_SIZE", "FLUX_TASK_LOCAL_ID", "FLUX_JOB_NNODES")
VARIABLES = (*TASK_NAMES, "FLUX_JOB_ID", "FLUX_JOB_TMPDIR", "FLUX_URI")

PREFIXES = ("FLUX_",)
# /system.slice/flux.service                                   and imp-shell-0-f123.service
# Source: https://flux-framework.readthedocs.io/projects/flux-core/en/latest/guide/admin.html
CGROUP = re.compile(r"/flux\.service\b|/imp-shell-[^/\s]+")
# The broker's process is named flux-broker-0, by its rank.
PARENT = re.compile(r"^flux-(shell|broker)(-\d+)?$")

FIX_HOSTS = "where the nodes share no folder, set MASTER_ADDR to the first one's name"


def job(env: Environment) -> Job | None:
    """The Flux job, or the instance of Flux, that `env` belongs to, or None where there is none."""
    if not {"FLUX_JOB_ID", "FLUX_TASK_RANK", "FLUX_URI"} & env.keys():
        return None
    read = Reader(env, _fix(env))
    is_job = "FLUX_JOB_ID" in env or "FLUX_TASK_RANK" in env
    job_id = env.get("FLUX_JOB_ID")
    if is_job and not re.fullmatch(r"[ƒf][0-9A-Za-z]+", job_id or ""):
        raise MusterError("FLUX_JOB_ID is missing or no job id", seen=f"FLUX_JOB_ID={job_id}", fix=read.fix)
    num_nodes = read.number("FLUX_JOB_NNODES") if is_job else None
    source = read.seen("FLUX_JOB_NNODES") or read.seen("FLUX_URI")
    fix = FIX_HOSTS if is_job else read.fix
    return Job(
        scheduler="flux",
        job_id=job_id,
        num_nodes=num_nodes,
        launch=launch(num_nodes),
        gpu_request="flux batch or flux run with --gpus-per-node={gpus}, or -g 1 for a task",
        problem=MusterError("Flux does not say which nodes its job has", seen=source, fix=fix),
        sources={
            "scheduler": read.seen("FLUX_JOB_ID") or read.seen("FLUX_URI"),
            "job_id": read.seen("FLUX_JOB_ID") or "none: a shell of the instance",
            "attempt": "Flux does not count restarts",
            "hosts": "Flux names no hosts",
            "num_nodes": source,
        },
    )


def launch(num_nodes: int | None) -> str:
    """The line that starts `{command}` on each node of an instance of Flux; NODES where their number is unknown."""
    return "flux run -N {0} -n {0} --exclusive {{command}}".format(num_nodes or "NODES")


def _fix(env: Environment) -> str:
    return f"start the command by Flux itself: `{launch(whole_number(env.get('FLUX_JOB_NNODES', '')))}`"


def task(env: Environment, job: Job) -> Task | None:
    """This process's task of Flux, or None outside a Flux job.

    Raises:
        MusterError: its variables are incomplete, contradict each other, or do not determine the node.
    """
    if not {*TASK_NAMES, "FLUX_JOB_ID"} & env.keys():
        return None
    read = Reader(env, _fix(env))
    rank, size, local_rank, num_nodes = (read.number(name) for name in TASK_NAMES)
    read.agree(rank < size and 1 <= num_nodes <= size, "Flux's variables contradict each other", *TASK_NAMES)
    # Flux sets PMI's variables for its own tasks: other values are those of a launcher inside the task.
    is_own = env.get("PMI_RANK", str(rank)) == str(rank) and env.get("PMI_SIZE", str(size)) == str(size)
    wrong = "Flux and another launcher disagree on which process this is"
    fix = f"{read.fix}, without mpiexec inside the task"
    Reader(env, fix).agree(is_own, wrong, *TASK_NAMES, "PMI_RANK", "PMI_SIZE")
    read.agree(size % num_nodes == 0, "the nodes have different numbers of tasks", *TASK_NAMES)
    ranks = Ranks(rank, size, local_rank, size // num_nodes)
    read.agree(local_rank < ranks.local_size, "Flux's variables contradict each other", *TASK_NAMES)
    return by_rank("flux", TASK_NAMES, read, job, counted=ranks)


TASKS = {"flux": task}
