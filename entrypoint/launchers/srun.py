"""srun: which task of a Slurm step this process is.

A task is recognised by SLURM_STEP_ID. Neither SLURM_PROCID nor SLURM_LOCALID will do: the batch script, which is no
task, has both, as 0. All values are the step's and not the job's: a step may have fewer nodes and tasks.

Source: https://slurm.schedmd.com/srun.html#SECTION_OUTPUT-ENVIRONMENT-VARIABLES
"""

from collections.abc import Mapping

from entrypoint import variables
from entrypoint.allocation import Hosts, Task
from entrypoint.environment import Environment
from entrypoint.schedulers import slurm
from train.errors import MusterError

FIX = "start the command by srun inside the job: `srun --ntasks-per-node=1 -n $SLURM_NNODES train ddp`"

# Slurm's reserved step ids, from 0xfffffffb downwards: batch script, external step, interactive step, pending.
# `salloc` gives its shell the interactive step: one task, whatever the job's size. It is a shell, not a launch.
_FIRST_RESERVED_STEP = 0xFFFFFFF0


def detect(env: Environment, job: Hosts | None) -> Task | None:
    """The task of a step that this process is, or None outside a step. The step tells all of it, the `job` nothing.

    Raises:
        MusterError: the step's variables are incomplete or contradict each other.
    """
    if "SLURM_STEP_ID" not in env:
        return None
    step = variables.number(env, "SLURM_STEP_ID", FIX)
    if step >= _FIRST_RESERVED_STEP:
        return None
    _check_step_is_of_this_job(env)
    hosts = _hosts(env)
    tasks_per_node = variables.counts(env, "SLURM_STEP_TASKS_PER_NODE", FIX)
    num_nodes = variables.number(env, "SLURM_STEP_NUM_NODES", FIX)
    num_tasks = variables.number(env, "SLURM_STEP_NUM_TASKS", FIX)
    node_rank = variables.number(env, "SLURM_NODEID", FIX)
    local_rank = variables.number(env, "SLURM_LOCALID", FIX)
    rank = variables.number(env, "SLURM_PROCID", FIX)
    _agree(len(hosts) == num_nodes, env, "the number of nodes", "SLURM_STEP_NODELIST", "SLURM_STEP_NUM_NODES")
    _agree(
        len(tasks_per_node) == num_nodes, env, "the number of nodes", "SLURM_STEP_TASKS_PER_NODE", "SLURM_STEP_NODELIST"
    )
    _agree(
        sum(tasks_per_node) == num_tasks,
        env,
        "the number of tasks",
        "SLURM_STEP_TASKS_PER_NODE",
        "SLURM_STEP_NUM_TASKS",
    )
    _agree(node_rank < num_nodes, env, "this node's index", "SLURM_NODEID", "SLURM_STEP_NODELIST")
    _agree(
        local_rank < tasks_per_node[node_rank],
        env,
        "this task's place on its node",
        "SLURM_LOCALID",
        "SLURM_STEP_TASKS_PER_NODE",
    )
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


def _check_step_is_of_this_job(env: Mapping[str, str]) -> None:
    # srun sets both to the same. sbatch sets the first anew, and leaves the second as the submitting shell had it.
    if env.get("SLURM_TASKS_PER_NODE", env.get("SLURM_STEP_TASKS_PER_NODE")) != env.get("SLURM_STEP_TASKS_PER_NODE"):
        raise MusterError(
            "the SLURM_STEP_ variables are left over from a step inside of which this job was submitted",
            seen=variables.seen(env, "SLURM_TASKS_PER_NODE", "SLURM_STEP_TASKS_PER_NODE"),
            fix=FIX,
        )


def _hosts(env: Mapping[str, str]) -> tuple[str, ...]:
    """The step's nodes in the order that SLURM_NODEID counts them."""
    listed = variables.hosts(env, "SLURM_STEP_NODELIST", FIX)
    by_group = tuple(host for host in slurm.heterogeneous_hosts(env) if host in set(listed))
    return by_group if len(by_group) == len(listed) else listed


def _check_ranks_of_node(env: Mapping[str, str], rank: int, local_rank: int, num_local: int) -> None:
    # SLURM_GTIDS=0,2 holds the ranks of all tasks on this node. With `-m cyclic` they are no contiguous block, so the
    # rank is never computed from node and local rank, only checked against this list.
    if "SLURM_GTIDS" not in env:
        return
    words = env["SLURM_GTIDS"].split(",")
    _agree(
        len(words) == num_local and words[local_rank] == str(rank),
        env,
        "the ranks on this node",
        "SLURM_GTIDS",
        "SLURM_PROCID",
        "SLURM_LOCALID",
        "SLURM_STEP_TASKS_PER_NODE",
    )


def _agree(holds: bool, env: Mapping[str, str], what: str, *names: str) -> None:
    if not holds:
        seen = " ".join(f"{name}={env.get(name, '')}" for name in names)
        raise MusterError(f"Slurm's variables disagree on {what}", seen=seen, fix=FIX)
