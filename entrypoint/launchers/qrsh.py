"""qrsh -inherit, the remote start of Grid Engine: on which of the job's nodes this process is.

    JOB_SCRIPT=QRSH SGE_JOB_SPOOL_DIR=.../active_jobs/2.1/1.node01

Only the host of the job script has the file with the job's nodes, so that the others need MUSTER_HOSTS.

Source: https://manpages.debian.org/bookworm/gridengine-client/qrsh.1.en.html
"""

from entrypoint import variables
from entrypoint.allocation import Hosts, Rejected, Task
from entrypoint.environment import Environment
from entrypoint.launchers import by_host
from entrypoint.schedulers import grid_engine
from train.errors import MusterError


def detect(env: Environment, job: Hosts | None) -> Task | Rejected | None:
    """The task of Grid Engine that this process is, or None for a job script and outside Grid Engine.

    Raises:
        MusterError: the job's nodes are not known here, or several tasks may be on this one.
    """
    if job is None or not grid_engine.is_task(env):
        return None
    mark = variables.seen(env, "SGE_JOB_SPOOL_DIR")
    if max(job.slots, default=1) > 1:
        raise MusterError(
            f"a node of this job has {max(job.slots)} slots, and qrsh gives the tasks on them no ranks",
            seen=f"{mark}, {job.sources['hosts']}",
            fix=f"start one task on each node, and say so with its hosts: {grid_engine.FIX_HOSTS}",
        )
    return by_host.place("qrsh", mark, env, job, grid_engine.FIX_HOSTS)
