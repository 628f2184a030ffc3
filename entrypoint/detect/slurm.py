"""Slurm: the job of sbatch or salloc, and this process's task of srun.

Every process of a job has SLURM_JOB_ID and the job's nodes. Only a task has SLURM_STEP_ID: the batch script has
SLURM_PROCID=0 and SLURM_LOCALID=0 too, and is no task. The variables of the step describe a task, not those of the job:
a step may have fewer nodes and tasks.

    SLURM_JOB_ID=9 SLURM_JOB_NODELIST=node[01-02] SLURM_JOB_NUM_NODES=2
    SLURM_STEP_ID=0 SLURM_STEP_NODELIST=node[01-02] SLURM_STEP_TASKS_PER_NODE=2(x2) SLURM_NODEID=1 SLURM_PROCID=3

Source: https://slurm.schedmd.com/sbatch.html#SECTION_OUTPUT-ENVIRONMENT-VARIABLES
Source: https://slurm.schedmd.com/srun.html#SECTION_OUTPUT-ENVIRONMENT-VARIABLES
Source: https://github.com/ParaStation/psmgmt/blob/master/plugins/psslurm/src/psslurm/psslurmenv.c
"""

import os
import re
from contextlib import suppress
from itertools import chain

from muster.entrypoint.detect.allocation import Job, Task
from muster.entrypoint.detect.hostlist import MAX_ID, short, whole_number
from muster.entrypoint.detect.reader import Reader
from muster.entrypoint.environment import Environment
from muster.errors import MusterError

VARIABLES = (
    "SLURM_CPUS_ON_NODE", "SLURM_CPUS_PER_TASK", "SLURM_DISTRIBUTION", "SLURM_EXPORT_ENV", "SLURM_GPUS_ON_NODE",
    "SLURM_GPUS_PER_TASK", "SLURM_GTIDS", "SLURM_HET_SIZE", "SLURM_JOBID", "SLURM_JOB_END_TIME", "SLURM_JOB_ID",
    "SLURM_JOB_ID_HET_GROUP_0", "SLURM_JOB_NODELIST", "SLURM_JOB_NUM_NODES", "SLURM_JOB_RESTART_COUNT",
    "SLURM_JOB_START_TIME", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_NODELIST", "SLURM_NTASKS", "SLURM_NTASKS_PER_GPU",
    "SLURM_PROCID", "SLURM_PTY_PORT", "SLURM_RESTART_COUNT", "SLURM_STEP_ID", "SLURM_STEP_NODELIST",
    "SLURM_STEP_NUM_NODES", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE",
    "SLURM_TASK_PID", "SLURM_TRES_PER_TASK", "SLURMD_NODENAME",
    # The lists of a heterogeneous job's groups: few such jobs have more than 16.
    *(f"SLURM_JOB_NODELIST_{kind}_GROUP_{group}" for kind in ("HET", "PACK") for group in range(16)),
)  # fmt: skip

PREFIXES = ("SLURM_", "SLURMD_", "SBATCH_")
# /system.slice/slurmstepd.scope/job_9/step_0/user/task_0      cgroup v2; node1_slurmstepd.scope with several slurmd
# /slurm/uid_1000/job_5/step_0                                 cgroup v1; slurm_node1 with several slurmd
# Source: https://slurm.schedmd.com/cgroup_v2.html (from 26.05 on sEKNKTV3WPV500, the job's SLUID, in place of job_9)
CGROUP = re.compile(r"/[\w.-]*slurm[\w.-]*/(?:uid_\d+/)?(?:job_\d+|s[0-9A-Z]{13}/step_\w+)")
MOUNT = re.compile(r"/slurmd/(?:[^/\s]+/)?job\d+(?:/|$)")
PARENT = re.compile(r"^(slurmstepd|salloc)$")

FIX_JOB = "start from a fresh job: `sbatch SCRIPT`, in it `srun ... {command}`; set no SLURM_ variables by hand"
FIX_TASK = "start the command by srun inside the job: `srun --ntasks-per-node=1 -n $SLURM_NNODES {command}`"
FIX_SHELL = (
    "start the command by srun: `srun --overlap --ntasks-per-node=1 -n $SLURM_NNODES {command}`; "
    "or a shell of one task: `srun --ntasks=1 --pty bash`"
)

