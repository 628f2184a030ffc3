"""Which node a process is on, where its launcher gives no node rank.

The remote shells of the schedulers give nothing: this host's place in the job's list is the node rank.

The MPI launchers give a rank, a size, and the same two for this node. The node rank is this host's place in the
scheduler's list where there is one. Where there is none, ranks are taken to lie in blocks, the launchers' default, and
that is checked: a rank and a local rank that don't fit it are refused.
"""

from typing import NamedTuple

from muster.entrypoint import variables
from muster.entrypoint.allocation import Hosts, Task
from muster.entrypoint.environment import Environment
from muster.errors import MusterError


def by_host(launcher: str, mark: str, env: Environment, job: Hosts, fix: str) -> Task:
    """The one task on this host, of the launcher that the variable `mark` shows.

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


class Names(NamedTuple):
    """The four variables of a launcher."""

    rank: str
    size: str
    local_rank: str
    local_size: str


class Ranks(NamedTuple):
    """Their values."""

    rank: int
    size: int
    local_rank: int
    local_size: int

    @property
    def num_nodes(self) -> int:
        """How many nodes there are, if all have as many processes as this one."""
        return self.size // self.local_size


def read(names: Names, env: Environment, fix: str) -> Ranks:
    """The values of a launcher's four variables.

    Raises:
        MusterError: one is missing or no number, or they can't be those of one process.
    """
    found = Ranks(*(variables.number(env, name, fix) for name in names))
    seen = variables.seen(env, *names)
    if not (found.rank < found.size and found.local_rank < found.local_size <= found.size):
        raise MusterError("the launcher's ranks and sizes contradict each other", seen=seen, fix=fix)
    return found


def by_rank(
    launcher: str, names: Names, env: Environment, job: Hosts | None, fix: str, job_id: str | None = None
) -> Task:
    """The task that a launcher's four variables describe.

    Raises:
        MusterError: they contradict each other, or the scheduler's hosts, or leave the node rank open.
    """
    ranks = read(names, env, fix)
    seen = variables.seen(env, *names)
    uneven = _on_uneven_nodes(ranks, env, job, fix)
    if job and uneven is not None:
        tasks_per_node = job.slots
        hosts, node_rank, notes = job.hosts, uneven, list[str]()
        counts = f"the processes for each host in {job.sources['hosts']}"
        source = {"hosts": job.sources["hosts"], "node_rank": f"the place of {env.host} in {job.sources['hosts']}"}
        source |= {"num_nodes": job.sources["num_nodes"], "tasks_on_node": counts}
    elif ranks.size % ranks.local_size:
        raise MusterError(
            "the nodes have different numbers of processes, and nothing tells how many each of the others has",
            seen=seen,
            fix="start the same number of processes on each node, or one on each: then torchrun starts the others",
        )
    else:
        tasks_per_node = (ranks.local_size,) * ranks.num_nodes
        hosts, node_rank, source, notes = _on_even_nodes(ranks, env, job, seen, launcher, fix)
    return Task(
        launcher=launcher,
        node_rank=node_rank,
        local_rank=ranks.local_rank,
        rank=ranks.rank,
        tasks_per_node=tasks_per_node,
        hosts=hosts,
        job_id=job_id,
        notes=tuple(notes),
        sources={
            "launcher": variables.seen(env, names.rank),
            "num_nodes": variables.seen(env, names.size, names.local_size),
            "local_rank": variables.seen(env, names.local_rank),
            "rank": variables.seen(env, names.rank),
            "tasks_on_node": variables.seen(env, names.local_size),
            **source,
        },
    )


def _on_uneven_nodes(ranks: Ranks, env: Environment, job: Hosts | None, fix: str) -> int | None:
    """The node rank where the scheduler planned different numbers of processes for the nodes, and these are they.

    As by PBS's `select=1:mpiprocs=2+1:mpiprocs=1`, whose file of nodes names the first host twice.
    """
    if job is None or not job.is_shared or len(set(job.slots)) < 2:
        return None
    # jsrun's launch node is among LSF's slots, and not among the hosts.
    if len(job.slots) != len(job.hosts) or sum(job.slots) != ranks.size:
        return None
    own = variables.own_index(job.hosts, env, job.sources["hosts"], fix)
    is_fitting = own is not None and (
        (job.slots[own], sum(job.slots[:own])) == (ranks.local_size, ranks.rank - ranks.local_rank)
    )
    return own if is_fitting else None


def _on_even_nodes(
    ranks: Ranks, env: Environment, job: Hosts | None, seen: str, launcher: str, fix: str
) -> tuple[tuple[str, ...], int, dict[str, str], list[str]]:
    """As `_node`, where each node is taken to run as many processes as this one."""
    hosts, node_rank, source, notes = _node(ranks, env, job, seen, fix)
    _check_order(ranks, node_rank, bool(hosts) and ranks.num_nodes > 1, seen, launcher)
    if ranks.num_nodes > 1 and ranks.local_size > 1:
        notes.append(f"each node is taken to run {ranks.local_size} processes, as this one does")
    return hosts, node_rank, source, notes


def _node(
    ranks: Ranks, env: Environment, job: Hosts | None, seen: str, fix: str
) -> tuple[tuple[str, ...], int, dict[str, str], list[str]]:
    """The launch's hosts as far as known, the node rank, where both come from, and what was taken for granted."""
    num_nodes = ranks.num_nodes
    # Where only some of the nodes see the list, all have to do without it, or they would number themselves in two ways.
    listed = job.hosts if job and (job.is_shared or num_nodes == 1) else ()
    source = job.sources["hosts"] if job else "no host list"
    own = variables.own_index(listed, env, source, fix)
    if listed and num_nodes > len(listed):
        # Hydra counts each process of hosts that come in turns (a b a b) as if it were alone on its node.
        line = job.launch_line(["train", "ddp"]) if job else "mpiexec -ppn 1"
        raise MusterError(
            f"the launcher says that {ranks.local_size} of {ranks.size} processes run on each node, which makes "
            f"{num_nodes} nodes, but the job has {len(listed)}",
            seen=f"{seen}, {source}",
            fix=f"one process on each node: {line}; or as many on each, a node after the other, from a shell or script "
            "of one job only",
        )
    if num_nodes == 1:
        host = listed[own] if own is not None else None if listed else env.host
        return (host,) if host else (), 0, {"hosts": "this host", "node_rank": "one node"}, []
    if len(listed) == num_nodes and own is not None:
        return listed, own, {"hosts": source, "node_rank": f"the place of {env.host} in {source}"}, []
    if not listed:
        why = "the launcher names no hosts"
    elif own is None:
        why = f"this host, {env.host}, is not among the job's by that name"
    else:
        why = f"the launch uses {num_nodes} of the job's {len(listed)} nodes, and which is not told"
    node_rank = ranks.rank // ranks.local_size
    note = f"node rank {node_rank}: {why}; ranks are taken to lie in blocks of {ranks.local_size} a node"
    return (), node_rank, {"hosts": why, "node_rank": f"rank {ranks.rank} in blocks of {ranks.local_size}"}, [note]


def _check_order(ranks: Ranks, node_rank: int, hosts_known: bool, seen: str, launcher: str) -> None:
    if ranks.local_size == 1:
        # One process a node: its rank decides nothing, the node rank does.
        return
    block = node_rank * ranks.local_size + ranks.local_rank
    in_turns = ranks.local_rank * ranks.num_nodes + node_rank
    if ranks.rank == block or (hosts_known and ranks.rank == in_turns):
        return
    raise MusterError(
        "the ranks don't lie in blocks, a node after the other, so which node this is can't be told"
        if not hosts_known
        else "the ranks lie neither in blocks nor in turns on the nodes, so where they meet can't be told",
        seen=seen,
        fix="mpirun --map-by slot (Open MPI) or mpiexec -ppn N (MPICH, Intel MPI): the ranks of a node in one block"
        if launcher != "jsrun"
        else "jsrun --launch_distribution=packed",
    )
