"""What detection answers: a scheduler's Job, a launcher's Task, and both together, the Allocation of this process.

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
    """A scheduler's answer: the job and the nodes it owns.

    Attributes:
        scheduler: its name, as users say it.
        job_id: the job's id as the scheduler prints it; None without a scheduler.
        attempt: how often the job was started before: 0 on the first run.
        hosts: the job's nodes in the scheduler's order; empty where they are not known.
        num_nodes: how many there are; None where nothing tells.
        slots: how many processes the scheduler planned for each host; empty where it doesn't say.
        gpus_on_node: GPUs that the scheduler says this node has for the job; None where it doesn't say.
        gpu_ids: how the scheduler names these, by number or UUID; empty where it doesn't.
        cpus_on_node: likewise CPUs.
        default_threads: OMP_NUM_THREADS as the scheduler itself sets it; None where it is the user's if it is there.
        start_time: when the job started, in unix seconds; None where nothing tells.
        end_time: when its time limit ends it, likewise.
        launch: the line that starts a command once on each node, for `with_command`.
        launch_one: the same for one process on one node; empty where that is typed on the first host itself.
        gpu_request: how GPUs are asked for, with `{gpus}` in their number's place; empty where nothing is known.
        is_shared: whether all the job's nodes see this list of hosts.
        is_host_proved: whether something else than its name shows that this host is one of the job's.
        problem: why the hosts are not known, to be raised where they are needed.
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
    is_host_proved: bool = False
    problem: MusterError | None = None
    sources: Mapping[str, str] = field(default_factory=dict[str, str])


def with_command(text: str, command: Sequence[str]) -> str:
    """`text` with what the user typed in the place of `{command}`.

    `{quoted}` is for another shell that reads it once more. Between `{start}` and `{rest}` further options of ours go:
    behind a script they would be the script's.
    """
    words, start = shlex.join(command), shlex.join(command[:2])
    parts = {"command": words, "quoted": shlex.quote(words), "start": start, "rest": words[len(start) :]}
    return re.sub("{(command|quoted|start|rest)}", lambda found: parts[found[1]], text)


NO_SCHEDULER = Job(
    scheduler="local",
    job_id=None,
    sources=dict.fromkeys(("scheduler", "hosts", "num_nodes"), "no scheduler's variables"),
)
"""What stands for the job where no scheduler gave one."""


@dataclass(frozen=True)
class Task:
    """A launcher's answer: which of the processes it started this one is.

    Attributes:
        launcher: its name, as users say it.
        node_rank: which node of the launch this is, from 0.
        local_rank: which of the launch's processes on this node this is, from 0.
        rank: which of all its processes this is, from 0.
        tasks_per_node: how many processes it started on each node, by node rank.
        hosts: the launch's nodes where it knows them, else empty: then they are the scheduler's.
        step: tells several launches of one job apart; 0 where there is but one.
        job_id: the launch's own id, for where there is no scheduler to give one.
        is_counted: whether its nodes are known by its own counts, which may be of fewer nodes than the job's.
        notes: what was taken for granted: one line each.
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
    is_counted: bool = False
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
        """The one process on the node `node_rank` of `num_nodes`."""
        only = dict.fromkeys(("local_rank", "tasks_on_node"), "one process a node")
        return cls(launcher, node_rank, 0, node_rank, (1,) * num_nodes, hosts, notes=notes, sources={**only, **sources})

    @property
    def num_nodes(self) -> int:
        """How many nodes the launch has."""
        return len(self.tasks_per_node)

    @property
    def tasks_on_node(self) -> int:
        """How many processes the launcher started on this node."""
        return self.tasks_per_node[self.node_rank]


@dataclass(frozen=True)
class Rejected:
    """A detector's answer: its variables are there, but were made for another process.

    Attributes:
        reason: the variable that tells, with its value.
        is_certain: whether it can't be otherwise; else this could still be a process of that launcher.
    """

    reason: str
    is_certain: bool = False


@dataclass(frozen=True, kw_only=True)
class Allocation(Task):
    """Where this process stands in its job: its task, and the job around it.

    Attributes:
        job: the scheduler's answer, or NO_SCHEDULER. `scheduler`, `job_id` and `attempt` are what the launch goes by.
        mode: `agent`: one process a node, which starts the others by torchrun; `worker`: the launcher started one
            process for each rank already; `single`: a world of one.
        rank: this process's rank in worker and single mode; in agent mode that of its first worker.
        ranks_per_node: how many ranks each node runs, by node rank.
        hosts: empty where only their number is known.
        gpus_seen: how many GPUs this process may use.
        rejected: one line for each scheduler and launcher whose variables are there too, with why it lost.
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
                    f"what was found does not fit together: {rule}",
                    seen=", ".join(f"{name} from {source}" for name, source in self.sources.items()) or "no source",
                    fix="mail the file that `env > FILE` writes, in this same place, to whoever supports this image",
                )

    @property
    def world_size(self) -> int:
        """How many ranks there are on all nodes."""
        return sum(self.ranks_per_node)

    def of_tasks(self) -> "Allocation":
        """This with one rank for each process that the launcher started, for where nothing starts more."""
        if self.mode != "agent":
            return self
        return replace(self, rank=self.node_rank, ranks_per_node=(1,) * self.num_nodes)

    @property
    def nproc_per_node(self) -> int:
        """How many ranks this node runs."""
        return self.ranks_per_node[self.node_rank]
