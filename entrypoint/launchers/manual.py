"""By hand, on hosts listed in MUSTER_HOSTS: this host's place in the list is its node rank."""

from entrypoint.allocation import Hosts, Rejected, Task
from entrypoint.environment import Environment
from entrypoint.launchers import by_host
from entrypoint.schedulers.manual import FIX


def detect(env: Environment, job: Hosts | None) -> Task | Rejected | None:
    """The one process on this host, where MUSTER_HOSTS lists the hosts and no scheduler does.

    Raises:
        MusterError: this host is not clearly one of them.
    """
    if job is None or job.scheduler != "manual":
        return None
    return by_host.place("manual", job.sources["hosts"], env, job, f"{FIX}; or --nnodes N --node-rank I")
