"""Cray PALS, the mpiexec of HPE Cray EX with PBS: which of its processes this one is.

    PALS_APID=... PALS_RANKID=3 PALS_NODEID=1 PALS_LOCAL_RANKID=1 PALS_LOCAL_SIZE=2 PALS_APINFO=/var/run/palsd/...

The hosts are in the file PALS_APINFO. Slurm (mpi/cray_shasta) and Flux (cray-pals) set PALS_ variables for their own
tasks, so that Cray MPI finds its way: then the launcher is srun or Flux.

Source: https://cpe.ext.hpe.com/docs/latest/mpt/mpich/intro_mpi.html
Source: https://github.com/SchedMD/slurm/blob/master/src/plugins/mpi/cray_shasta/mpi_cray_shasta.c
"""

from entrypoint import variables
from entrypoint.allocation import Hosts, Rejected, Task
from entrypoint.environment import Environment
from entrypoint.launchers import apinfo, pbsdsh
from train.errors import MusterError

FIX = "start the command by mpiexec itself, from a shell without another run's PALS_ variables"
FIX_HOSTS = "set MASTER_ADDR to the first node's name"
_NAMES = ("PALS_RANKID", "PALS_NODEID", "PALS_LOCAL_RANKID")


def detect(env: Environment, job: Hosts | None) -> Task | Rejected | None:
    """The process of PALS that this one is, or None where PALS started nothing.

    Raises:
        MusterError: its variables are incomplete, or contradict each other or the file of its nodes.
    """
    if not any(name in env for name in ("PALS_APID", *_NAMES)):
        return None
    owner = _owner(env)
    if owner:
        return Rejected(
            f"{variables.seen(env, 'PALS_APID', 'PALS_RANKID')} was set by {owner}, for Cray MPI", is_certain=True
        )
    if job and job.scheduler not in ("pbs", "manual"):
        return Rejected(f"{variables.seen(env, 'PALS_APID')}, but this is a job of {job.scheduler}")
    if pbsdsh.is_task(env):
        # PALS has daemons of its own, and hands the job script's environment on.
        return Rejected(f"{variables.seen(env, 'PALS_APID', 'PBS_TASKNUM')}: pbsdsh, not PALS, started this process")
    rank, node_rank, local_rank = (variables.number(env, name, FIX) for name in _NAMES)
    seen = variables.seen(env, "PALS_APID", *_NAMES, "PALS_LOCAL_SIZE", "PMI_RANK", "PMI_SIZE")
    if env.get("PMI_RANK", str(rank)) != str(rank) or not env.get("PALS_APID"):
        raise MusterError("PALS's variables contradict each other", seen=seen, fix=FIX)
    try:
        hosts, tasks_per_node, source = _from_file(env, rank, node_rank, local_rank, seen)
        notes: tuple[str, ...] = ()
    except _Hidden as hidden:
        hosts, tasks_per_node, source = _from_variables(env, job, rank, node_rank, local_rank, seen)
        notes = (f"{hidden.error.wrong}; {hidden.error.fix}",) if len(tasks_per_node) > 1 and not hosts else ()
        if len(tasks_per_node) > 1 and tasks_per_node[0] > 1:
            notes += (f"each node is taken to run {tasks_per_node[0]} processes, as this one does",)
    return Task(
        launcher="pals",
        node_rank=node_rank,
        local_rank=local_rank,
        rank=rank,
        tasks_per_node=tasks_per_node,
        hosts=hosts,
        job_id=env["PALS_APID"],
        notes=notes,
        sources={
            "launcher": f"PALS_RANKID={rank}",
            "num_nodes": source,
            "hosts": source,
            "node_rank": f"PALS_NODEID={node_rank}",
            "local_rank": f"PALS_LOCAL_RANKID={local_rank}",
            "rank": f"PALS_RANKID={rank}",
            "tasks_on_node": source,
        },
    )


class _Hidden(Exception):
    """The file is not there to be read."""

    def __init__(self, error: MusterError) -> None:
        super().__init__(error.wrong)
        self.error = error


