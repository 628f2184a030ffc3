"""Flux: the job's id and its number of nodes. Their names are not in the environment.

    FLUX_JOB_ID=ƒnhnrsZ or fnhnrsZ     no number
    FLUX_JOB_NNODES=2
    FLUX_URI=local:///...              alone: a shell or script that owns an instance of Flux, and is no task of it

Source: https://flux-framework.readthedocs.io/projects/flux-core/en/latest/man7/flux-environment.html
"""

import re

from entrypoint import variables
from entrypoint.allocation import Hosts
from entrypoint.environment import Environment
from train.errors import MusterError

FIX = "start the command by Flux itself: `flux run -N NODES -n NODES --exclusive train ddp`"

FIX_HOSTS = "where the nodes share no folder, set MASTER_ADDR to the first one's name"


def detect(env: Environment) -> Hosts | None:
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
        launch=f"flux run -N {num_nodes or 'NODES'} -n {num_nodes or 'NODES'} --exclusive {{command}}",
        problem=MusterError("Flux does not say which nodes its job has", seen=source, fix=FIX_HOSTS if is_job else FIX),
        sources={
            "scheduler": variables.seen(env, "FLUX_JOB_ID") or variables.seen(env, "FLUX_URI"),
            "job_id": variables.seen(env, "FLUX_JOB_ID") or "none: a shell of the instance",
            "attempt": "Flux does not count restarts",
            "hosts": "Flux names no hosts",
            "num_nodes": source,
        },
    )
