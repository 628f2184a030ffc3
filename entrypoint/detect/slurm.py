"""Slurm: the job's id, attempt and nodes; and which task of a step by srun this process is.

sbatch, salloc and srun all set SLURM_JOB_ID and the node list.

A task is recognised by SLURM_STEP_ID. Neither SLURM_PROCID nor SLURM_LOCALID will do: the batch script, which is no
task, has both, as 0. All of a task's values are the step's and not the job's: a step may have fewer nodes and tasks.

Source: https://slurm.schedmd.com/sbatch.html#SECTION_OUTPUT-ENVIRONMENT-VARIABLES
Source: https://slurm.schedmd.com/srun.html#SECTION_OUTPUT-ENVIRONMENT-VARIABLES
"""

from collections.abc import Mapping

from muster.entrypoint import variables
from muster.entrypoint.allocation import Hosts, Task
from muster.entrypoint.environment import Environment
from muster.errors import MusterError

FIX_JOB = (
    "start from a fresh job: `sbatch SCRIPT`, in it `srun ... train ddp`, without setting SLURM_ variables by hand"
)
FIX_TASK = "start the command by srun inside the job: `srun --ntasks-per-node=1 -n $SLURM_NNODES train ddp`"


def job(env: Mapping[str, str]) -> Hosts | None:
    """The Slurm job in `env`, or None where there is none.

    Raises:
        MusterError: its node list can't be read, or disagrees with its number of nodes.
    """
    # Any one of them is enough: a job with one variable lost must not pass for a machine without a scheduler.
    if not {"SLURM_JOB_ID", "SLURM_JOBID", "SLURM_JOB_NODELIST"} & set(env):
        return None
    job_id = variables.identifier(env, "SLURM_JOB_ID", FIX_JOB)
    # SLURM_RESTART_COUNT is unset on the first run.
    attempt = variables.optional(env, "SLURM_RESTART_COUNT", FIX_JOB) or 0
    hosts = _heterogeneous_hosts(env) or _job_hosts(env)
    return Hosts(
        scheduler="slurm",
        job_id=str(job_id),
        attempt=attempt,
        hosts=hosts,
        num_nodes=len(hosts),
        gpus_on_node=variables.optional(env, "SLURM_GPUS_ON_NODE", FIX_JOB),
        cpus_on_node=variables.optional(env, "SLURM_CPUS_ON_NODE", FIX_JOB),
        launch=_launch(env, len(hosts)),
        sources={
            "scheduler": f"SLURM_JOB_ID={job_id}",
            "job_id": f"SLURM_JOB_ID={job_id}",
            "attempt": f"SLURM_RESTART_COUNT={attempt}" if attempt else "no SLURM_RESTART_COUNT: the first run",
            "hosts": _source(env, "SLURM_JOB_NODELIST"),
            "num_nodes": _source(env, "SLURM_JOB_NUM_NODES"),
        },
    )


def _source(env: Mapping[str, str], name: str) -> str:
    if "SLURM_HET_SIZE" not in env:
        return f"{name}={env[name]}"
    return variables.seen(env, *(_of_group(env, name, group) for group in range(_num_groups(env))))


def _num_groups(env: Mapping[str, str]) -> int:
    # Slurm's own bound, MAX_HET_JOB_COMPS.
    return variables.number(env, "SLURM_HET_SIZE", FIX_JOB, most=128)


def _of_group(env: Mapping[str, str], name: str, group: int) -> str:
    """The name of the variable that holds `name` of one group of a heterogeneous job.

    Slurm 22.05 gives some tasks the old names alone, which releases before 20.02 had.

    Source: https://slurm.schedmd.com/heterogeneous_jobs.html#env_var
    """
    old_name = f"{name}_PACK_GROUP_{group}"
    return old_name if f"{name}_HET_GROUP_{group}" not in env and old_name in env else f"{name}_HET_GROUP_{group}"


