"""MUSTER_HOSTS: the nodes as the user lists them, for where no scheduler does, or where its list can't be seen.

    MUSTER_HOSTS=node[01-02],gpu7         compressed as Slurm does, or plain names between commas or blanks

One process a node is what it stands for: the place of this host in the list is its node rank.
"""

import re
from dataclasses import replace

from muster.entrypoint import hostlist, variables
from muster.entrypoint.allocation import Hosts, Rejected, Task
from muster.entrypoint.detect import placing
from muster.entrypoint.environment import Environment

FIX = "MUSTER_HOSTS=node01,node02 or MUSTER_HOSTS=node[01-02], the same on all nodes"


def job(env: Environment) -> Hosts | None:
    """The nodes that MUSTER_HOSTS lists, or None without it.

    Raises:
        MusterError: it is no list of hosts.
    """
    if "MUSTER_HOSTS" not in env:
        return None
    with_commas = re.sub(r"\s+", ",", env["MUSTER_HOSTS"].strip())
    hosts = variables.hosts({"MUSTER_HOSTS": with_commas}, "MUSTER_HOSTS", FIX)
    source = variables.seen(env, "MUSTER_HOSTS")
    return Hosts(
        scheduler="manual",
        job_id=None,
        attempt=0,
        hosts=hosts,
        num_nodes=len(hosts),
        launch="on each host: {command}",
        sources={"scheduler": source, "hosts": source, "num_nodes": f"{len(hosts)} hosts in {source}"},
    )


def override(job: Hosts | None, listed: Hosts) -> Hosts:
    """`job` with the nodes that the user listed."""
    if job is None:
        return listed
    sources = {**job.sources, "hosts": listed.sources["hosts"], "num_nodes": listed.sources["num_nodes"]}
    # How many processes the scheduler planned for each host holds for the user's list too.
    planned = {hostlist.short(host): slots for host, slots in zip(job.hosts, job.slots, strict=False)}
    slots = tuple(planned.get(hostlist.short(host), 0) for host in listed.hosts)
    return replace(
        job,
        hosts=listed.hosts,
        num_nodes=listed.num_nodes,
        is_shared=True,
        slots=slots if all(slots) else (),
        problem=None,
        sources=sources,
    )


def task(env: Environment, job: Hosts | None) -> Task | Rejected | None:
    """The one process on this host, where MUSTER_HOSTS lists the hosts and no scheduler does.

    Raises:
        MusterError: this host is not clearly one of them.
    """
    if job is None or job.scheduler != "manual":
        return None
    return placing.by_host("manual", job.sources["hosts"], env, job, f"{FIX}; or --nnodes N --node-rank I")
