"""environment -> scheduler x launcher -> Allocation."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace

from entrypoint import launchers, resources, schedulers
from entrypoint.allocation import Allocation, Hosts, Mode, Task
from entrypoint.environment import Environment
from entrypoint.options import LaunchOptions
from train.errors import MusterError


@dataclass(frozen=True)
class _Nproc:
    count: int
    source: str


def allocate(env: Environment, options: LaunchOptions, command: Sequence[str]) -> Allocation:
    """Where this process stands in its job.

    Args:
        env: its environment, live or recorded.
        options: what the user said; wins over what is found.
        command: what the user typed, for the launch line in an error.

    Raises:
        MusterError: what is there contradicts itself or the options, or several nodes are allocated and nothing tells
            which of them this is: never a silent world of one.
    """
    if "TORCHELASTIC_RUN_ID" in env:
        raise MusterError(
            "this process is a worker of torchrun already: a second torchrun inside it would start a world of its own",
            seen=f"TORCHELASTIC_RUN_ID={env['TORCHELASTIC_RUN_ID']}",
            fix=f"start it without torchrun: {shlex.join(command)}",
        )
    job = schedulers.detect(env)
    if options.node_rank is not None:
        return _by_hand(env, options, job)
    task = launchers.detect(env)
    if task is None:
        return _alone(env, options, job, command)
    return _launched(env, options, job, task, command)


def single(allocation: Allocation, command: Sequence[str]) -> Allocation:
    """`allocation` as a world of one, for what runs in one process only.

    Raises:
        MusterError: several processes were started: each of them would train alone, and write over the others' files.
    """
    if allocation.num_nodes > 1 or allocation.tasks_on_node > 1:
        tasks = sum(allocation.ranks_per_node) if allocation.mode == "worker" else allocation.num_nodes
        raise MusterError(
            f"single is one process, and {allocation.launcher} started {tasks}",
            seen=f"{allocation.sources['num_nodes']}, {allocation.sources.get('tasks_on_node', 'one task a node')}",
            fix=f"start one task: srun --nodes=1 --ntasks=1 {shlex.join(command)}, or train ddp on all of them",
        )
    sources = {**allocation.sources, "nproc_per_node": "single"}
    return replace(allocation, ranks_per_node=(1,), rank=0, mode="single", sources=sources)


def _by_hand(env: Environment, options: LaunchOptions, job: Hosts | None) -> Allocation:
    num_nodes, node_rank = options.nnodes, options.node_rank or 0
    if num_nodes is None:
        raise MusterError(
            "--node-rank needs the number of nodes",
            seen=f"--node-rank={node_rank} without --nnodes",
            fix=f"--nnodes N --node-rank {node_rank}",
        )
    if node_rank >= num_nodes:
        raise MusterError(
            "the node rank must be below the number of nodes",
            seen=f"--nnodes={num_nodes} --node-rank={node_rank}",
            fix=f"--node-rank 0 to {num_nodes - 1}",
        )
    nproc = _nproc(env, options, job)
    hosts = job.hosts if job and len(job.hosts) == num_nodes else ()
    if not hosts and num_nodes == 1 and env.host:
        hosts = (env.host,)
    notes = [f"by hand: node rank {node_rank} of {num_nodes}, as --node-rank says"]
    if job and not hosts:
        notes.append(f"{job.scheduler} gave this job {job.num_nodes} nodes; --nnodes={num_nodes} was taken")
    return Allocation(
        scheduler=job.scheduler if job else "manual",
        launcher="manual",
        job_id=job.job_id if job else None,
        attempt=job.attempt if job else 0,
        step=0,
        hosts=hosts,
        num_nodes=num_nodes,
        node_rank=node_rank,
        local_rank=0,
        rank=node_rank * nproc.count,
        tasks_on_node=1,
        ranks_per_node=(nproc.count,) * num_nodes,
        mode=_mode_of_agents(num_nodes, nproc),
        cpus_on_node=job.cpus_on_node if job else None,
        sources={
            **(job.sources if job else {}),
            "launcher": f"--node-rank={node_rank}",
            "num_nodes": f"--nnodes={num_nodes}",
            "node_rank": f"--node-rank={node_rank}",
            "nproc_per_node": nproc.source,
        },
        notes=tuple(notes),
    )


def _alone(env: Environment, options: LaunchOptions, job: Hosts | None, command: Sequence[str]) -> Allocation:
    """No launcher started this process: right on one node, a refusal on several."""
    num_nodes = job.num_nodes if job else 1
    if num_nodes > 1 and job:
        raise MusterError(
            f"{job.scheduler} gave this job {num_nodes} nodes, but nothing started this process on each of them",
            seen=f"{job.sources['num_nodes']}, {job.sources['hosts']}, and no task of a launcher",
            fix=shlex.join([*job.launch, *command]),
        )
    _check_nnodes(options, num_nodes, job.sources["num_nodes"] if job else "no scheduler's variables")
    nproc = _nproc(env, options, job)
    return Allocation(
        scheduler=job.scheduler if job else "local",
        launcher="local",
        job_id=job.job_id if job else None,
        attempt=job.attempt if job else 0,
        step=0,
        hosts=job.hosts if job else ((env.host,) if env.host else ()),
        num_nodes=1,
        node_rank=0,
        local_rank=0,
        rank=0,
        tasks_on_node=1,
        ranks_per_node=(nproc.count,),
        mode=_mode_of_agents(1, nproc),
        cpus_on_node=job.cpus_on_node if job else None,
        sources={
            "scheduler": "no scheduler's variables",
            "launcher": "no launcher's variables",
            "num_nodes": "one machine",
            "hosts": "this host's name",
            **(job.sources if job else {}),
            "nproc_per_node": nproc.source,
        },
    )


def _launched(
    env: Environment, options: LaunchOptions, job: Hosts | None, task: Task, command: Sequence[str]
) -> Allocation:
    """A launcher started this process as one of several."""
    if job is None:
        raise MusterError(
            f"{task.launcher} started this process, but its scheduler's variables are not there",
            seen=task.sources["launcher"],
            fix="don't unset the scheduler's variables; into a container pass all of them (no --cleanenv)",
        )
    hosts = task.hosts or job.hosts
    num_nodes = len(task.tasks_per_node)
    tasks_on_node = task.tasks_per_node[task.node_rank]
    _check_nnodes(options, num_nodes, task.sources["num_nodes"])
    _check_hosts(env, job, hosts, task)
    notes: list[str] = []
    if num_nodes < job.num_nodes:
        notes.append(f"this step uses {num_nodes} of the job's {job.num_nodes} nodes")
    if max(task.tasks_per_node) == 1:
        nproc = _nproc(env, options, job)
        mode = _mode_of_agents(num_nodes, nproc)
        ranks_per_node, rank = (nproc.count,) * num_nodes, task.node_rank * nproc.count
        nproc_source = nproc.source
    else:
        _check_one_task_a_node(options, job, task, command)
        mode, ranks_per_node, rank = "worker", task.tasks_per_node, task.rank
        nproc_source = task.sources["tasks_on_node"]
    return Allocation(
        scheduler=job.scheduler,
        launcher=task.launcher,
        job_id=job.job_id,
        attempt=job.attempt,
        step=task.step,
        hosts=hosts,
        num_nodes=num_nodes,
        node_rank=task.node_rank,
        local_rank=task.local_rank,
        rank=rank,
        tasks_on_node=tasks_on_node,
        ranks_per_node=ranks_per_node,
        mode=mode,
        cpus_on_node=job.cpus_on_node,
        sources={**job.sources, **task.sources, "nproc_per_node": nproc_source},
        notes=tuple(notes),
    )


def _mode_of_agents(num_nodes: int, nproc: _Nproc) -> Mode:
    return "single" if num_nodes == 1 and nproc.count == 1 else "agent"


def _check_nnodes(options: LaunchOptions, num_nodes: int, source: str) -> None:
    if options.nnodes is not None and options.nnodes != num_nodes:
        raise MusterError(
            f"--nnodes says {options.nnodes}, but here it is {num_nodes}, and nothing tells which node this is",
            seen=f"--nnodes={options.nnodes}; {source}",
            fix=f"--nnodes {options.nnodes} --node-rank I --master-addr HOST on each node, or leave --nnodes out",
        )


def _check_hosts(env: Environment, job: Hosts, hosts: tuple[str, ...], task: Task) -> None:
    strangers = sorted(set(hosts) - set(job.hosts))
    if strangers:
        raise MusterError(
            f"the step runs on {strangers[0]}, which is no node of the job: variables of two jobs are mixed",
            seen=f"{task.sources['hosts']}, {job.sources['hosts']}",
            fix="start the command from a shell or script of one job only",
        )
    # A host name that differs from the scheduler's is common (aliases, suffixes). One that belongs to another node of
    # the same job is not: then these variables were made for a process over there.
    if env.host in hosts and hosts.index(env.host) != task.node_rank:
        raise MusterError(
            f"the variables say node rank {task.node_rank}, but this host is the one with {hosts.index(env.host)}",
            seen=f"{task.sources['node_rank']} on {env.host}; {task.sources['hosts']}",
            fix=f"start the command by {task.launcher} itself, not by ssh out of one of its tasks",
        )


def _check_one_task_a_node(options: LaunchOptions, job: Hosts, task: Task, command: Sequence[str]) -> None:
    if options.nproc_per_node is None:
        return
    raise MusterError(
        f"{task.launcher} started {max(task.tasks_per_node)} tasks on a node, and --nproc-per-node asks each to start "
        f"{options.nproc_per_node} more; torchrun wants one task a node",
        seen=f"{task.sources['tasks_on_node']} --nproc-per-node={options.nproc_per_node}",
        fix=f"{shlex.join([*job.launch, *command])}, or leave --nproc-per-node out: each task is a rank",
    )


def _nproc(env: Environment, options: LaunchOptions, job: Hosts | None) -> _Nproc:
    given = options.nproc_per_node
    gpus, source = resources.gpus(env, job.gpus_on_node if job else None)
    if given is not None and given.isascii() and given.isdigit() and int(given) >= 1:
        return _Nproc(int(given), f"--nproc-per-node={given}")
    if given == "cpu":
        cores = resources.cores(env, job.cpus_on_node if job else None)
        return _Nproc(cores or resources.NPROC_WITHOUT_GPU, "--nproc-per-node=cpu")
    if given == "gpu" and not gpus:
        raise MusterError("--nproc-per-node=gpu, but there is no GPU", seen=source, fix="--nproc-per-node 2")
    if given not in (None, "gpu", "auto"):
        raise MusterError(
            "--nproc-per-node is a number from 1, or gpu, cpu, auto",
            seen=f"--nproc-per-node={given}",
            fix="--nproc-per-node 2",
        )
    if gpus:
        return _Nproc(gpus, source)
    return _Nproc(resources.NPROC_WITHOUT_GPU, f"no GPU ({source})")
