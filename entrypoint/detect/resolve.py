"""The Allocation of this process, from its Job and its Task; or the refusal of a world of the wrong shape."""

import re
from collections.abc import Sequence
from dataclasses import replace

from muster.entrypoint import resources
from muster.entrypoint.detect import families, hostlist, manual, traces
from muster.entrypoint.detect.allocation import NO_SCHEDULER, Allocation, Job, Task, with_command
from muster.entrypoint.detect.reader import Reader
from muster.entrypoint.environment import Environment
from muster.entrypoint.options import LaunchOptions
from muster.errors import MusterError
from muster.paths import text_of
from muster.variables import LaunchVariable


def resolve(env: Environment, options: LaunchOptions, command: Sequence[str], *, is_single: bool = False) -> Allocation:
    """The place of this process in its job.

    Args:
        command: what the user typed, for the launch line in an error.
        is_single: whether the command runs in one process, whatever is allocated.

    Raises:
        MusterError: the environment contradicts itself or the options, or several nodes are allocated and nothing
            shows which of them this is: never a silent world of one.
    """
    try:
        found = _resolve(env, options, is_single=is_single)
    except MusterError as refusal:
        # The code that raised it does not know the command.
        refusal.fix = with_command(refusal.fix, command)
        raise
    return replace(found, notes=tuple(with_command(note, command) for note in found.notes))


def _resolve(env: Environment, options: LaunchOptions, *, is_single: bool) -> Allocation:
    """The allocation, with placeholders such as `{command}` in its notes and errors, see `with_command`."""
    run_id = env.get("TORCHELASTIC_RUN_ID")
    # A launch without an agent sets this for its rank too, and lists it in RANK_VARIABLES.
    if run_id is not None and f"TORCHELASTIC_RUN_ID={run_id}" not in env.get(LaunchVariable.RANK_VARIABLES, "").split():
        raise MusterError(
            "torchrun started this process already: a second torchrun inside it would start ranks of its own",
            seen=f"TORCHELASTIC_RUN_ID={run_id}",
            fix="start it without torchrun: {command}; or, if this shell or job was only started from "
            "inside torchrun: unset TORCHELASTIC_RUN_ID RANK LOCAL_RANK WORLD_SIZE MASTER_ADDR MASTER_PORT",
        )
    is_by_hand = options.node_rank is not None or "MUSTER_NODE_RANK" in env
    try:
        job, rejected = families.find_job(env)
    except MusterError as refusal:
        # The user's options complete the variables, as in a pod with WORLD_SIZE=8 alone, or after ssh into a Slurm job.
        if not is_by_hand or options.num_nodes is None:
            raise
        job, rejected = (manual.listed(env) if "MUSTER_HOSTS" in env else NO_SCHEDULER), (refusal.wrong,)
    scheduler = job.scheduler
    if is_by_hand:
        scheduler = "manual" if job is NO_SCHEDULER else scheduler
        task = _task_by_hand(env, options, job)
    else:
        task, losers = families.find_task(env, job)
        rejected += losers
        traced = _check_traces(env, options, task) if job is NO_SCHEDULER and not is_single else ()
        if task:
            task = _task_of_launcher(env, options, job, task, is_single=is_single)
        else:
            task = _task_without_launcher(env, options, job, is_one_node=is_single or options.num_nodes == 1)
        task = replace(task, notes=traced + task.notes)
        # Launchers set LOCAL_RANK beside a size. A size alone may be one that the user set for a script.
        if task.tasks_on_node == 1 and "LOCAL_RANK" in env:
            Reader(env, "").check_inner_launcher("job")
    if is_single:
        _check_single(task)
    if job.scheduler != "kubernetes" and (unused := Reader(env, "").seen("RANK", "WORLD_SIZE")):
        rejected += (f"{unused}: set by hand or left over, not used",)
    if "MUSTER_HOSTS" in env:
        note = f"MUSTER_HOSTS={env['MUSTER_HOSTS'][:200]} is yours and is used, hosts: {len(job.hosts)}"
        task = replace(task, notes=(note, *task.notes))
    of_launcher = {} if job.job_id or not task.job_id else {"job_id": f"{task.launcher}'s own"}
    # With one task a node each task is an agent, which starts the node's ranks; with several each is a rank.
    if max(task.tasks_per_node) > 1:
        mode, ranks_per_node, rank = "worker", task.tasks_per_node, task.rank
        source = task.sources["tasks_on_node"]
    else:
        nproc, source = (1, "single") if is_single else resources.processes_per_node(env, options, job)
        # Only an agent can restart a rank.
        mode = "single" if task.num_nodes == nproc == 1 and (is_single or not options.num_restarts) else "agent"
        ranks_per_node, rank = (nproc,) * task.num_nodes, task.node_rank * nproc
    sources = {**job.sources, **task.sources, **of_launcher, "nproc_per_node": source}
    return Allocation(
        **vars(replace(task, rank=rank, job_id=job.job_id or task.job_id, sources=sources)),
        job=job,
        scheduler=scheduler,
        attempt=job.attempt,
        ranks_per_node=ranks_per_node,
        mode=mode,
        gpus_seen=resources.gpus(env, job.gpus_on_node)[0],
        rejected=rejected,
    )