# Slurm's reserved step ids are above this: from 0xfffffffa up interactive step, batch script, external step, pending.
# `salloc` gives its shell the interactive step: one task, whatever the job's size. It is a shell, not a launch.
MAX_STEP = 0xFFFFFFF0


def job(env: Environment) -> Job | None:
    """The Slurm job in `env`, or None where there is none."""
    # Any one of these is enough: a job with one variable lost must not pass for a machine without a scheduler. A
    # container may have been given the task's variables only.
    of_task = {"SLURM_GTIDS", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_PROCID", "SLURM_STEP_ID", "SLURM_STEP_NODELIST"}
    lists = {"SLURM_HET_SIZE", "SLURM_JOB_NODELIST", "SLURM_NODELIST", "SLURM_TASKS_PER_NODE"}
    is_lone = env.keys() & set(VARIABLES) == {"SLURM_JOB_ID"}
    if not {"SLURM_JOB_ID", "SLURM_JOBID", *lists, *of_task} & env.keys() or (is_lone and "MUSTER_HOSTS" in env):
        return None  # the job id alone comes from ssh, see below: MUSTER_HOSTS is then enough
    read = Reader(env, FIX_JOB)
    read.sources["attempt"] = "no SLURM_RESTART_COUNT: the first run"
    # slurmd sets the first name, except on the first run; ParaStation, in slurmd's place at JSC, sets the second.
    restarts = read.optional("SLURM_RESTART_COUNT", "attempt") or read.optional("SLURM_JOB_RESTART_COUNT", "attempt")
    job_id = read.identifier("SLURM_JOB_ID", "job_id")
    # A container may have been given this variable alone. Elsewhere it shows ssh into the job, by pam_slurm_adopt.
    # Source: https://github.com/SchedMD/slurm/blob/master/contribs/pam_slurm_adopt/pam_slurm_adopt.c
    if env.engine is None and is_lone:
        raise MusterError(
            "this shell entered the job by ssh, which passes on only the job's id",
            seen=f"SLURM_JOB_ID={job_id} alone",
            fix=f"not by ssh: srun --jobid={job_id} --overlap --nodes=N --ntasks=N --ntasks-per-node=1 {{command}}",
        )
    groups = _groups(read)
    hosts = tuple(dict.fromkeys(chain(*groups)))
    if not groups:
        hosts = read.hosts("SLURM_JOB_NODELIST", "hosts")
        # `srun --jobid` from outside of the job sets the step's nodes as the job's, and no SLURM_JOB_NUM_NODES.
        is_attached = "SLURM_STEP_ID" in env and "SLURM_JOB_NUM_NODES" not in env
        count = "SLURM_STEP_NUM_NODES" if is_attached else "SLURM_JOB_NUM_NODES"
        num_nodes = read.number(count, "num_nodes")
        wrong = f"Slurm's list of the job's nodes names {len(hosts)}, its count says {num_nodes}"
        read.agree(len(hosts) == num_nodes, wrong, "SLURM_JOB_NODELIST", count)
        # Outside a step SLURM_NODELIST is an old name of the same list.
        is_same = "SLURM_STEP_ID" in env or env.get("SLURM_NODELIST") in (None, env["SLURM_JOB_NODELIST"])
        read.agree(is_same, "Slurm's two lists of the job's nodes differ", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
    # Without --het-group srun starts on the first group only. In a job of 4 tasks `--ntasks-per-node=1` alone is
    # ignored with a warning: the count must go with it.
    which = f" --het-group=0-{len(groups) - 1}" if groups else f" --nodes={len(hosts)} --ntasks={len(hosts)}"
    # From 23.11 on, and with SRUN_CPUS_PER_TASK, srun would give our one task a node the cores of one task of the job.
    # Where no tasks were asked for, Slurm's count of them may be of hardware threads, which --hint=nomultithread hides.
    alike = "SLURM_NTASKS" in env and re.fullmatch(r"([0-9]{1,6})(\(x[0-9]+\))?", env.get("SLURM_TASKS_PER_NODE", ""))
    if not groups and alike and (cores := whole_number(env.get("SLURM_CPUS_PER_TASK", ""))):
        which += f" --cpus-per-task={cores * int(alike[1])}"
    # srun inherits sbatch's options. With GPUs by task, one task a node would get only a task's GPUs, or be refused.
    by_gpu = {"SLURM_GPUS_PER_TASK", "SLURM_NTASKS_PER_GPU"} & env.keys()
    is_bare = (by_gpu or "gres/gpu" in env.get("SLURM_TRES_PER_TASK", "")) and not groups and "SLURM_STEP_ID" not in env
    srun = "srun" if "ALL" in env.get("SLURM_EXPORT_ENV", "ALL").split(",") else "srun --export=ALL"
    return Job(
        scheduler="slurm",
        job_id=str(job_id),
        attempt=restarts or 0,
        hosts=hosts,
        num_nodes=len(hosts),
        gpus_on_node=read.optional("SLURM_GPUS_ON_NODE"),
        cpus_on_node=read.optional("SLURM_CPUS_ON_NODE"),
        launch=f"{srun} {{command}}" if is_bare else f"{srun}{which} --ntasks-per-node=1 {{command}}",
        launch_one=f"{srun} --nodes=1 --ntasks=1 {{command}}",
        gpu_request="sbatch --gpus-per-node={gpus}",
        # slurmd sets SLURMD_NODENAME for the batch script and all tasks. salloc's shell lacks it: it runs where salloc
        # was typed, on a login node most often.
        is_host_certain="SLURMD_NODENAME" in env,
        # Slurm 23.02 and newer set these.
        start_time=whole_number(env.get("SLURM_JOB_START_TIME", ""), MAX_ID),
        end_time=whole_number(env.get("SLURM_JOB_END_TIME", ""), MAX_ID),
        sources={"scheduler": f"SLURM_JOB_ID={job_id}", **read.sources},
    )


def _groups(read: Reader) -> list[tuple[str, ...]]:
    """The nodes of each group of a heterogeneous job, in the order of SLURM_NODEID; empty for any other job.

    In such a job SLURM_JOB_NODELIST and SLURM_STEP_NODELIST are sorted, and SLURM_NODEID is no index into them: with
    group 0 on node03 and group 1 on node[01-02] they say node[01-03], but node03 is the first. Slurm 22.05 gives some
    tasks only the names with PACK, which releases before 20.02 had.

    Source: https://slurm.schedmd.com/heterogeneous_jobs.html#env_var
    """
    is_own = read.env.get("SLURM_JOB_ID_HET_GROUP_0") in (None, read.env.get("SLURM_JOB_ID"))
    if "SLURM_HET_SIZE" not in read.env or not is_own:
        return []  # another job's groups: this one was submitted inside a heterogeneous job
    size = read.number("SLURM_HET_SIZE", most=128)  # Slurm's own MAX_HET_JOB_COMPS
    names = [f"SLURM_JOB_NODELIST_HET_GROUP_{group}" for group in range(size)]
    names = [name if name in read.env else name.replace("_HET_", "_PACK_") for name in names]
    read.sources["hosts"] = read.sources["num_nodes"] = read.seen(*names)
    return [read.hosts(name) for name in names]


def _is_typed_in_a_shell() -> bool:
    """Whether an interactive shell started this command: in a process group of its own, which has the terminal.

    `srun --pty` gives the terminal to the first task alone. A program that srun itself starts leads its session; tasks
    that another srun starts from that task's shell have no terminal, though they inherit SLURM_PTY_PORT.

    Source: https://slurm.schedmd.com/srun.html#OPT_pty
    """
    with suppress(OSError):  # of no terminal
        return os.tcgetpgrp(0) == os.getpgrp() != os.getsid(0)
    return False


def task(env: Environment, job: Job) -> Task | None:
    """This process's task of srun, or None outside a step. The step's variables describe it; `job` is not used."""
    # The batch script has these as well, each of them 0: other values are a task's that lost its SLURM_STEP_ID.
    places = {env.get(name, "0") for name in ("SLURM_LOCALID", "SLURM_NODEID", "SLURM_PROCID")}
    if "SLURM_STEP_ID" not in env and places == {"0"}:
        return None
    read = Reader(env, FIX_TASK)
    if (step := read.identifier("SLURM_STEP_ID", "launcher")) > MAX_STEP:
        return None
    listed = read.hosts("SLURM_STEP_NODELIST", "hosts")
    # This is the script of a job that was submitted inside a step of another job: the step is the other job's.
    in_job = read.hosts("SLURM_JOB_NODELIST") if "SLURM_JOB_NODELIST" in env else listed
    is_apart = {short(host) for host in listed}.isdisjoint(map(short, in_job))
    if is_apart and places == {"0"} and read.own_index(in_job, read.seen("SLURM_JOB_NODELIST")) is not None:
        return None
    # srun sets both variables to the same value, except with --preserve-env. sbatch sets SLURM_TASKS_PER_NODE anew, and
    # leaves the step's as the submitting shell had it.
    of_step = env.get("SLURM_STEP_TASKS_PER_NODE")
    if env.get("SLURM_TASKS_PER_NODE", of_step) != of_step:
        raise MusterError(
            "the SLURM_STEP_ variables are not those of this job: left over from the step in which it was "
            "submitted, or srun got --preserve-env",
            seen=read.seen("SLURM_TASKS_PER_NODE", "SLURM_STEP_TASKS_PER_NODE"),
            fix=f"{FIX_TASK}; without --preserve-env",
        )
    members = set(listed)
    in_groups = tuple(host for host in dict.fromkeys(chain(*_groups(Reader(env, FIX_JOB)))) if host in members)
    hosts = in_groups if len(in_groups) == len(listed) else listed
    tasks_per_node = read.counts("SLURM_STEP_TASKS_PER_NODE", "tasks_on_node")
    num_nodes = read.number("SLURM_STEP_NUM_NODES", "num_nodes")
    num_tasks = read.number("SLURM_STEP_NUM_TASKS")
    node_rank = read.number("SLURM_NODEID", "node_rank")
    local_rank = read.number("SLURM_LOCALID", "local_rank")
    rank = read.number("SLURM_PROCID")
    is_lone_shell = env.is_live and num_tasks > 1 and "SLURM_PTY_PORT" in env and _is_typed_in_a_shell()
    wrong = f"this shell is one task of {num_tasks}, and the shells of the others ended as they had no terminal"
    Reader(env, FIX_SHELL).agree(not is_lone_shell, wrong, "SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_PTY_PORT")

    def agree(holds: bool, about: str, *names: str) -> None:
        read.agree(holds, f"Slurm's variables disagree on {about}", *names)

    agree(len(hosts) == num_nodes, "the number of nodes", "SLURM_STEP_NODELIST", "SLURM_STEP_NUM_NODES")
    agree(len(tasks_per_node) == num_nodes, "the number of nodes", "SLURM_STEP_TASKS_PER_NODE", "SLURM_STEP_NODELIST")
    agree(sum(tasks_per_node) == num_tasks, "the number of tasks", "SLURM_STEP_TASKS_PER_NODE", "SLURM_STEP_NUM_TASKS")
    agree(node_rank < num_nodes, "this node's index", "SLURM_NODEID", "SLURM_STEP_NODELIST")
    on_node = tasks_per_node[node_rank]
    agree(local_rank < on_node, "this task's place on its node", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE")
    agree(rank < num_tasks, "this task's rank", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS")
    # SLURM_GTIDS=0,2 holds the ranks of all tasks on this node. With `-m cyclic` they are no contiguous block, so the
    # rank is never computed from node and local rank, only checked against this list.
    ranks = env["SLURM_GTIDS"].split(",") if "SLURM_GTIDS" in env else None
    is_listed = ranks is None or (len(ranks) == on_node and ranks[local_rank] == str(rank))
    names = ("SLURM_GTIDS", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE")
    agree(is_listed, "the ranks on this node", *names)
    # The ranks meet on the first node. Only a hostfile puts rank 0 elsewhere, and rank 0 may be the only one to see it.
    if max(tasks_per_node) > 1 and (env.get("SLURM_DISTRIBUTION") == "arbitrary" or (rank == 0 and node_rank != 0)):
        raise MusterError(
            "the tasks were placed by hand, so rank 0 might not be on the first node, where the ranks would meet",
            seen=f"SLURM_DISTRIBUTION={env.get('SLURM_DISTRIBUTION', '')}",
            fix="leave --distribution=arbitrary and SLURM_HOSTFILE out, or start one task a node",
        )
    return Task(
        launcher="srun",
        node_rank=node_rank,
        local_rank=local_rank,
        rank=rank,
        tasks_per_node=tasks_per_node,
        hosts=hosts,
        step=step,
        sources=read.sources,
    )


TASKS = {"srun": task}
