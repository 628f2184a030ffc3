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
from entrypoint.schedulers import lsf
from train.errors import MusterError

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
    ranks = by_rank.read(NAMES, env, FIX)
    _check_slots(ranks, env, job)
    own = variables.own_index(job.hosts, env, job.sources["hosts"], FIX) if job else None
    if job and own != 0 and (len(job.hosts) == ranks.num_nodes + 1 or lsf.has_launch_node(job.slots)):
        source = f"{job.sources['hosts']}, without the launch node {job.hosts[0]}"
        job = replace(job, hosts=job.hosts[1:], sources={**job.sources, "hosts": source})
    return by_rank.place("jsrun", NAMES, env, job, FIX)


def _check_slots(ranks: by_rank.Ranks, env: Environment, job: Hosts | None) -> None:
    """Returns if this host can run as many tasks as the variables say."""
    own = variables.own_index(job.hosts, env, job.sources["hosts"], FIX) if job else None
    if job is None or own is None or own >= len(job.slots):
        return
    if ranks.local_size > job.slots[own] or (own == 0 and lsf.has_launch_node(job.slots)):
        raise MusterError(
            f"jsrun's variables are here, but LSF gave the job {job.slots[own]} slots on this host: they are left over",
            seen=f"{variables.seen(env, *NAMES)}, {job.sources['hosts']}",
            fix=FIX,
        )
