"""The launchers of MPI: this process's task of Open MPI's mpirun, of Hydra's mpiexec or of MVAPICH's mpirun_rsh.

Each sets a rank and a size, and both again within this node, as LSF's jsrun does. The node rank is this host's index in
the scheduler's list of hosts. Without a list, ranks are assumed to lie in blocks, a node after the other, as is the
launchers' default; a rank and a local rank that contradict this are refused.

Open MPI. OMPI_COMM_WORLD_NODE_RANK is no node rank: it counts the processes on this node over all of mpirun's jobs.
Inside Slurm the processes inherit the SLURM_ variables of the daemon that started them, which do not describe them.

    OMPI_COMM_WORLD_RANK=3 OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_LOCAL_RANK=1 OMPI_COMM_WORLD_LOCAL_SIZE=2

Hydra, of MPICH and of Intel MPI. PMI_RANK and PMI_SIZE alone are srun's (--mpi=pmi2), Flux's or PALS's. ParaStation's
srun sets all four, by PMIx the last two. On other nodes Hydra's processes have the scheduler's variables of the first.

    PMI_RANK=3 PMI_SIZE=4 MPI_LOCALRANKID=1 MPI_LOCALNRANKS=2

MVAPICH's mpirun_rsh, MVP_COMM_WORLD_RANK and so on from version 3; under Hydra MVAPICH looks like MPICH.

    MV2_COMM_WORLD_RANK=3 MV2_COMM_WORLD_SIZE=4 MV2_COMM_WORLD_LOCAL_RANK=1 MV2_COMM_WORLD_LOCAL_SIZE=2

Source: https://docs.open-mpi.org/en/v5.0.x/tuning-apps/environment-var.html
Source: https://docs.openpmix.org/en/latest/ (PMIX_RANK and PMIX_NAMESPACE, which every process of mpirun has)
Source: https://github.com/openpmix/prrte/blob/master/src/mca/schizo/base/schizo_base_stubs.c (PRTE_LAUNCHED)
Source: https://github.com/pmodels/mpich/blob/main/doc/wiki/how_to/Using_the_Hydra_Process_Manager.md
Source: https://www.intel.com/content/www/us/en/docs/mpi-library/developer-reference-linux/current/environment-variable-reference.html
Source: https://mvapich.cse.ohio-state.edu/static/media/mvapich/mvapich2-userguide.html
"""

import re
from typing import NamedTuple

from muster.entrypoint.detect import hostlist
from muster.entrypoint.detect.allocation import Job, Rejected, Task
from muster.entrypoint.detect.reader import Reader
from muster.entrypoint.environment import Environment
from muster.entrypoint.rendezvous import network
from muster.errors import MusterError
from muster.units import plural


class Names(NamedTuple):
    """The names of a launcher's four variables."""

    rank: str
    size: str
    local_rank: str
    local_size: str


