"""LSF: the job's nodes, and this process's task of jsrun or of blaunch.

    LSB_MCPU_HOSTS="host1 4 host2 4"       each host with its slots; always complete
    LSB_HOSTS="host1 host1 host2 ..."      a name for each slot; left out by LSF where it gets too long

jsrun is the job step manager on IBM's systems. The first of LSF's hosts is the launch node there, where the job script
runs and no task does:

    JSM_NAMESPACE_RANK=3 JSM_NAMESPACE_SIZE=4 JSM_NAMESPACE_LOCAL_RANK=1 JSM_NAMESPACE_LOCAL_SIZE=2

blaunch starts tasks on the job's hosts: without `-z` one for each slot, with `-z` one for each host that is named. No
variable says which of the two it was, so the task is known only where each host has one slot:

    LSF_PM_TASKID=2      counted from 1

Source: https://www.ibm.com/docs/en/spectrum-lsf/10.1.0?topic=variables-environment-set-job-execution
Source: https://www.ibm.com/docs/en/spectrum-lsf/10.1.0?topic=jsm-jsrun
Source: https://github.com/olcf/hands-on-with-summit/tree/master/challenges/jsrun_Job_Launcher (--bind)
Source: https://lightning.ai/docs/fabric/stable/_modules/lightning/fabric/plugins/environments/lsf.html
Source: https://www.ibm.com/docs/en/spectrum-lsf/10.1.0?topic=reference-blaunch
Source: https://github.com/openpmix/prrte/tree/master/src/mca/ess/lsf (the count from 1)
"""

import re
import shutil
from dataclasses import replace
from itertools import zip_longest

from muster.entrypoint.detect.allocation import Job, Task
from muster.entrypoint.detect.mpi import JSRUN, by_rank, read_ranks
from muster.entrypoint.detect.reader import Reader, slots_or_problem
from muster.entrypoint.environment import Environment
from muster.errors import MusterError

VARIABLES = (
    "LSB_DJOB_HOSTFILE", "LSB_DJOB_RANKFILE", "LSB_HOSTS", "LSB_JOBID", "LSB_JOBINDEX", "LSB_MCPU_HOSTS", "LSB_RESTART",
    "LSF_PM_TASKID", *JSRUN,
)  # fmt: skip

PREFIXES = ("LSB_", "LSF_", "JSM_")
# /lsf/euler/job.4711.2231.1700000000, by the cluster's name; or job.4711[2]. of an array
# Source: https://github.com/ethz-hpc/collectd/blob/master/src/jobmetrics.c
CGROUP = re.compile(r"/lsf/[^/\s]+/\w+\.\d+[.\[]")
PARENT = re.compile(r"^(sbatchd|res)$")

FIX_JOB = "start from a fresh job: `bsub < SCRIPT`, without setting LSB_ variables by hand"
FIX_JSRUN = "start the command by jsrun itself: `jsrun --rs_per_host=1 --tasks_per_rs=1 --bind=rs ... {command}`"
FIX_BLAUNCH = "submit with one slot a host: `bsub -n NODES -R 'span[ptile=1]'`, in the job script: `blaunch {command}`"


def job(env: Environment) -> Job | None:
    """The LSF job in `env`, or None where there is none."""
    if not {"LSB_JOBID", "LSB_MCPU_HOSTS", "LSB_DJOB_RANKFILE", "LSB_HOSTS", "LSF_PM_TASKID"} & env.keys():
        return None
    read = Reader(env, FIX_JOB)
    job_id = str(read.identifier("LSB_JOBID"))
    index = read.optional("LSB_JOBINDEX")
    # LSF only says that a run is not the first; our job script counts, so no attempt reads another's rendezvous keys.
    counted = read.optional("MUSTER_ATTEMPT")
    slots, problem = slots_or_problem(lambda: _slots(read))
    source = read.seen("LSB_MCPU_HOSTS") if slots else "no list of hosts"
    return Job(
        scheduler="lsf",
        job_id=f"{job_id}[{index}]" if index else job_id,
        attempt=counted or int(env.get("LSB_RESTART") == "Y"),
        hosts=tuple(slots),
        num_nodes=len(slots) or None,
        slots=tuple(slots.values()),
        cpus_on_node=read.cpus(slots),
        launch=_launch(slots, env),
        gpu_request="bsub -gpu num={gpus}",
        problem=problem,
        sources={
            "scheduler": f"LSB_JOBID={job_id}",
            "job_id": read.seen("LSB_JOBID", "LSB_JOBINDEX"),
            "attempt": read.seen("MUSTER_ATTEMPT" if counted else "LSB_RESTART") or "no LSB_RESTART: the first run",
            "hosts": source,
            "num_nodes": f"{len(slots)} hosts in {source}",
        },
    )


