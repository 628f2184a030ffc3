"""The results of detection: a scheduler's Job, a launcher's Task, and both together, the Allocation of this process.

Each value comes with the variable that it was read from.
"""

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from muster.errors import MusterError

Mode = Literal["single", "agent", "worker"]


@dataclass(frozen=True, kw_only=True)
class Job:
    """A job and its nodes, as the scheduler describes them.

    Attributes:
        scheduler: its name: slurm, pbs, lsf...; `manual` where MUSTER_HOSTS alone lists the nodes; else `local`.
        job_id: the job's id as the scheduler prints it; None where there is none.
        attempt: how often the job was started before: 0 on the first run.
        hosts: the host names of the job's nodes, in the scheduler's order; empty where unknown.
        num_nodes: the number of nodes; None where unknown.
        slots: the number of processes that the scheduler planned for each host; empty where unknown.
        gpus_on_node: the number of GPUs that the scheduler gave the job on this node; None where unknown.
        gpu_ids: the numbers or UUIDs of these GPUs; empty where unknown.
        cpus_on_node: the number of CPUs that the scheduler gave the job on this node; None where unknown.
        default_threads: OMP_NUM_THREADS where the scheduler set it; None where it is unset or set by the user.
        start_time: when the job started, in Unix time (seconds); None where unknown.
        end_time: when the job's time limit ends it, in Unix time (seconds); None where unknown.
        launch: the line that starts a command once on each node, to be completed by `with_command`.
        launch_one: the same for one process on one node; empty where the user types the command on the first host.
        gpu_request: the option that requests GPUs, with `{gpus}` for their number; empty where unknown.
        is_shared: whether all the job's nodes see this list of hosts.
        is_host_certain: whether other evidence than its name shows that this host is one of the job's.
        problem: why the hosts are unknown: an error to be raised where they are needed.
        sources: for each of the fields above, the variable it came from, with its value.
    """

    scheduler: str
    job_id: str | None
    attempt: int = 0
    hosts: tuple[str, ...] = ()
    num_nodes: int | None = None
    slots: tuple[int, ...] = ()
    gpus_on_node: int | None = None
    gpu_ids: tuple[str, ...] = ()
    cpus_on_node: int | None = None
    default_threads: str | None = None
    start_time: int | None = None
    end_time: int | None = None
    launch: str = "{command}"
    launch_one: str = ""
    gpu_request: str = ""
    is_shared: bool = True
    is_host_certain: bool = False
    problem: MusterError | None = None
    sources: Mapping[str, str] = field(default_factory=dict[str, str])


def with_command(text: str, command: Sequence[str]) -> str:
    """`text` with the user's `command` in the place of `{command}`.

    `{quoted}` is the command quoted once more, for a line that a second shell parses. `{start}` is its first two words,
    `{rest}` the others: Muster's own options go between them, as after a script they would be the script's.
    """
    words, start = shlex.join(command), shlex.join(command[:2])
    parts = {"command": words, "quoted": shlex.quote(words), "start": start, "rest": words[len(start) :]}
    return re.sub("{(command|quoted|start|rest)}", lambda found: parts[found[1]], text)


NO_SCHEDULER = Job(
    scheduler="local",
    job_id=None,
    sources=dict.fromkeys(("scheduler", "hosts", "num_nodes"), "no scheduler's variables"),
)
"""The job of a process that belongs to no scheduler."""