def _task_by_hand(env: Environment, options: LaunchOptions, job: Job) -> Task:
    """The only task of this node, whose node rank the user set by --node-rank or MUSTER_NODE_RANK."""
    num_nodes, node_rank = options.num_nodes, options.node_rank
    name, num_source = "--node-rank", f"--nnodes={num_nodes}"
    if node_rank is None:
        name = "MUSTER_NODE_RANK"
        node_rank = Reader(env, "MUSTER_NODE_RANK=I, from 0, another one on each node").number(name)
        if num_nodes is None and job.num_nodes:
            num_nodes, num_source = job.num_nodes, job.sources["num_nodes"]
    _check_number(env, job, name, node_rank, num_nodes)
    rank_source = f"{name}={node_rank}"
    if num_nodes is None:
        wrong = f"{name} needs the number of nodes"
        raise MusterError(wrong, seen=f"{rank_source} without --nnodes", fix=f"--nnodes N --node-rank {node_rank}")
    if node_rank >= num_nodes:
        wrong = "the node rank must be below the number of nodes"
        raise MusterError(wrong, seen=f"{num_source} {rank_source}", fix=f"--node-rank 0 to {num_nodes - 1}")
    alone = (env.host,) if num_nodes == 1 and env.host else ()
    hosts = job.hosts if len(job.hosts) == num_nodes else alone
    notes = (f"by hand: node rank {node_rank} of {num_nodes}, as {name} says",)
    if not hosts and job.num_nodes not in (None, num_nodes):
        notes += (f"{job.scheduler} gave this job {job.num_nodes} nodes; {num_source} is used",)
    sources = {"launcher": rank_source, "num_nodes": num_source, "node_rank": rank_source}
    return Task.one_a_node("manual", node_rank, num_nodes, hosts, sources, notes)


def _task_without_launcher(env: Environment, options: LaunchOptions, job: Job, *, is_one_node: bool) -> Task:
    """The task of a process that no launcher started: accepted on one node, or where one is asked for; else refused."""
    sources = {"launcher": "no launcher's variables"}
    notes: tuple[str, ...] = ()
    hosts = job.hosts or ((env.host,) if env.host else ())
    fix = f"by its launcher: {job.launch}"
    own = Reader(env, fix).own_index(job.hosts, job.sources["hosts"]) if is_one_node else None
    _check_leftovers(env, options, job)
    if job is NO_SCHEDULER:
        sources |= {"num_nodes": "one machine", "hosts": "this host's name"}
        # In a user's own loop over the nodes, the first one's NODE_RANK=0 looks like that of a machine by itself.
        names, host = ["NODE_RANK"], env.get("MASTER_ADDR", "")
        if not re.match(r"$|localhost|127\.|\[?::1|0\.0", host) and Reader(env, "").own_index((host,), host) is None:
            names.append("MASTER_ADDR")
        set_by_hand = Reader(env, "").seen(*names) if env.keys().isdisjoint({"WORLD_SIZE", *manual.NUMBERS}) else ""
        if set_by_hand and not is_one_node:
            by_hand = "--nnodes N --node-rank I --master-addr HOST"
            notes = (f"{set_by_hand} gives no number of nodes: one is assumed; for several, on each: {by_hand}",)
    elif own is not None and len(hosts) > 1:
        hosts = (hosts[own],)
        sources |= {"num_nodes": "--nnodes=1" if options.num_nodes == 1 else "single", "hosts": "this host"}
        notes = (f"this uses 1 of the job's {job.num_nodes} nodes",)
    else:
        _check_one_node(env, job, is_one_node=is_one_node)
    notes += _check_nnodes(options, 1, job.sources["num_nodes"], is_known=job is not NO_SCHEDULER)
    return Task.one_a_node("local", 0, 1, hosts, sources, notes)