def _slots(read: Reader) -> dict[str, int]:
    """The number of slots on each host, in LSF's order."""
    words = read.env.get("LSB_MCPU_HOSTS", "").split()
    pairs = zip_longest(words[::2], words[1::2], fillvalue="")
    slots = read.slots(pairs, "LSF's list of the job's nodes", "LSB_MCPU_HOSTS", "LSB_JOBID")
    by_slot = read.env.get("LSB_HOSTS", "").split()
    is_same = not by_slot or set(by_slot) == set(slots)
    read.agree(is_same, "LSF's two lists of the job's nodes differ", "LSB_MCPU_HOSTS", "LSB_HOSTS")
    return slots


def _has_launch_node(slots: tuple[int, ...]) -> bool:
    """Whether the first host looks like the node that only runs the job script: one slot, and all others have more."""
    return len(slots) > 1 and slots[0] == 1 and min(slots[1:]) > 1


def _launch(slots: dict[str, int], env: Environment) -> str:
    counts = tuple(slots.values())
    # Without jsrun there is no launch node: LSF fills hosts one after the other, and the first may have one slot left.
    if (not env.is_live or shutil.which("jsrun", path=env.get("PATH"))) and _has_launch_node(counts):
        sets = f"--nrs={len(slots) - 1} --rs_per_host=1 --tasks_per_rs=1 --cpu_per_rs=ALL_CPUS --gpu_per_rs=ALL_GPUS"
        # By default jsrun binds a task to one core of its resource set.
        return f"jsrun {sets} --bind=rs {{command}}"
    if not slots or max(counts) == 1:
        return "blaunch {command}"
    # Without -z blaunch starts a task for each slot. It counts tasks from 1.
    hosts = " ".join(slots)
    return f"blaunch -z '{hosts}' bash -c 'MUSTER_NODE_RANK=$((LSF_PM_TASKID - 1)) exec \"$@\"' bash {{command}}"


def jsrun_task(env: Environment, job: Job) -> Task | None:
    """This process's task of jsrun, or None where jsrun set no variables."""
    if not set(JSRUN) & env.keys():
        return None
    read = Reader(env, FIX_JSRUN)
    ranks = read_ranks(JSRUN, read)
    own = read.own_index(job.hosts, job.sources["hosts"])
    slots = job.slots[own] if own is not None and own < len(job.slots) else None
    has_launch_node = _has_launch_node(job.slots)
    if slots is not None and (ranks.local_size > slots or (own == 0 and has_launch_node)):
        wrong = f"jsrun's variables are left over from elsewhere: LSF gave the job {slots} slots on this host"
        raise MusterError(wrong, seen=f"{read.seen(*JSRUN)}, {job.sources['hosts']}", fix=FIX_JSRUN)
    if own != 0 and (len(job.hosts) == ranks.num_nodes + 1 or has_launch_node):
        source = f"{job.sources['hosts']}, without the launch node {job.hosts[0]}"
        job = replace(job, hosts=job.hosts[1:], sources={**job.sources, "hosts": source})
    return by_rank("jsrun", JSRUN, read, job)


def blaunch_task(env: Environment, job: Job) -> Task | None:
    """This process's task of blaunch, or None where blaunch did not start it.

    Raises:
        MusterError: the job's hosts are unknown, have several slots, or don't fit the task's number.
    """
    if "LSF_PM_TASKID" not in env or job.scheduler != "lsf":
        return None
    read = Reader(env, FIX_BLAUNCH.replace("NODES", str(job.num_nodes or "NODES")))
    task = read.number("LSF_PM_TASKID")
    if job.problem:
        raise job.problem
    seen = f"LSF_PM_TASKID={task}, {job.sources['hosts']}"
    if max(job.slots, default=1) > 1 and "MUSTER_HOSTS" not in env:
        raise MusterError(
            "blaunch may have started a task for each slot or one for each host: this task's rank is unknown",
            seen=seen,
            fix=f"{read.fix}; or {job.launch}",
        )
    if not 1 <= task <= len(job.hosts) or read.own_index(job.hosts, seen) not in (None, task - 1):
        raise MusterError("blaunch's task does not fit the job's list of hosts", seen=seen, fix=read.fix)
    sources = {"launcher": f"LSF_PM_TASKID={task}", "node_rank": f"LSF_PM_TASKID={task}, counted from 1"}
    return Task.one_a_node("blaunch", task - 1, len(job.hosts), job.hosts, sources)


TASKS = {"jsrun": jsrun_task, "blaunch": blaunch_task}