@dataclass(frozen=True)
class Task:
    """The place of this process among those that its launcher started.

    Attributes:
        launcher: its name: srun, openmpi, pbsdsh...; `manual` or `local` where no launcher started this process.
        node_rank: the index of this node in the launch, from 0.
        local_rank: the index of this process among the launch's processes on this node, from 0.
        rank: the index of this process among all processes of the launch, from 0.
        tasks_per_node: the number of processes that the launcher started on each node, by node rank.
        hosts: the host names of the launch's nodes, by node rank; empty where unknown.
        step: Slurm's step id, which tells several launches of one job apart; 0 under other launchers.
        job_id: the launch's own id, used where no scheduler gives one.
        counts_nodes: whether the launcher's own counts give the number of nodes: it may be less than the job's.
        notes: one line for each assumption that was made.
        sources: for each of the fields above that is not the job's, the variable it came from, with its value.
    """

    launcher: str
    node_rank: int
    local_rank: int
    rank: int
    tasks_per_node: tuple[int, ...]
    hosts: tuple[str, ...] = ()
    step: int = 0
    job_id: str | None = None
    counts_nodes: bool = False
    notes: tuple[str, ...] = ()
    sources: Mapping[str, str] = field(default_factory=dict[str, str])

    @classmethod
    def one_a_node(
        cls,
        launcher: str,
        node_rank: int,
        num_nodes: int,
        hosts: tuple[str, ...],
        sources: Mapping[str, str],
        notes: tuple[str, ...] = (),
    ) -> "Task":
        """The task of a launch with one process on each of `num_nodes` nodes: the one of `node_rank`."""
        only = dict.fromkeys(("local_rank", "tasks_on_node"), "one process a node")
        return cls(launcher, node_rank, 0, node_rank, (1,) * num_nodes, hosts, notes=notes, sources={**only, **sources})

    @property
    def num_nodes(self) -> int:
        """The number of nodes in the launch."""
        return len(self.tasks_per_node)

    @property
    def tasks_on_node(self) -> int:
        """The number of processes that the launcher started on this node."""
        return self.tasks_per_node[self.node_rank]


@dataclass(frozen=True)
class Rejected:
    """A detector's result where its variables are set, but were made for another process.

    Attributes:
        reason: why, mostly by the variable that shows it, with its value.
        is_certain: whether this is certain; else this process could still be one of that launcher.
    """

    reason: str
    is_certain: bool = False


@dataclass(frozen=True, kw_only=True)
class Allocation(Task):
    """The place of this process in its job: its task, and the job around it.

    Attributes:
        job: the scheduler's job, or NO_SCHEDULER. A launch uses the allocation's own `scheduler`, `job_id`, `attempt`.
        mode: `agent`: one process a node, which starts the node's ranks by torchrun; `worker`: the launcher has
            started one process for each rank; `single`: a world of one rank.
        rank: this process's rank in worker and single mode; in agent mode that of its first worker.
        ranks_per_node: the number of ranks that each node runs, by node rank.
        hosts: empty where only their number is known.
        gpus_seen: the number of GPUs that this process may use.
        rejected: one line for each other scheduler and launcher whose variables are set, with why it was ruled out.
    """

    job: Job
    scheduler: str
    attempt: int
    ranks_per_node: tuple[int, ...]
    mode: Mode
    gpus_seen: int
    rejected: tuple[str, ...]

    def __post_init__(self) -> None:
        for holds, rule in (
            (not self.hosts or len(self.hosts) == self.num_nodes, "each node has its host name"),
            (len(self.ranks_per_node) == self.num_nodes, "each node has its number of ranks"),
            (0 <= self.node_rank < self.num_nodes, "the node rank is below the number of nodes"),
            (0 <= self.local_rank < self.tasks_on_node, "the local rank is below the number of tasks on the node"),
            (0 <= self.rank < self.world_size, "the rank is below the world size"),
            (0 not in self.ranks_per_node, "each node runs at least one rank"),
        ):
            if not holds:
                raise MusterError(
                    f"the values found contradict each other; what should hold: {rule}",
                    seen=", ".join(f"{name} from {source}" for name, source in self.sources.items()) or "no source",
                    fix="mail the file that `env > FILE` writes, in this same place, to whoever supports this image",
                )

    @property
    def world_size(self) -> int:
        """The number of ranks on all nodes."""
        return sum(self.ranks_per_node)

    def of_tasks(self) -> "Allocation":
        """This allocation with one rank for each process that the launcher started, where no agent starts more."""
        if self.mode != "agent":
            return self
        return replace(self, rank=self.node_rank, ranks_per_node=(1,) * self.num_nodes)

    @property
    def nproc_per_node(self) -> int:
        """The number of ranks that this node runs."""
        return self.ranks_per_node[self.node_rank]
