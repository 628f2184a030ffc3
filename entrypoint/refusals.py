"""What detection refuses: each of these would start a world of the wrong shape, or several worlds in place of one."""

import re
import shlex
from collections.abc import Sequence

from entrypoint import container, hostlist, launchers, variables
from entrypoint.allocation import Hosts, Task
from entrypoint.environment import Environment
from entrypoint.options import LaunchOptions
from train.errors import MusterError


def check_variable(env: Environment, job: Hosts | None, node_rank: int, source: str) -> None:
    """Returns if MUSTER_NODE_RANK can be this node's: a variable that all tasks inherit is a mistake easily made.

    Raises:
        MusterError: it is another node's, or stands for several processes.
    """
    own = variables.own_index(job.hosts, env, source, "give each node its own MUSTER_NODE_RANK") if job else None
    if own not in (None, node_rank):
        raise MusterError(
            f"MUSTER_NODE_RANK says node rank {node_rank}, but this host is the one with {own}",
            seen=f"{source} on {env.host}; {job.sources['hosts'] if job else ''}",
            fix="give each node its own MUSTER_NODE_RANK, or leave it out where MUSTER_HOSTS is set",
        )
    try:
        task, _ = launchers.detect(env, job)
    except MusterError:
        return
    if task and task.tasks_on_node > 1:
        raise MusterError(
            f"MUSTER_NODE_RANK stands for one process a node, and {task.launcher} started {task.tasks_on_node} here",
            seen=f"{source} {task.sources['tasks_on_node']}",
            fix="unset MUSTER_NODE_RANK",
        )


def check_alone(env: Environment, options: LaunchOptions, job: Hosts | None, command: Sequence[str]) -> None:
    """Returns if a process that no launcher started is alone: one node, and no trace of others.

    Raises:
        MusterError: there are several nodes, or their number is not known.
    """
    if job is None:
        places = [name for name in ("WORLD_SIZE", "PET_NNODES") if env.get(name, "1") != "1"]
        places += [name for name in env if re.fullmatch(r"JOB_COMPLETION_INDEX|VC_\w+_HOSTS|V[CK]_TASK_INDEX", name)]
        if places and options.num_nodes != 1:
            raise MusterError(
                "these variables speak of several processes, but nothing tells who started this one",
                seen=variables.seen(env, "RANK", "LOCAL_RANK", "PET_NODE_RANK", *places),
                fix=f"unset {' '.join(places)}; or --nnodes N --node-rank I --master-addr HOST on each node",
            )
        return
    if job.num_nodes is None:
        if options.num_nodes == 1:
            return
        problem = job.problem
        raise MusterError(
            f"how many nodes this job of {job.scheduler} has can't be told{f': {problem.wrong}' if problem else ''}",
            seen=problem.seen if problem else job.sources["num_nodes"],
            fix=f"{problem.fix if problem else job.launch}; or, if it is but one node, --nnodes 1",
        )
    if job.num_nodes > 1:
        raise MusterError(
            f"{job.scheduler} gave this job {job.num_nodes} nodes, but nothing started this process on each of them",
            seen=f"{job.sources['num_nodes']}, {job.sources['hosts']}, and no task of a launcher",
            fix=job.launch_line(command),
        )
    # PBS leaves the script's own host out of its list where the first chunk has mpiprocs=0: then there are two.
    if (
        job.scheduler in ("pbs", "grid_engine")
        and env.host
        and hostlist.short(env.host) != hostlist.short(job.hosts[0])
    ):
        raise MusterError(
            f"{job.scheduler} lists {job.hosts[0]} only, and this is {env.host}",
            seen=f"{job.sources['hosts']}: {job.hosts[0]}",
            fix=f"to use this host alone: MUSTER_HOSTS={env.host} {shlex.join(command)}",
        )