JSRUN = Names("JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE", "JSM_NAMESPACE_LOCAL_RANK", "JSM_NAMESPACE_LOCAL_SIZE")
"""The variables of LSF's jsrun, which sets Open MPI's too."""
OPENMPI = Names(
    "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"
)
HYDRA = Names("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
HYDRA_HOSTS = ("MPIR_CVAR_CH3_INTERFACE_HOSTNAME", "PMI_HOSTNAME", "HYDRA_BSTRAP_LOCALHOST")
"""Hydra's variables for the host of a process: in MPICH 4.0, in MPICH 5.0, in Intel MPI 2021."""
MVAPICH = Names("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE")
MVAPICH3 = Names(*(name.replace("MV2_", "MVP_") for name in MVAPICH))
VARIABLES = (
    *OPENMPI, *HYDRA, *HYDRA_HOSTS, *MVAPICH, *MVAPICH3, "I_MPI_HYDRA_UUID", "MPT_MPI_RANK",
    "OMPI_COMM_WORLD_NODE_RANK", "OMPI_MCA_orte_ess_num_procs", "OMPI_MCA_orte_num_nodes", "PMIX_DSTORE_21_BASE_PATH",
    "PMIX_HOSTNAME", "PMIX_NAMESPACE", "PMIX_RANK", "PRTE_LAUNCHED",
)  # fmt: skip

PREFIXES = (
    "PMI_", "PMIX_", "OMPI_", "PRTE_", "MPI_", "MPIR_", "MPIEXEC_", "MPT_", "HYDRA_", "HYDI_", "I_MPI_", "MV2_", "MVP_",
)  # fmt: skip
# Also mpirun.openmpi or mpiexec.hydra: several are often installed side by side.
PARENT = re.compile(r"^(hydra_pmi_proxy|mpiexec|mpirun|orted|orterun|prte|prted|prterun)(\.|$)")

FIX_OPENMPI = "start the command by mpirun itself, from a shell without another run's OMPI_ and PMIX_ variables"
FIX_HYDRA = "start the command by mpiexec itself, from a shell without another run's PMI_ and MPI_ variables"
FIX_MVAPICH = "start the command by mpirun_rsh itself, from a shell without another run's MV2_ and MVP_ variables"


def openmpi_task(env: Environment, job: Job) -> Task | Rejected | None:
    """This process's task of Open MPI's mpirun, or None; Rejected where the variables are another process's."""
    if not set(OPENMPI) & env.keys():
        return None
    read = Reader(env, FIX_OPENMPI)
    namespace = env.get("PMIX_NAMESPACE", "")
    # mpirun has a namespace of its own. With Slurm's, or none, the variables may be copies.
    if re.fullmatch(r"(slurm\.pmix\..*)?", namespace) and _is_copy(env, OPENMPI):
        return None
    # ParaStation's srun sets Open MPI's variables too; and jsrun, for IBM's Spectrum MPI, with the values of its own.
    if "SLURM_STEP_ID" in env and namespace.startswith("pspmix_"):
        return None
    if _matches(env, OPENMPI, *JSRUN):
        if job.scheduler in ("lsf", "local"):
            return None
        return Rejected(f"{read.seen(JSRUN.rank)} says the same: jsrun set them, in a job of LSF")
    if elsewhere := _reject_other_host(env, "PMIX_HOSTNAME"):
        return elsewhere
    ranks = read_ranks(OPENMPI, read)
    if "PMIX_RANK" not in env or "PMIX_NAMESPACE" not in env:
        raise MusterError(
            "Open MPI's variables are set, but PMIX_RANK or PMIX_NAMESPACE, which mpirun sets too, is missing",
            seen=read.seen(*OPENMPI),
            fix=f"unset {' '.join(OPENMPI)} if they are left over from another job; else {FIX_OPENMPI}",
        )
    # The valid range of each variable in which mpirun repeats these numbers. Some versions leave some of them out.
    repeated = {
        "PMIX_RANK": (ranks.rank, ranks.rank),
        "OMPI_COMM_WORLD_NODE_RANK": (ranks.local_rank, hostlist.MAX_COUNT),
        "OMPI_MCA_orte_ess_num_procs": (ranks.size, ranks.size),
        "OMPI_MCA_orte_num_nodes": (ranks.num_nodes, hostlist.MAX_COUNT),
    }
    fits = all(least <= read.number(name) <= most for name, (least, most) in repeated.items() if env.get(name))
    wrong = "Open MPI's variables contradict each other, or the nodes have different numbers of processes"
    read.agree(fits, wrong, *OPENMPI, *repeated)
    # Where srun started the daemon, the daemon is Slurm's task, and its PID is the last number here; with pid.33 in
    # place of jf.1134 that is mpirun's PID: PMIX_DSTORE_21_BASE_PATH=/tmp/ompi.node01.0/jf.1134/pmix_dstor_ds21_582
    daemon = re.search(r"/jf\.[0-9]+/pmix_dstor_ds21_([0-9]+)$", env.get("PMIX_DSTORE_21_BASE_PATH", ""))
    is_own = not daemon or "SLURM_STEP_ID" not in env or env.get("SLURM_TASK_PID", daemon[1]) == daemon[1]
    wrong = "the variables of Open MPI are left over from another job: this task of Slurm did not start its daemon"
    read.agree(is_own, wrong, "PMIX_DSTORE_21_BASE_PATH", "SLURM_TASK_PID")
    return by_rank("openmpi", OPENMPI, read, job, job_id=env["PMIX_NAMESPACE"])


def hydra_task(env: Environment, job: Job) -> Task | Rejected | None:
    """This process's task of Hydra's mpiexec, or None; Rejected where the variables are another process's."""
    if not (present := [name for name in HYDRA if name in env]):
        return None
    read = Reader(env, FIX_HYDRA)
    if _matches(env, HYDRA, "FLUX_TASK_RANK", "FLUX_JOB_SIZE"):
        return Rejected(f"{read.seen(HYDRA.rank, HYDRA.size)} is Flux's own", is_certain=True)
    has_local = {HYDRA.local_rank, HYDRA.local_size} & env.keys()
    is_hydras = has_local and set(HYDRA_HOSTS) & env.keys()  # ParaStation sets no host
    is_sruns = "SLURM_STEP_ID" in env and _matches(env, HYDRA, "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID")
    if _matches(env, HYDRA, "PALS_RANKID") or (is_sruns and not is_hydras):
        return None
    if not has_local:
        raise MusterError(
            "PMI_RANK or PMI_SIZE is set without MPI_LOCALRANKID, MPI_LOCALNRANKS: no launcher set it for this process",
            seen=read.seen(*present),
            fix=f"unset {' '.join(present)} if it is left over from another job; else {FIX_HYDRA}",
        )
    elsewhere = next(filter(None, (_reject_other_host(env, name) for name in HYDRA_HOSTS)), None)
    return elsewhere or by_rank("hydra", HYDRA, read, job)


def _matches(env: Environment, names: Names, *own: str) -> bool:
    """Whether the variables `names`, as far as they are set, have the values of another launcher's variables, `own`."""
    pairs = zip(names, own, strict=False)
    return own[0] in env and all(env.get(name, env.get(of)) == env.get(of) for name, of in pairs)


def _is_copy(env: Environment, names: Names) -> bool:
    """Whether `names` have the values of Slurm's or Hydra's variables: scripts that bind tasks to GPUs copy them."""
    return _matches(env, names, "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID") or _matches(env, names, *HYDRA)


def mvapich_task(env: Environment, job: Job) -> Task | None:
    """This process's task of MVAPICH's mpirun_rsh, or None."""
    # The local size alone is set by users too, as a hint to the library.
    names = next((names for names in (MVAPICH, MVAPICH3) if set(names[:3]) & env.keys()), None)
    return by_rank("mvapich", names, Reader(env, FIX_MVAPICH), job) if names and not _is_copy(env, names) else None


def prrte_task(env: Environment, job: Job) -> None:
    """Refuses a process of PRRTE's prterun, which sets a rank, but not the number of processes; else returns None.

    Raises:
        MusterError: prterun started this process in a scheduler's job. Without one resolve.py refuses any PMIX_RANK.
    """
    if "PRTE_LAUNCHED" not in env or job.scheduler in ("local", "manual") or set(OPENMPI) & env.keys():
        return
    from muster.entrypoint.detect import traces

    # Left over as in a job that such a process submitted.
    is_left_over = env.is_live and not any(re.match(r"prte(d|run)?$", name) for name in traces.ancestors())
    read = Reader(env, f"prterun --personality ompi, which sets the number, as mpirun does; or {job.launch}")
    wrong = "prterun started this process, and does not give it the number of processes"
    read.agree(is_left_over, wrong, "PMIX_NAMESPACE", "PMIX_RANK")


def _reject_other_host(env: Environment, name: str) -> Rejected | None:
    """The rejection where the launcher's variable `name` has another host than this one; else None."""
    host = env.get(name, "")
    if not env.host or not hostlist.is_name(host) or hostlist.short(host) == hostlist.short(env.host):
        return None
    # Hydra has the name that `mpiexec -hosts` gave: localhost, 10.0.0.2, node02-ib. A recording can't resolve these.
    if network.is_own(host) if env.is_live else host == "localhost" or hostlist.is_address(host):
        return None
    return Rejected(f"{name}={host}, but this host is {env.host}")


class Ranks(NamedTuple):
    """The values of the four variables."""

    rank: int
    size: int
    local_rank: int
    local_size: int

    @property
    def num_nodes(self) -> int:
        """The number of nodes, if all have as many processes as this one."""
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
    job: Job,
    *,
    job_id: str | None = None,
    counted: Ranks | None = None,
    known_node_rank: int | None = None,
) -> Task:
    """The task that a launcher's four variables describe.

    Args:
        job: the scheduler's job, whose list of hosts determines the node rank.
        job_id: the launch's own id, if it has one.
        counted: the ranks of a launcher whose last variable counts nodes; all have the same number of processes.
        known_node_rank: the node rank of a launcher that sets one.

    Raises:
        MusterError: the variables contradict each other or the scheduler's hosts, or do not determine the node rank.
    """
    ranks = counted or read_ranks(names, read)
    num_nodes, local_size = ranks.num_nodes, ranks.local_size
    # Where only some of the nodes see the list, none uses it: else the nodes would be numbered in two ways.
    hosts = job.hosts if job.is_shared or num_nodes == 1 else ()
    own = read.own_index(hosts, job.sources["hosts"])
    tasks_per_node = (local_size,) * num_nodes
    sources = {
        "launcher": read.seen(names.rank),
        "num_nodes": read.seen(names.size, names.local_size),
        "node_rank": f"the place of {read.env.host} in {job.sources['hosts']}",
        "local_rank": read.seen(names.local_rank),
        "tasks_on_node": read.seen(names.size, names.local_size) if counted else read.seen(names.local_size),
    }
    notes: list[str] = []
    if own is not None and _is_uneven(ranks, own, job):
        node_rank, tasks_per_node = own, job.slots
        sources["num_nodes"] = job.sources["num_nodes"]
        sources["tasks_on_node"] = f"the processes for each host in {job.sources['hosts']}"
    elif ranks.size % local_size:
        raise MusterError(
            "the nodes have different numbers of processes, and how many each of the others has is unknown",
            seen=read.seen(*names),
            fix="start the same number of processes on each node, or one on each: then torchrun starts the others; or "
            f"{read.fix}",
        )
    elif hosts and num_nodes > len(hosts):
        # Where hosts alternate in its list (a b a b), Hydra counts each process as if it were alone on its node.
        raise MusterError(
            f"the launcher says that {local_size} of {ranks.size} processes run on each node, which makes "
            f"{num_nodes} nodes, but the job has {len(hosts)}",
            seen=f"{read.seen(*names)}, {job.sources['hosts']}",
            fix=f"one process on each node: {job.launch}; or the same number on each, one "
            "node after the other, from a shell or script of one job only",
        )
    elif num_nodes == 1:
        host = read.env.host if not hosts else None if own is None else hosts[own]
        hosts, node_rank = (host,) if host else (), 0
        sources |= {"hosts": "this host", "node_rank": "one node"}
    elif own is not None and len(hosts) == num_nodes:
        node_rank = own
    else:
        why = "the launcher names no hosts"
        if hosts and own is None:
            why = f"this host, {read.env.host}, is not in the job's list by that name"
        elif hosts:
            why = f"the launch uses {num_nodes} of the job's {len(hosts)} nodes, and which ones is unknown"
        hosts, node_rank = (), ranks.rank // local_size
        sources |= {"hosts": why, "node_rank": f"rank {ranks.rank} in blocks of {local_size}"}
        if known_node_rank is None:
            notes.append(f"node rank {node_rank}: {why}; ranks are assumed to lie in blocks of {local_size} a node")
        else:
            node_rank, sources["node_rank"] = known_node_rank, "the launcher's own"
    if len(set(tasks_per_node)) == 1:
        _check_order(launcher, ranks, node_rank, read.seen(*names), is_known=bool(hosts) or known_node_rank is not None)
        if num_nodes > 1 and local_size > 1 and counted is None:
            notes.append(f"each node is assumed to run {plural(local_size, 'process')}, as this one does")
    wrong = f"{launcher} says node rank {known_node_rank}, which does not fit its hosts, or its ranks and sizes"
    read.agree(known_node_rank is None or known_node_rank == node_rank < len(tasks_per_node), wrong, *names)
    return Task(
        launcher=launcher,
        node_rank=node_rank,
        local_rank=ranks.local_rank,
        rank=ranks.rank,
        tasks_per_node=tasks_per_node,
        hosts=hosts,
        job_id=job_id,
        counts_nodes=True,
        notes=tuple(notes),
        sources=sources,
    )