def _task_of_launcher(env: Environment, options: LaunchOptions, job: Job, task: Task, *, is_single: bool) -> Task:
    """The `task` that a launcher started, checked against the job and the options, with further notes."""
    task = replace(task, sources={**job.sources, **task.sources})
    notes = task.notes + _check_nnodes(options, task.num_nodes, task.sources["num_nodes"])
    _check_hosts(env, job, task)
    _check_all_nodes(env, options, job, task, is_single=is_single)
    if max(task.tasks_per_node) > 1 and options.nproc_per_node is not None:
        line = "start one task a node" if job is NO_SCHEDULER else job.launch
        raise MusterError(
            f"{task.launcher} started {max(task.tasks_per_node)} tasks on a node, and {options.nproc_name} asks each "
            f"to start {options.nproc_per_node} more; torchrun needs one task a node",
            seen=f"{task.sources['tasks_on_node']} {options.nproc_name}={options.nproc_per_node}",
            fix=f"{line}, or leave {options.nproc_name} out: each task is a rank",
        )
    if _num_unused(job, task) > 0:
        notes += (f"this step uses {task.num_nodes} of the job's {job.num_nodes} nodes",)
    if task.num_nodes > 1 and not task.hosts and job.problem and not env.get("MASTER_ADDR"):
        notes += (f"{job.problem.wrong}; {job.problem.fix}",)
    return replace(task, notes=notes)


# What is refused: each of these would start a world of the wrong shape, or several worlds in place of one.


def _check_number(env: Environment, job: Job, name: str, node_rank: int, num_nodes: int | None) -> None:
    """Refuses a MUSTER_NODE_RANK of another host, or a node rank ($SLURM_NODEID) that several tasks of a node share."""
    source, is_variable = f"{name}={node_rank}", name == "MUSTER_NODE_RANK"
    fix = "give each node its own MUSTER_NODE_RANK, or leave it out where MUSTER_HOSTS is set"
    own = Reader(env, fix).own_index(job.hosts, source) if is_variable else None
    if own not in (None, node_rank):
        wrong = f"MUSTER_NODE_RANK says node rank {node_rank}, but this host has node rank {own}"
        raise MusterError(wrong, seen=f"{source} on {env.host}; {job.sources['hosts']}", fix=fix)
    try:
        task, _ = families.find_task(env, job)
    except MusterError:
        return
    if task and task.tasks_on_node > 1 and (is_variable or 1 < task.num_nodes == num_nodes):
        wrong = f"{name} is for one process a node, and {task.launcher} started {task.tasks_on_node} here"
        fix = f"unset {name}" if is_variable else f"leave out {name} and --nproc-per-node: each task is a rank"
        raise MusterError(wrong, seen=f"{source} {task.sources['tasks_on_node']}", fix=fix)


def _check_single(task: Task) -> None:
    """Refuses several tasks of a command for one process: each would train alone, and write over the others' files."""
    if sum(task.tasks_per_node) > 1:
        once = "srun --nodes=1 --ntasks=1 " if task.launcher == "srun" else "in the job script, by itself: "
        raise MusterError(
            f"this command runs in one process, and {task.launcher} started {sum(task.tasks_per_node)}",
            seen=f"{task.sources['num_nodes']}, {task.sources['tasks_on_node']}",
            fix=f"start it once: {once}{{command}}; or train ddp on all of them",
        )