def _owner(env: Environment) -> str | None:
    """The launcher that set PALS's variables in PALS's stead."""
    step = f"{env.get('SLURM_JOB_ID')}.{env.get('SLURM_STEP_ID')}"
    if env.get("PALS_APID") == step and env.get("PALS_RANKID") == env.get("SLURM_PROCID"):
        return "srun"
    folder = env.get("FLUX_JOB_TMPDIR")
    if folder and env.get("PALS_SPOOL_DIR") == folder and env.get("PALS_RANKID") == env.get("FLUX_TASK_RANK"):
        return "Flux"
    return None


def _from_file(
    env: Environment, rank: int, node_rank: int, local_rank: int, seen: str
) -> tuple[tuple[str, ...], tuple[int, ...], str]:
    if not env.get("PALS_APINFO"):
        raise _Hidden(MusterError("PALS_APINFO is not set", seen=seen, fix=FIX_HOSTS))
    try:
        data = variables.binary_file(env, "PALS_APINFO", FIX_HOSTS)
    except MusterError as error:
        raise _Hidden(error) from None
    source = f"PALS_APINFO={env['PALS_APINFO']}"
    try:
        found = apinfo.parse(data)
    except apinfo.ApinfoError as reason:
        raise MusterError(f"PALS's file of nodes can't be read: {reason}", seen=source, fix=FIX) from None
    if rank >= len(found.processes) or found.processes[rank] != (node_rank, local_rank):
        raise MusterError("PALS's variables and its file of nodes disagree", seen=f"{seen}, {source}", fix=FIX)
    tasks = found.tasks_per_node
    if (
        min(tasks) < 1
        or env.get("PMI_SIZE", str(len(found.processes))) != str(len(found.processes))
        or env.get("PALS_LOCAL_SIZE", str(tasks[node_rank])) != str(tasks[node_rank])
    ):
        raise MusterError("PALS's variables and its file of nodes disagree", seen=f"{seen}, {source}", fix=FIX)
    if max(tasks) > 1 and found.processes[0][0] != 0:
        raise MusterError(
            "rank 0 is not on the first node, where the ranks would meet", seen=f"{seen}, {source}", fix=FIX
        )
    return found.hosts, tasks, source


def _from_variables(
    env: Environment, job: Hosts | None, rank: int, node_rank: int, local_rank: int, seen: str
) -> tuple[tuple[str, ...], tuple[int, ...], str]:
    """The same without the file: PMI's sizes, and the scheduler's hosts if this one has its place in them."""
    local_name = "PALS_LOCAL_SIZE" if "PALS_LOCAL_SIZE" in env else "PMI_LOCAL_SIZE"
    local_size = variables.number(env, local_name, FIX)
    size = variables.number(env, "PMI_SIZE", FIX)
    if not (local_rank < local_size <= size and rank < size) or size % local_size or node_rank >= size // local_size:
        raise MusterError(
            "PALS's variables contradict each other, or the nodes have different numbers of processes",
            seen=seen,
            fix=f"make the file of its nodes visible: apptainer exec --bind {env.get('PALS_APINFO', '/var/run/palsd')}",
        )
    num_nodes = size // local_size
    if rank not in (node_rank * local_size + local_rank, local_rank * num_nodes + node_rank):
        raise MusterError("PALS's variables contradict each other", seen=seen, fix=FIX)
    source = variables.seen(env, "PMI_SIZE", local_name)
    hosts = job.hosts if job else ()
    if hosts and num_nodes > len(hosts):
        raise MusterError(
            "PALS's variables and the scheduler's hosts disagree", seen=f"{seen}, {' '.join(hosts)}", fix=FIX
        )
    if num_nodes == 1:
        own = variables.own_index(hosts, env, source, FIX)
        host = hosts[own] if own is not None else None if hosts else env.host
        return (host,) if host else (), (local_size,), source
    own = variables.own_index(hosts, env, source, FIX) if len(hosts) == num_nodes else None
    if own not in (None, node_rank):
        raise MusterError(
            f"PALS counts this node as {node_rank}, the scheduler's list as {own}",
            seen=f"{seen}, {' '.join(hosts[:20])}",
            fix=f"make the file of its nodes visible: apptainer exec --bind {env.get('PALS_APINFO', '/var/run/palsd')}",
        )
    return hosts if own is not None else (), (local_size,) * num_nodes, source