def _heterogeneous_hosts(env: Mapping[str, str]) -> tuple[str, ...]:
    """The nodes of a heterogeneous job, group by group, as SLURM_NODEID counts them; empty for any other job.

    SLURM_JOB_NODELIST and SLURM_STEP_NODELIST are sorted there, and SLURM_NODEID is no index into them: with group 0 on
    node03 and group 1 on node[01-02] they say node[01-03], but node03 is the first.
    """
    if "SLURM_HET_SIZE" not in env:
        return ()
    names = [_of_group(env, "SLURM_JOB_NODELIST", group) for group in range(_num_groups(env))]
    return tuple(dict.fromkeys(host for name in names for host in variables.hosts(env, name, FIX_JOB)))


def _job_hosts(env: Mapping[str, str]) -> tuple[str, ...]:
    hosts = variables.hosts(env, "SLURM_JOB_NODELIST", FIX_JOB)
    num_nodes = variables.number(env, "SLURM_JOB_NUM_NODES", FIX_JOB)
    if len(hosts) != num_nodes:
        raise MusterError(
            f"Slurm's list of the job's nodes names {len(hosts)}, its count says {num_nodes}",
            seen=f"SLURM_JOB_NODELIST={env['SLURM_JOB_NODELIST']} SLURM_JOB_NUM_NODES={num_nodes}",
            fix=FIX_JOB,
        )
    # Outside a step SLURM_NODELIST is an old name of the same list.
    old_name = env.get("SLURM_NODELIST", env["SLURM_JOB_NODELIST"])
    if "SLURM_STEP_ID" not in env and old_name != env["SLURM_JOB_NODELIST"]:
        raise MusterError(
            "Slurm's two lists of the job's nodes differ",
            seen=f"SLURM_JOB_NODELIST={env['SLURM_JOB_NODELIST']} SLURM_NODELIST={old_name}",
            fix=FIX_JOB,
        )
    return hosts


def _launch(env: Mapping[str, str], num_nodes: int) -> str:
    if "SLURM_HET_SIZE" in env:
        # Without it srun starts on the first group only.
        groups = f"--het-group=0-{_num_groups(env) - 1}"
        return f"srun {groups} --ntasks-per-node=1 {{command}}"
    # In a job of 4 tasks `--ntasks-per-node=1` alone is ignored with a warning: the count must go with it.
    return f"srun --nodes={num_nodes} --ntasks={num_nodes} --ntasks-per-node=1 {{command}}"


# Slurm's reserved step ids, from 0xfffffffb downwards: batch script, external step, interactive step, pending.
# `salloc` gives its shell the interactive step: one task, whatever the job's size. It is a shell, not a launch.
_FIRST_RESERVED_STEP = 0xFFFFFFF0