def _check_leftovers(env: Environment, options: LaunchOptions, job: Job) -> None:
    """Refuses a process that no known launcher started, but whose variables say that it is one of several.

    HPE's mpiexec_mpt and Cray's aprun set a rank, but neither the number of processes nor their hosts; horovodrun sets
    no hosts; PRRTE's prterun sets PMIx's variables only. In a scheduler's job only the variables of the first three
    count: all others may come from the shell in which it was submitted.

    Source: https://github.com/radical-cybertools/radical.pilot (agent/launch_method/mpirun.py: MPT_MPI_RANK)
    Source: https://docs.openpmix.org/en/latest/ (PMIX_RANK)
    """
    if options.num_nodes == 1:
        return
    places = [name for name in ("ALPS_APP_PE", "MPT_MPI_RANK") if name in env]
    places += ["HOROVOD_SIZE"] if env.get("HOROVOD_SIZE", "1") != "1" else []
    if job is NO_SCHEDULER:
        places += [name for name in ("WORLD_SIZE", "PET_NNODES", *manual.NUMBERS) if env.get(name, "1") != "1"]
        places += [name for name in ("RANK", "NODE_RANK", "PET_NODE_RANK") if env.get(name, "0") != "0"]
        places += [name for name, several in manual.LISTS.items() if re.search(several, env.get(name, ""))]
        places = [name for name in places if env.get(manual.IGNORED_IF_ONE.get(name, "")) != "1"]
        if env.is_live and "TRAINING_JOB_NAME" in env and re.search(r'"hosts":\s*\[[^\]]*,', text_of(manual.SAGEMAKER)):
            places += ["TRAINING_JOB_NAME"]
        for name in manual.TEXT_FILES:
            fix = f"MUSTER_HOSTS=$(awk '{{print $1}}' ${name} | sort -u | paste -sd,) on each node; for one: --nnodes 1"
            # A line for each host; OAR's file has one for each core, and in Donau's the host is the first word.
            hosts = re.findall(r"^[ \t]*(\S+)", Reader(env, fix).text_file(name), re.MULTILINE) if env.get(name) else ()
            places += [name] if len(set(hosts)) > 1 else []
        others = r"PMIX_RANK|JOB_COMPLETION_INDEX|K_MPI_JOB_ROLE|LWS_WORKER_INDEX|VC_\w+_HOSTS|V[CK]_TASK_INDEX"
        places += [name for name in env if re.fullmatch(others, name)]
    if places:
        raise MusterError(
            "these variables describe several processes or nodes, but nothing shows which of them this is",
            seen=Reader(env, "").seen("RANK", "LOCAL_RANK", "PET_NODE_RANK", *places),
            fix="on each node: --nnodes N --node-rank I --master-addr HOST; or, if it is but one node, --nnodes 1; or "
            f"unset {' '.join(places)}, if left over",
        )


def _check_one_node(env: Environment, job: Job, *, is_one_node: bool) -> None:
    """Refuses a process that no launcher started, in a job that has several nodes or does not have this one.

    Where one node is asked for, a job with an unknown number of nodes is accepted.
    """
    if job.num_nodes is None:
        if is_one_node:
            return
        problem = job.problem
        raise MusterError(
            f"the number of nodes of this {job.scheduler} job is unknown{f': {problem.wrong}' if problem else ''}",
            seen=problem.seen if problem else job.sources["num_nodes"],
            fix=f"{problem.fix if problem else job.launch}; or, if it is but one node, --nnodes 1",
        )
    if job.num_nodes > 1 and is_one_node:
        raise MusterError(
            f"this host, {env.host}, is none of the {job.num_nodes} nodes that {job.scheduler} gave this job",
            seen=f"{job.sources['hosts']}: {' '.join(job.hosts[:20])}",
            fix=job.launch_one or f"on {job.hosts[0]}: {{command}}",
        )
    if job.num_nodes > 1:
        fix = job.launch
        if families.is_task_of_worker(env):
            fix = "on this node alone: --nnodes 1"
            if job.scheduler == "slurm" and "HQ_TASK_ID" in env:
                on_nodes = "srun --nodefile=$HQ_NODE_FILE --nodes=$HQ_NUM_NODES --ntasks-per-node=1"
                fix += f"; on each node of the task: {on_nodes} env -u HQ_TASK_ID {{command}}"
        raise MusterError(
            f"{job.scheduler} gave this job {job.num_nodes} nodes, but nothing started this process on each of them",
            seen=f"{job.sources['num_nodes']}, {job.sources['hosts']}, and no task of a launcher",
            fix=fix,
        )
    # PBS leaves the script's own host out of its list where the first chunk has mpiprocs=0: the job has two hosts then.
    if job.hosts and env.host and not job.is_host_certain and hostlist.short(env.host) != hostlist.short(job.hosts[0]):
        alone = f"MUSTER_HOSTS={env.host} {{command}}; or {{start}} --nnodes 1 --node-rank 0{{rest}}"
        raise MusterError(
            f"{job.scheduler} lists only {job.hosts[0]}, but this host is {env.host}",
            seen=f"{job.sources['hosts']}: {job.hosts[0]}",
            fix=job.launch if job.launch_one else f"to use this host alone: {alone}",
        )


