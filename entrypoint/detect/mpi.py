"""The launchers of MPI: which process of Open MPI's mpirun, of Hydra's mpiexec or of mpirun_rsh this one is.

Each gives a rank, a size, and the same two for this node, as LSF's jsrun does. The node rank is this host's place in
the scheduler's list where there is one. Where there is none, ranks are taken to lie in blocks, the launchers' default,
and that is checked: a rank and a local rank that don't fit it are refused.

Open MPI. OMPI_COMM_WORLD_NODE_RANK is no node rank: it counts the processes on this node over all of mpirun's jobs.
Inside Slurm the processes carry the SLURM_ variables of the daemon that started them: not theirs.

    OMPI_COMM_WORLD_RANK=3 OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_LOCAL_RANK=1 OMPI_COMM_WORLD_LOCAL_SIZE=2

Hydra, of MPICH and of Intel MPI. PMI_RANK and PMI_SIZE alone are not Hydra's: srun --mpi=pmi2, Flux and PALS set them
too. On the other nodes Hydra's processes see the first node's environment, the scheduler's variables included.

    PMI_RANK=3 PMI_SIZE=4 MPI_LOCALRANKID=1 MPI_LOCALNRANKS=2

MVAPICH2's mpirun_rsh; under Hydra MVAPICH looks like MPICH.

    MV2_COMM_WORLD_RANK=3 MV2_COMM_WORLD_SIZE=4 MV2_COMM_WORLD_LOCAL_RANK=1 MV2_COMM_WORLD_LOCAL_SIZE=2

Source: https://docs.open-mpi.org/en/v5.0.x/tuning-apps/environment-var.html
Source: https://docs.openpmix.org/en/latest/ (PMIX_RANK and PMIX_NAMESPACE, which every process of mpirun has)
Source: https://github.com/pmodels/mpich/blob/main/doc/wiki/how_to/Using_the_Hydra_Process_Manager.md
Source: https://www.intel.com/content/www/us/en/docs/mpi-library/developer-reference-linux/current/environment-variable-reference.html
Source: https://mvapich.cse.ohio-state.edu/static/media/mvapich/mvapich2-userguide.html
"""

import re
from collections.abc import Callable
from typing import NamedTuple

from muster.entrypoint.detect import hostlist
from muster.entrypoint.detect.allocation import Job, Rejected, Task
from muster.entrypoint.detect.hostlist import whole_number
from muster.entrypoint.detect.reader import Reader
from muster.entrypoint.environment import Environment
from muster.errors import MusterError
from muster.units import processes


class Names(NamedTuple):
    """The four variables of a launcher."""

    rank: str
    size: str
    local_rank: str
    local_size: str


JSRUN = Names("JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE", "JSM_NAMESPACE_LOCAL_RANK", "JSM_NAMESPACE_LOCAL_SIZE")
"""LSF's: jsrun sets Open MPI's names beside its own."""


