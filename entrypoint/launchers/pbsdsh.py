"""pbsdsh and pbs_tmrsh, the remote starts of PBS: on which of the job's nodes this process is.

    PBS_TASKNUM=20000001       a task; the job script itself has 1. It is no rank

pbsdsh starts a task for each line of PBS_NODEFILE, pbs_tmrsh one on the host that it is given. The job's first node
lacks PBS_NODEFILE in such a task.

Source: https://github.com/openpbs/openpbs/blob/master/src/cmds/pbsdsh.c
"""

import re

from entrypoint.allocation import Hosts, Rejected, Task
from entrypoint.environment import Environment
from entrypoint.launchers import by_host
from train.errors import MusterError


def is_task(env: Environment) -> bool:
    """Whether PBS itself started this process, beside the job script."""
    return re.fullmatch(r"[0-9A-Fa-f]{8}", env.get("PBS_TASKNUM", "")) is not None


def detect(env: Environment, job: Hosts | None) -> Task | Rejected | None:
    """The task of PBS that this process is, or None for a job script and outside PBS.

    Raises:
        MusterError: the job's nodes are not known here, or several tasks may be on this one.
    """
    if job is None or not is_task(env):
        return None
    mark = f"PBS_TASKNUM={env['PBS_TASKNUM']}"
    fix = (
        "for each host of the job, the index counted from 0: "
        "pbs_tmrsh HOST env MUSTER_HOSTS=HOST0,HOST1 MUSTER_NODE_RANK=INDEX train ddp"
    )
    if max(job.slots, default=1) > 1:
        raise MusterError(
            f"pbsdsh starts {max(job.slots)} tasks on a node of this job, and gives them no ranks",
            seen=f"{mark}, {job.sources['hosts']}",
            fix=f"{job.launch_line(['train', 'ddp'])}; or {fix}",
        )
    if job.problem:
        raise MusterError(job.problem.wrong, seen=f"{mark}, {job.problem.seen}", fix=f"{job.problem.fix}; then {fix}")
    return by_host.place("pbsdsh", mark, env, job, fix)
