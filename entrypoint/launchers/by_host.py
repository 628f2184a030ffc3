"""What the remote shells of the schedulers have in common: this host's place in the job's list is the node rank."""

from entrypoint import variables
from entrypoint.allocation import Hosts, Task
from entrypoint.environment import Environment
from train.errors import MusterError


def place(launcher: str, mark: str, env: Environment, job: Hosts, fix: str) -> Task:
    """The one task on this host.

    Args:
        launcher: its name.
        mark: the variable, with its value, that shows that it started this process.
        env: the process's environment.
        job: the job with its hosts.
        fix: what to do where this host is not among them.

    Raises:
        MusterError: the hosts are not known, or this one is not clearly one of them.
    """
    if job.problem:
        raise job.problem
    source = job.sources["hosts"]
    own = variables.own_index(job.hosts, env, source, fix)
    if own is None:
        raise MusterError(
            f"this host, {env.host}, is not in the job's list of nodes",
            seen=f"{source}: {' '.join(job.hosts[:20])}",
            fix=fix,
        )
    return Task(
        launcher=launcher,
        node_rank=own,
        local_rank=0,
        rank=own,
        tasks_per_node=(1,) * len(job.hosts),
        hosts=job.hosts,
        notes=(f"{launcher} gives no ranks: one process on each of the {len(job.hosts)} nodes is taken for granted",)
        if len(job.hosts) > 1
        else (),
        sources={
            "launcher": mark,
            "num_nodes": job.sources["num_nodes"],
            "hosts": source,
            "node_rank": f"the place of {env.host} in {source}",
            "local_rank": "one process a node",
            "tasks_on_node": "one process a node",
        },
    )