OPENMPI = Names(
    "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"
)
HYDRA = Names("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
MVAPICH = Names("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE")
VARIABLES = (
    *OPENMPI, *HYDRA, *MVAPICH, "MPIR_CVAR_CH3_INTERFACE_HOSTNAME", "OMPI_COMM_WORLD_NODE_RANK",
    "OMPI_MCA_orte_ess_num_procs", "OMPI_MCA_orte_num_nodes", "PMIX_DSTORE_21_BASE_PATH", "PMIX_HOSTNAME",
    "PMIX_NAMESPACE", "PMIX_RANK",
)  # fmt: skip

PREFIXES = ("PMI_", "PMIX_", "OMPI_", "PRTE_", "MPI_", "MPIR_", "MPIEXEC_", "HYDRA_", "HYDI_", "I_MPI_", "MV2_")
PARENTS = {
    "hydra_pmi_proxy": "mpiexec",
    "mpiexec": "mpiexec",
    "orted": "mpirun",
    "orterun": "mpirun",
    "prted": "mpirun",
    "prterun": "mpirun",
    "mpirun": "mpirun",
}

FIX_OPENMPI = "start the command by mpirun itself, from a shell without another run's OMPI_ and PMIX_ variables"


def openmpi_task(env: Environment, job: Job | None) -> Task | Rejected | None:
    """The process of mpirun that this one is, or None where mpirun started nothing.

    Raises:
        MusterError: its variables are incomplete or contradict each other.
    """
    if not set(OPENMPI) & env.keys():
        return None
    read = Reader(env, FIX_OPENMPI)
    # jsrun sets Open MPI's names too, for IBM's Spectrum MPI, with the same values as its own.
    pairs = zip(JSRUN, OPENMPI, strict=True)
    if JSRUN.rank in env and all(env.get(jsm) == env[name] for jsm, name in pairs if name in env):
        if job is None or job.scheduler == "lsf":
            return None
        return Rejected(f"{read.seen(JSRUN.rank)} says the same: jsrun set them, in a job of LSF")
    host = env.get("PMIX_HOSTNAME")
    if host and env.host and hostlist.short(host) != hostlist.short(env.host):
        return Rejected(f"PMIX_HOSTNAME={host}, but this host is {env.host}")
    _check_repeated(read)
    _check_daemon(read)
    return by_rank("openmpi", OPENMPI, read, job, env.get("PMIX_NAMESPACE"))


def _check_daemon(read: Reader) -> None:
    """Returns if nothing shows that another task of Slurm than this one started the daemon."""
    env = read.env
    # Where srun started the daemon, the daemon is Slurm's task, and its PID is in the names of its folders:
    # OMPI_FILE_LOCATION=/tmp/ompi.node01.0/jf.1134/0/1 (pid.33 in place of jf.1134 is mpirun itself, no daemon)
    # PMIX_DSTORE_21_BASE_PATH=/tmp/ompi.node01.0/jf.1134/pmix_dstor_ds21_582
    match = re.search(r"/jf\.[0-9]+/pmix_dstor_ds21_([0-9]+)$", env.get("PMIX_DSTORE_21_BASE_PATH", ""))
    if match and "SLURM_STEP_ID" in env and env.get("SLURM_TASK_PID", match[1]) != match[1]:
        raise MusterError(
            "the variables of Open MPI are left over from another job: this task of Slurm did not start its daemon",
            seen=read.seen("PMIX_DSTORE_21_BASE_PATH", "SLURM_TASK_PID"),
            fix="submit from a shell outside of mpirun, or unset the OMPI_ and PMIX_ variables",
        )


def _check_repeated(read: Reader) -> None:
    """Returns if the values that mpirun repeats elsewhere are the same there."""
    env, ranks = read.env, read_ranks(OPENMPI, read)
    if "PMIX_RANK" not in env or "PMIX_NAMESPACE" not in env:
        raise MusterError(
            "Open MPI's variables are here without PMIX_RANK and PMIX_NAMESPACE, by which its processes find it",
            seen=read.seen(*OPENMPI),
            fix=f"unset {' '.join(OPENMPI)} if they are left over from another job; else {FIX_OPENMPI}",
        )
    repeated: dict[str, Callable[[int], bool]] = {
        "PMIX_RANK": lambda number: number == ranks.rank,
        "OMPI_COMM_WORLD_NODE_RANK": lambda number: number >= ranks.local_rank,
        "OMPI_MCA_orte_ess_num_procs": lambda number: number == ranks.size,
        "OMPI_MCA_orte_num_nodes": lambda number: number >= ranks.num_nodes,
    }
    wrong: list[str] = []
    for name, fits in repeated.items():
        number = whole_number(env.get(name, ""))
        # Other versions leave some of them out. One that is too large to be read fits nothing.
        if env.get(name, "").isdecimal() and (number is None or not fits(number)):
            wrong.append(name)
    read.agree(
        not wrong,
        "Open MPI's variables contradict each other, or the nodes have different numbers of processes",
        *OPENMPI,
        *wrong,
    )


FIX_HYDRA = "start the command by mpiexec itself, from a shell without another run's PMI_ and MPI_ variables"

# Launchers that set PMI_RANK and PMI_SIZE for their own tasks: their variables of the same meaning.
_OWNERS = (
    ("srun", "SLURM_STEP_ID", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
    ("flux", "FLUX_TASK_RANK", "FLUX_TASK_RANK", "FLUX_JOB_SIZE"),
)


def hydra_task(env: Environment, job: Job | None) -> Task | Rejected | None:
    """The process of mpiexec that this one is, or None where mpiexec started nothing.

    Raises:
        MusterError: its variables are incomplete or contradict each other.
    """
    present = [name for name in HYDRA if name in env]
    if not present:
        return None
    read = Reader(env, FIX_HYDRA)
    of_pmi = [name for name in (HYDRA.rank, HYDRA.size) if name in env]
    for owner, mark, rank, size in _OWNERS:
        if mark in env and all(env[name] == env.get(other) for name, other in zip(of_pmi, (rank, size), strict=False)):
            if owner == "flux":
                return Rejected(f"{read.seen(*of_pmi)} is Flux's own", is_certain=True)
            if len(present) == len(of_pmi):
                return None
    if not of_pmi and "FLUX_URI" in env:
        # The rest of what Hydra gave a broker of Flux, which takes these two for itself and away from its shells.
        reason = f"{read.seen(*present)} without PMI_RANK: Hydra started Flux, which started this process"
        return Rejected(reason, is_certain=True)
    if "PALS_APID" in env and env.get("PALS_RANKID") == env.get("PMI_RANK"):
        return None
    if len(present) == len(of_pmi):
        raise MusterError(
            "PMI_RANK or PMI_SIZE is here without its companions: no launcher set it for this process",
            seen=read.seen(*present),
            fix=f"unset {' '.join(present)} if it is left over from another job; else {FIX_HYDRA}",
        )
    host = env.get("MPIR_CVAR_CH3_INTERFACE_HOSTNAME")
    if host and env.host and hostlist.is_name(host) and hostlist.short(host) != hostlist.short(env.host):
        return Rejected(f"MPIR_CVAR_CH3_INTERFACE_HOSTNAME={host}, but this host is {env.host}")
    return by_rank("hydra", HYDRA, read, job)


FIX_MVAPICH = "start the command by mpirun_rsh itself, from a shell without another run's MV2_ variables"


def mvapich_task(env: Environment, job: Job | None) -> Task | Rejected | None:
    """The process of mpirun_rsh that this one is, or None where it started nothing.

    Raises:
        MusterError: its variables are incomplete or contradict each other.
    """
    # The local size alone is set by users too, as a hint to the library.
    if not {MVAPICH.rank, MVAPICH.size, MVAPICH.local_rank} & env.keys():
        return None
    return by_rank("mvapich", MVAPICH, Reader(env, FIX_MVAPICH), job)


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


def read_ranks(names: Names, read: Reader) -> Ranks:
    """The values of a launcher's four variables.

    Raises:
        MusterError: one is missing or no number, or they can't be those of one process.
    """
    found = Ranks(*(read.number(name) for name in names))
    fits = found.rank < found.size and found.local_rank < found.local_size <= found.size
    read.agree(fits, "the launcher's ranks and sizes contradict each other", *names)
    return found


def by_rank(
    launcher: str,
    names: Names,
    read: Reader,
    job: Job | None,
    job_id: str | None = None,
    *,
    counted: Ranks | None = None,
    told: int | None = None,
) -> Task:
    """The task that a launcher's four variables describe.

    Args:
        launcher: its name, as users say it.
        names: its variables.
        read: the process's.
        job: the scheduler's answer, whose list of hosts tells the node rank.
        job_id: the launch's own id, if it has one.
        counted: what the variables say, of a launcher whose last one counts nodes: all nodes have as many processes.
        told: the node rank, of a launcher that tells it.

    Raises:
        MusterError: they contradict each other, or the scheduler's hosts, or leave the node rank open.
    """
    ranks = counted or read_ranks(names, read)
    seen = read.seen(*names)
    uneven = _on_uneven_nodes(ranks, read, job)
    notes: list[str] = []
    if job and uneven is not None:
        tasks_per_node = job.slots
        hosts, node_rank = job.hosts, uneven
        counts = f"the processes for each host in {job.sources['hosts']}"
        source = {"hosts": job.sources["hosts"], "node_rank": f"the place of {read.env.host} in {job.sources['hosts']}"}
        source |= {"num_nodes": job.sources["num_nodes"], "tasks_on_node": counts}
    elif ranks.size % ranks.local_size:
        raise MusterError(
            "the nodes have different numbers of processes, and nothing tells how many each of the others has",
            seen=seen,
            fix="start the same number of processes on each node, or one on each: then torchrun starts the others; or "
            f"{read.fix}",
        )
    else:
        tasks_per_node = (ranks.local_size,) * ranks.num_nodes
        hosts, node_rank, source, why = _node(ranks, read, job, seen)
        if why and told is not None:
            node_rank, source["node_rank"] = told, "the launcher's own"
        elif why:
            blocks = f"ranks are taken to lie in blocks of {ranks.local_size} a node"
            notes.append(f"node rank {node_rank}: {why}; {blocks}")
        is_known = told is not None or (bool(hosts) and ranks.num_nodes > 1)
        _check_order(ranks, node_rank, is_known, seen, launcher)
        if ranks.num_nodes > 1 and ranks.local_size > 1 and counted is None:
            notes.append(f"each node is taken to run {processes(ranks.local_size)}, as this one does")
    fits = told is None or told == node_rank < len(tasks_per_node)
    read.agree(fits, f"{launcher} says node rank {told}, which does not fit its hosts, or its ranks and sizes", *names)
    return Task(
        launcher=launcher,
        node_rank=node_rank,
        local_rank=ranks.local_rank,
        rank=ranks.rank,
        tasks_per_node=tasks_per_node,
        hosts=hosts,
        job_id=job_id,
        is_counted=True,
        notes=tuple(notes),
        sources={
            "launcher": read.seen(names.rank),
            "num_nodes": read.seen(names.size, names.local_size),
            "local_rank": read.seen(names.local_rank),
            "rank": read.seen(names.rank),
            "tasks_on_node": read.seen(names.size, names.local_size) if counted else read.seen(names.local_size),
            **source,
        },
    )


def _on_uneven_nodes(ranks: Ranks, read: Reader, job: Job | None) -> int | None:
    """The node rank where the scheduler planned different numbers of processes for the nodes, and these are they.

    As by PBS's `select=1:mpiprocs=2+1:mpiprocs=1`, whose file of nodes names the first host twice.
    """
    if job is None or not job.is_shared or len(set(job.slots)) < 2:
        return None
    # jsrun's launch node is among LSF's slots, and not among the hosts.
    if len(job.slots) != len(job.hosts) or sum(job.slots) != ranks.size:
        return None
    own = read.own_index(job.hosts, job.sources["hosts"])
    is_fitting = own is not None and (
        (job.slots[own], sum(job.slots[:own])) == (ranks.local_size, ranks.rank - ranks.local_rank)
    )
    return own if is_fitting else None


def _node(ranks: Ranks, read: Reader, job: Job | None, seen: str) -> tuple[tuple[str, ...], int, dict[str, str], str]:
    """The launch's hosts as far as known, the node rank, where both come from, and why ranks had to tell the node.

    Each node is taken to run as many processes as this one, a node after the other.
    """
    num_nodes, host = ranks.num_nodes, read.env.host
    # Where only some of the nodes see the list, all have to do without it, or they would number themselves in two ways.
    listed = job.hosts if job and (job.is_shared or num_nodes == 1) else ()
    source = job.sources["hosts"] if job else "no host list"
    own = read.own_index(listed, source)
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
        host = listed[own] if own is not None else None if listed else host
        return (host,) if host else (), 0, {"hosts": "this host", "node_rank": "one node"}, ""
    if len(listed) == num_nodes and own is not None:
        return listed, own, {"hosts": source, "node_rank": f"the place of {host} in {source}"}, ""
    if not listed:
        why = "the launcher names no hosts"
    elif own is None:
        why = f"this host, {host}, is not among the job's by that name"
    else:
        why = f"the launch uses {num_nodes} of the job's {len(listed)} nodes, and which is not told"
    source = {"hosts": why, "node_rank": f"rank {ranks.rank} in blocks of {ranks.local_size}"}
    return (), ranks.rank // ranks.local_size, source, why


_PACKED = {"jsrun": "jsrun --launch_distribution=packed", "flux": "flux run without --taskmap"}
"""How ranks come to lie in blocks, by launcher."""


def _check_order(ranks: Ranks, node_rank: int, is_known: bool, seen: str, launcher: str) -> None:
    """Refuses ranks that do not lie in blocks, nor in turns on nodes that are known."""
    if ranks.local_size == 1:
        # One process a node: its rank decides nothing, the node rank does.
        return
    block = node_rank * ranks.local_size + ranks.local_rank
    in_turns = ranks.local_rank * ranks.num_nodes + node_rank
    if ranks.rank == block or (is_known and ranks.rank == in_turns):
        return
    raise MusterError(
        "the ranks don't lie in blocks, a node after the other, so which node this is can't be told"
        if not is_known
        else "the ranks lie neither in blocks nor in turns on the nodes, so where they meet can't be told",
        seen=seen,
        fix=_PACKED.get(launcher)
        or "mpirun --map-by slot (Open MPI) or mpiexec -ppn N (MPICH, Intel MPI): the ranks of a node in one block",
    )


TASKS = {"openmpi": openmpi_task, "hydra": hydra_task, "mvapich": mvapich_task}
