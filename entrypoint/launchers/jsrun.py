"""jsrun, the job step manager of LSF on IBM's systems: which of its tasks this process is.

    JSM_NAMESPACE_RANK=3 JSM_NAMESPACE_SIZE=4 JSM_NAMESPACE_LOCAL_RANK=1 JSM_NAMESPACE_LOCAL_SIZE=2

The first of LSF's hosts is the launch node, where the job script runs and no task does.

Source: https://lightning.ai/docs/fabric/stable/_modules/lightning/fabric/plugins/environments/lsf.html
Source: https://www.ibm.com/docs/en/spectrum-lsf/10.1.0?topic=jsm-jsrun
"""

from dataclasses import replace

from entrypoint import variables
from entrypoint.allocation import Hosts, Rejected, Task
from entrypoint.environment import Environment
from entrypoint.launchers import by_rank

NAMES = by_rank.Names(
    "JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE", "JSM_NAMESPACE_LOCAL_RANK", "JSM_NAMESPACE_LOCAL_SIZE"
)
FIX = "start the command by jsrun itself: `jsrun --rs_per_host=1 --tasks_per_rs=1 ... train ddp`"


def detect(env: Environment, job: Hosts | None) -> Task | Rejected | None:
    """The task of jsrun that this process is, or None where jsrun started nothing.

    Raises:
        MusterError: its variables are incomplete or contradict each other.
    """
    if not any(name in env for name in NAMES):
        return None
    num_nodes = by_rank.read(NAMES, env, FIX).num_nodes
    if job and len(job.hosts) == num_nodes + 1 and variables.own_index(job.hosts, env, job.sources["hosts"], FIX) != 0:
        source = f"{job.sources['hosts']}, without the launch node {job.hosts[0]}"
        job = replace(job, hosts=job.hosts[1:], sources={**job.sources, "hosts": source})
    return by_rank.place("jsrun", NAMES, env, job, FIX)