def _check_traces(env: Environment, options: LaunchOptions, task: Task | None) -> tuple[str, ...]:
    """Refuses a process in a container that the variables of the job around it did not reach; else returns notes."""
    if not env.is_live or options.num_nodes == 1 or (task and task.num_nodes > 1):
        return ()
    found = traces.read(is_container=env.engine is not None)
    # Inside the container mpirun may have started this process: that is no trace of a launcher outside.
    if found is None or (task and found.owner not in families.schedulers()):
        return ()
    if env.engine is None:
        return (f"starts alone, though {found.seen} is {found.owner}'s: sudo or env -i may have removed its variables",)
    raise MusterError(
        f"this container is inside a job of {found.owner}, but none of the job's variables reached it",
        seen=f"{found.seen}, and this is a container of {env.engine}",
        fix=f"{env.way_in()}; or, if it is but one node, --nnodes 1",
    )


def _check_nnodes(options: LaunchOptions, num_nodes: int, source: str, *, is_known: bool = True) -> tuple[str, ...]:
    """Refuses a --nnodes other than `num_nodes`; counted nodes (`is_known`) may be fewer than MAX of MIN:MAX."""
    low, high = options.min_nodes, options.num_nodes
    if high in (None, num_nodes):
        return ()
    if is_known and low is not None and low <= num_nodes < high:
        return (f"--nnodes={options.nnodes} is used as {low}:{num_nodes}, as this launch has no more nodes",)
    by_hand = f"; or by hand, on each node: --nnodes {options.nnodes} --node-rank I --master-addr HOST"
    raise MusterError(
        f"--nnodes says {options.nnodes}, but here the number of nodes is {num_nodes}",
        seen=f"--nnodes={options.nnodes}; {source}",
        fix=f"leave --nnodes out{by_hand if high > 1 else ''}",
    )


def _num_unused(job: Job, task: Task) -> int:
    """The number of the job's nodes that the launch does not use; 0 or less where it uses all, or where unknown."""
    # The first of the hosts that LSF gives a job for jsrun may be the launch node.
    return (job.num_nodes or 0) - task.num_nodes - (task.launcher == "jsrun")


def _check_all_nodes(env: Environment, options: LaunchOptions, job: Job, task: Task, *, is_single: bool) -> None:
    """Refuses a launch on fewer nodes than the job has, by counts that may be left over, unless --nnodes confirms them.

    And, except for a single process, where the user's own variables contradict the step's, as in a loop over the nodes:
    NNODES=2 NODE_RANK=1 srun --nodes=1 --nodelist=node02 train ddp
    """
    is_looped = "NODE_RANK" in env and not is_single
    own = {**dict.fromkeys(("NNODES", "NODE_COUNT", "NUM_NODES"), task.num_nodes), "NODE_RANK": task.node_rank}
    unequal = [name for name, value in own.items() if is_looped and env.get(name, "") not in ("", "0", str(value))]
    if _num_unused(job, task) > 0 and (task.counts_nodes or unequal) and options.num_nodes != task.num_nodes:
        raise MusterError(
            f"{task.launcher} uses {task.num_nodes} of the job's {job.num_nodes} nodes, or its variables are left over",
            seen=", ".join((task.sources["num_nodes"], job.sources["num_nodes"], *map(Reader(env, "").seen, unequal))),
            fix=f"start it on all nodes; if fewer are meant: --nnodes {task.num_nodes}",
        )


def _check_hosts(env: Environment, job: Job, task: Task) -> None:
    """Refuses variables that were made for another job or another node."""
    source = task.sources["hosts"]
    if job.hosts and task.hosts != job.hosts:
        listed = {hostlist.short(host) for host in job.hosts}
        if strangers := [host for host in task.hosts if hostlist.short(host) not in listed]:
            raise MusterError(
                f"the step runs on {strangers[0]}, which is no node of the job: variables of two jobs are mixed",
                seen=f"{source}, {job.sources['hosts']}",
                fix="unset MUSTER_HOSTS" if "MUSTER_HOSTS" in env else f"in a shell or script of one job: {job.launch}",
            )
    # A host name that differs from the scheduler's is common (aliases, suffixes). One that belongs to another node of
    # the same job is not: then these variables were made for a process on that node.
    own = Reader(env, "start the command from a fresh shell").own_index(task.hosts, task.sources["node_rank"])
    if own not in (None, task.node_rank):
        raise MusterError(
            f"the variables say node rank {task.node_rank}, but this host has node rank {own}",
            seen=f"{task.sources['node_rank']} on {env.host}; {source}",
            fix=f"start the command by {task.launcher} itself, not by ssh out of one of its tasks",
        )