def task(env: Environment, job: Hosts | None) -> Task | None:
    """The task of a step that this process is, or None outside a step. The step tells all of it, the `job` nothing.

    Raises:
        MusterError: the step's variables are incomplete or contradict each other.
    """
    if "SLURM_STEP_ID" not in env:
        return None
    step = variables.identifier(env, "SLURM_STEP_ID", FIX_TASK)
    if step >= _FIRST_RESERVED_STEP:
        return None
    # srun sets both to the same. sbatch sets the first anew, and leaves the second as the submitting shell had it.
    if env.get("SLURM_TASKS_PER_NODE", env.get("SLURM_STEP_TASKS_PER_NODE")) != env.get("SLURM_STEP_TASKS_PER_NODE"):
        raise MusterError(
            "the SLURM_STEP_ variables are left over from a step inside of which this job was submitted",
            seen=variables.seen(env, "SLURM_TASKS_PER_NODE", "SLURM_STEP_TASKS_PER_NODE"),
            fix=FIX_TASK,
        )
    hosts = _hosts(env)
    tasks_per_node = variables.counts(env, "SLURM_STEP_TASKS_PER_NODE", FIX_TASK)
    num_nodes = variables.number(env, "SLURM_STEP_NUM_NODES", FIX_TASK)
    num_tasks = variables.number(env, "SLURM_STEP_NUM_TASKS", FIX_TASK)
    node_rank = variables.number(env, "SLURM_NODEID", FIX_TASK)
    local_rank = variables.number(env, "SLURM_LOCALID", FIX_TASK)
    rank = variables.number(env, "SLURM_PROCID", FIX_TASK)
    nodes, tasks, local = "the number of nodes", "the number of tasks", "this task's place on its node"
    listed, counted = "SLURM_STEP_NODELIST", "SLURM_STEP_TASKS_PER_NODE"
    _agree(len(hosts) == num_nodes, env, nodes, listed, "SLURM_STEP_NUM_NODES")
    _agree(len(tasks_per_node) == num_nodes, env, nodes, counted, listed)
    _agree(sum(tasks_per_node) == num_tasks, env, tasks, counted, "SLURM_STEP_NUM_TASKS")
    _agree(node_rank < num_nodes, env, "this node's index", "SLURM_NODEID", listed)
    _agree(local_rank < tasks_per_node[node_rank], env, local, "SLURM_LOCALID", counted)
    _agree(rank < num_tasks, env, "this task's rank", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS")
    # The ranks meet on the first node. Only an order by hostfile puts rank 0 elsewhere, and only there it is seen.
    if max(tasks_per_node) > 1 and (env.get("SLURM_DISTRIBUTION") == "arbitrary" or (rank == 0 and node_rank != 0)):
        raise MusterError(
            "the tasks were placed by hand, so that rank 0 need not be on the first node, where the ranks would meet",
            seen=f"SLURM_DISTRIBUTION={env.get('SLURM_DISTRIBUTION', '')}",
            fix="leave --distribution=arbitrary and SLURM_HOSTFILE out, or start one task a node",
        )
    _check_ranks_of_node(env, rank, local_rank, tasks_per_node[node_rank])
    return Task(
        launcher="srun",
        node_rank=node_rank,
        local_rank=local_rank,
        rank=rank,
        tasks_per_node=tasks_per_node,
        hosts=hosts,
        step=step,
        sources={
            "launcher": f"SLURM_STEP_ID={step}",
            "hosts": f"SLURM_STEP_NODELIST={env['SLURM_STEP_NODELIST']}",
            "num_nodes": f"SLURM_STEP_NUM_NODES={num_nodes}",
            "node_rank": f"SLURM_NODEID={node_rank}",
            "local_rank": f"SLURM_LOCALID={local_rank}",
            "rank": f"SLURM_PROCID={rank}",
            "tasks_on_node": f"SLURM_STEP_TASKS_PER_NODE={env['SLURM_STEP_TASKS_PER_NODE']}",
        },
    )


def _hosts(env: Mapping[str, str]) -> tuple[str, ...]:
    """The step's nodes in the order that SLURM_NODEID counts them."""
    listed = variables.hosts(env, "SLURM_STEP_NODELIST", FIX_TASK)
    own = set(listed)
    by_group = tuple(host for host in _heterogeneous_hosts(env) if host in own)
    return by_group if len(by_group) == len(listed) else listed


def _check_ranks_of_node(env: Mapping[str, str], rank: int, local_rank: int, num_local: int) -> None:
    # SLURM_GTIDS=0,2 holds the ranks of all tasks on this node. With `-m cyclic` they are no contiguous block, so the
    # rank is never computed from node and local rank, only checked against this list.
    if "SLURM_GTIDS" not in env:
        return
    words = env["SLURM_GTIDS"].split(",")
    names = ("SLURM_GTIDS", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE")
    _agree(len(words) == num_local and words[local_rank] == str(rank), env, "the ranks on this node", *names)


def _agree(holds: bool, env: Mapping[str, str], what: str, *names: str) -> None:
    if not holds:
        seen = " ".join(f"{name}={env.get(name, '')}" for name in names)
        raise MusterError(f"Slurm's variables disagree on {what}", seen=seen, fix=FIX_TASK)
