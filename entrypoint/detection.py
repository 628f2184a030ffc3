"""environment -> scheduler x launcher -> Allocation."""

import shlex
from collections.abc import Sequence
from dataclasses import replace

from entrypoint import container, launchers, processes, refusals, resources, schedulers, variables
from entrypoint.allocation import Allocation, Hosts, Mode, Task
from entrypoint.environment import Environment
from entrypoint.options import LaunchOptions
from entrypoint.processes import Nproc
from train.errors import MusterError


def allocate(
    env: Environment, options: LaunchOptions, command: Sequence[str], *, is_single: bool = False
) -> Allocation:
    """Where this process stands in its job.

    Args:
        env: its environment, live or recorded.
        options: what the user said; wins over what is found.
        command: what the user typed, for the launch line in an error.
        is_single: whether one process is meant, and no world.

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
    job, rejected = schedulers.detect(env)
    if options.node_rank is not None or "MUSTER_NODE_RANK" in env:
        allocation, losers = _by_hand(env, options, job), ()
    else:
        task, losers = launchers.detect(env, job)
        if job is None and not is_single:
            refusals.check_traces(env, options, task)
        allocation = _launched(env, options, job, task, command) if task else _alone(env, options, job, command)
    notes = [f"MUSTER_HOSTS={env['MUSTER_HOSTS'][:200]} is yours: it was taken"] if "MUSTER_HOSTS" in env else []
    unused = variables.seen(env, "RANK", "WORLD_SIZE") if allocation.scheduler != "kubernetes" else ""
    return replace(
        allocation,
        gpus_seen=resources.gpus(env, job.gpus_on_node if job else None)[0],
        notes=(*notes, *allocation.notes),
        rejected=(*rejected, *losers, *([f"{unused}: set by hand or left over, not used"] if unused else ())),
    )


def single(allocation: Allocation, command: Sequence[str]) -> Allocation:
    """`allocation` as a world of one, for what runs in one process only.

    Raises:
        MusterError: several processes were started: each of them would train alone, and write over the others' files.
    """
    if allocation.num_nodes > 1 or allocation.tasks_on_node > 1:
        tasks = sum(allocation.ranks_per_node) if allocation.mode == "worker" else allocation.num_nodes
        once = "srun --nodes=1 --ntasks=1 " if allocation.launcher == "srun" else ""
        raise MusterError(
            f"single is one process, and {allocation.launcher} started {tasks}",
            seen=f"{allocation.sources['num_nodes']}, {allocation.sources.get('tasks_on_node', 'one task a node')}",
            fix=f"start one task: {once}{shlex.join(command)}, or train ddp on all of them",
        )
    sources = {**allocation.sources, "nproc_per_node": "single"}
    return replace(allocation, ranks_per_node=(1,), rank=0, mode="single", sources=sources)


def _by_hand(env: Environment, options: LaunchOptions, job: Hosts | None) -> Allocation:
    num_nodes, node_rank = options.num_nodes, options.node_rank
    rank_source, num_source = f"--node-rank={node_rank}", f"--nnodes={num_nodes}"
    if node_rank is None:
        node_rank = variables.number(env, "MUSTER_NODE_RANK", "MUSTER_NODE_RANK=I, from 0, another one on each node")
        rank_source = f"MUSTER_NODE_RANK={node_rank}"
        if num_nodes is None and job and job.num_nodes:
            num_nodes, num_source = job.num_nodes, job.sources["num_nodes"]
        refusals.check_variable(env, job, node_rank, rank_source)
    if num_nodes is None:
        raise MusterError(
            f"{rank_source.partition('=')[0]} needs the number of nodes",
            seen=f"{rank_source} without --nnodes",
            fix=f"--nnodes N --node-rank {node_rank}",
        )
    if node_rank >= num_nodes:
        raise MusterError(
            "the node rank must be below the number of nodes",
            seen=f"{num_source} {rank_source}",
            fix=f"--node-rank 0 to {num_nodes - 1}",
        )
    nproc = processes.per_node(env, options, job)
    hosts = job.hosts if job and len(job.hosts) == num_nodes else ()
    if not hosts and num_nodes == 1 and env.host:
        hosts = (env.host,)
    notes = [f"by hand: node rank {node_rank} of {num_nodes}, as {rank_source.partition('=')[0]} says"]
    if job and not hosts and job.num_nodes != num_nodes:
        notes.append(f"{job.scheduler} gave this job {job.num_nodes or 'unknown'} nodes; {num_source} was taken")
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
            "launcher": rank_source,
            "num_nodes": num_source,
            "node_rank": rank_source,
            "nproc_per_node": nproc.source,
        },
        notes=tuple(notes),
    )


def _alone(env: Environment, options: LaunchOptions, job: Hosts | None, command: Sequence[str]) -> Allocation:
    """No launcher started this process: right on one node, a refusal on several."""
    refusals.check_alone(env, options, job, command)
    refusals.check_nnodes(options, 1, job.sources["num_nodes"] if job else "no scheduler's variables")
    nproc = processes.per_node(env, options, job)
    return Allocation(
        scheduler=job.scheduler if job else "local",
        launcher="local",
        job_id=job.job_id if job else None,
        attempt=job.attempt if job else 0,
        step=0,
        hosts=job.hosts if job and job.hosts else ((env.host,) if env.host else ()),
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
    belongs_to = {launcher.name: launcher.scheduler for launcher in launchers.DETECTORS}.get(task.launcher)
    if job is None and belongs_to:
        raise MusterError(
            f"{task.launcher} started this process, but its scheduler's variables are not there",
            seen=task.sources["launcher"],
            fix=f"don't unset the scheduler's variables; {container.way_in(env.engine)}",
        )
    num_nodes = len(task.tasks_per_node)
    refusals.check_nnodes(options, num_nodes, task.sources["num_nodes"])
    refusals.check_hosts(env, job, task)
    refusals.check_all_nodes(options, job, task)
    notes = list(task.notes)
    if job and job.num_nodes and num_nodes < job.num_nodes:
        notes.append(f"this step uses {num_nodes} of the job's {job.num_nodes} nodes")
    if num_nodes > 1 and not task.hosts and job and job.problem and not env.get("MASTER_ADDR"):
        notes.append(f"{job.problem.wrong}; {job.problem.fix}")
    if max(task.tasks_per_node) == 1:
        nproc = processes.per_node(env, options, job)
        mode = _mode_of_agents(num_nodes, nproc)
        ranks_per_node, rank = (nproc.count,) * num_nodes, task.node_rank * nproc.count
        nproc_source = nproc.source
    else:
        refusals.check_one_task_a_node(options, job, task, command)
        mode, ranks_per_node, rank = "worker", task.tasks_per_node, task.rank
        nproc_source = task.sources["tasks_on_node"]
    local = {"scheduler": "no scheduler's variables", "job_id": f"{task.launcher}'s own"}
    return Allocation(
        scheduler=job.scheduler if job else "local",
        launcher=task.launcher,
        job_id=(job.job_id if job else None) or task.job_id,
        attempt=job.attempt if job else 0,
        step=task.step,
        hosts=task.hosts,
        num_nodes=num_nodes,
        node_rank=task.node_rank,
        local_rank=task.local_rank,
        rank=rank,
        tasks_on_node=task.tasks_on_node,
        ranks_per_node=ranks_per_node,
        mode=mode,
        cpus_on_node=job.cpus_on_node if job else None,
        sources={**(job.sources if job else local), **task.sources, "nproc_per_node": nproc_source},
        notes=tuple(notes),
    )


def _mode_of_agents(num_nodes: int, nproc: Nproc) -> Mode:
    return "single" if num_nodes == 1 and nproc.count == 1 else "agent"
