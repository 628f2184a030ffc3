"""blaunch, the remote start of LSF: which of its tasks this process is.

    LSF_PM_TASKID=2      counted from 1

Without hosts blaunch starts a task for each slot, with `-z` one for each host that is named. Which of the two it was is
not told, so that only where each host has one slot the task is known.

Source: https://www.ibm.com/docs/en/spectrum-lsf/10.1.0?topic=reference-blaunch
Source: https://github.com/openpmix/prrte/tree/master/src/mca/ess/lsf (the count from 1)
"""

from entrypoint import variables
from entrypoint.allocation import Hosts, Rejected, Task
from entrypoint.environment import Environment
from train.errors import MusterError

FIX = "submit with one slot a host: `bsub -n NODES -R 'span[ptile=1]'`, in the job script: `blaunch train ddp`"


def detect(env: Environment, job: Hosts | None) -> Task | Rejected | None:
    """The task of blaunch that this process is, or None where blaunch started nothing.

    Raises:
        MusterError: the job's hosts are not known, or have several slots, or don't fit.
    """
    if "LSF_PM_TASKID" not in env or job is None:
        return None
    task = variables.number(env, "LSF_PM_TASKID", FIX)
    if job.problem:
        raise job.problem
    seen = f"LSF_PM_TASKID={task}, {job.sources['hosts']}"
    if max(job.slots, default=1) > 1:
        raise MusterError(
            "blaunch may have started a task for each slot or one for each host: which of them this is can't be told",
            seen=seen,
            fix=f"{FIX}; or {job.launch_line(['train', 'ddp'])}",
        )
    own = variables.own_index(job.hosts, env, seen, FIX)
    if not 1 <= task <= len(job.hosts) or own not in (None, task - 1):
        raise MusterError("blaunch's task does not fit the job's list of hosts", seen=seen, fix=FIX)
    return Task(
        launcher="blaunch",
        node_rank=task - 1,
        local_rank=0,
        rank=task - 1,
        tasks_per_node=(1,) * len(job.hosts),
        hosts=job.hosts,
        sources={
            "launcher": f"LSF_PM_TASKID={task}",
            "num_nodes": job.sources["num_nodes"],
            "hosts": job.sources["hosts"],
            "node_rank": f"LSF_PM_TASKID={task}, counted from 1",
            "local_rank": "one task a host",
            "tasks_on_node": "one slot a host",
        },
    )