def _is_uneven(ranks: Ranks, own: int, job: Job) -> bool:
    """Whether the scheduler planned different numbers of processes for the nodes, and `ranks` match them.

    PBS does so by `select=1:mpiprocs=2+1:mpiprocs=1`: its file of nodes names the first host twice.
    """
    # jsrun's launch node is among LSF's slots, and not among the hosts.
    if not job.is_shared or len(set(job.slots)) < 2 or len(job.slots) != len(job.hosts):
        return False
    is_size = sum(job.slots) == ranks.size and job.slots[own] == ranks.local_size
    return is_size and sum(job.slots[:own]) == ranks.rank - ranks.local_rank


def _check_order(launcher: str, ranks: Ranks, node_rank: int, seen: str, *, is_known: bool) -> None:
    """Refuses ranks that lie neither in blocks nor, where the nodes are known, in turns (round-robin)."""
    block = node_rank * ranks.local_size + ranks.local_rank
    in_turns = ranks.local_rank * ranks.num_nodes + node_rank
    # With one process a node the rank is not used, only the node rank.
    if ranks.local_size == 1 or ranks.rank == block or (is_known and ranks.rank == in_turns):
        return
    packed = {"jsrun": "jsrun --launch_distribution=packed", "flux": "flux run without --taskmap"}
    raise MusterError(
        "the ranks lie on the nodes neither in blocks nor in turns, so where they meet is unknown"
        if is_known
        else "the ranks don't lie in blocks, one node after the other, so this node's rank is unknown",
        seen=seen,
        fix=packed.get(launcher)
        or "mpirun --map-by slot (Open MPI) or mpiexec -ppn N (MPICH, Intel MPI): the ranks of a node in one block",
    )


TASKS = {"openmpi": openmpi_task, "hydra": hydra_task, "mvapich": mvapich_task, "prrte": prrte_task}