def check_traces(env: Environment, options: LaunchOptions, task: Task | None) -> None:
    """Returns if a process without a scheduler's variables is not in a container inside of a job.

    Raises:
        MusterError: it is: the job's other processes would be as alone as this one.
    """
    if not env.is_live or env.engine is None or options.num_nodes == 1:
        return
    if task and len(task.tasks_per_node) > 1:
        return
    traces = container.read(container.PROC)
    found = traces.first
    # Inside the container mpirun may have started this process: that is no trace of a launcher outside.
    if found is None or (task and found.owner not in container.SCHEDULERS):
        return
    raise MusterError(
        f"this container is inside a job of {found.owner}, but none of its variables reached it",
        seen=f"{found.seen}, and this is a container of {env.engine}",
        fix=f"{container.way_in(env.engine, traces.is_own_pid_namespace)}; or, if it is but one node, --nnodes 1",
    )


def check_nnodes(options: LaunchOptions, num_nodes: int, source: str) -> None:
    """Returns if --nnodes, where given, is what was found.

    Raises:
        MusterError: it is not.
    """
    if options.num_nodes is not None and options.num_nodes != num_nodes:
        raise MusterError(
            f"--nnodes says {options.num_nodes}, but here it is {num_nodes}, and nothing tells which node this is",
            seen=f"--nnodes={options.num_nodes}; {source}",
            fix=f"--nnodes {options.num_nodes} --node-rank I --master-addr HOST on each node, or leave --nnodes out",
        )


def check_all_nodes(options: LaunchOptions, job: Hosts | None, task: Task) -> None:
    """Returns if an MPI launch covers all nodes of the job, or the user says that it need not.

    Raises:
        MusterError: it covers fewer. Left-over variables of a small launch look just like that.
    """
    num_nodes = len(task.tasks_per_node)
    by_count = {launcher.name for launcher in launchers.DETECTORS if launcher.scheduler is None} | {"jsrun"}
    # The first of the hosts that LSF gives a job for jsrun may be the launch node.
    missing = (job.num_nodes or 0) - num_nodes - (task.launcher == "jsrun") if job else 0
    if job and missing > 0 and task.launcher in by_count and options.num_nodes != num_nodes:
        raise MusterError(
            f"{task.launcher} uses {num_nodes} of the job's {job.num_nodes} nodes, or its variables are left over",
            seen=f"{task.sources['num_nodes']}, {job.sources['num_nodes']}",
            fix=f"start it on all nodes; if fewer are meant: --nnodes {num_nodes}",
        )


def check_hosts(env: Environment, job: Hosts | None, task: Task) -> None:
    """Returns if the task's nodes are the job's, and its node is this one.

    Raises:
        MusterError: the variables were made for another job or another node.
    """
    strangers: list[str] = []
    if job and job.hosts and task.hosts != job.hosts:
        listed = {hostlist.short(host) for host in job.hosts}
        strangers = [host for host in task.hosts if hostlist.short(host) not in listed]
    if strangers and job:
        raise MusterError(
            f"the step runs on {strangers[0]}, which is no node of the job: variables of two jobs are mixed",
            seen=f"{task.sources['hosts']}, {job.sources['hosts']}",
            fix="start the command from a shell or script of one job only",
        )
    # A host name that differs from the scheduler's is common (aliases, suffixes). One that belongs to another node of
    # the same job is not: then these variables were made for a process over there.
    own = variables.own_index(task.hosts, env, task.sources["node_rank"], "start the command from a fresh shell")
    if own not in (None, task.node_rank):
        raise MusterError(
            f"the variables say node rank {task.node_rank}, but this host is the one with {own}",
            seen=f"{task.sources['node_rank']} on {env.host}; {task.sources['hosts']}",
            fix=f"start the command by {task.launcher} itself, not by ssh out of one of its tasks",
        )


def check_one_task_a_node(options: LaunchOptions, job: Hosts | None, task: Task, command: Sequence[str]) -> None:
    """Returns if the user does not ask tasks that are ranks already to start ranks.

    Raises:
        MusterError: the user does.
    """
    if options.nproc_per_node is None:
        return
    line = job.launch_line(command) if job else "start one task a node"
    raise MusterError(
        f"{task.launcher} started {max(task.tasks_per_node)} tasks on a node, and --nproc-per-node asks each to start "
        f"{options.nproc_per_node} more; torchrun wants one task a node",
        seen=f"{task.sources['tasks_on_node']} --nproc-per-node={options.nproc_per_node}",
        fix=f"{line}, or leave --nproc-per-node out: each task is a rank",
    )
