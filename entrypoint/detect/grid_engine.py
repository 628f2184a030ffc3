"""Grid Engine (SGE, Son of Grid Engine, Univa, Open Cluster Scheduler): the job's nodes, and this process's qrsh task.

A parallel job has its nodes in a file:

    PE_HOSTFILE=/var/spool/.../active_jobs/2.1/pe_hostfile
        node01 2 main.q@node01 UNDEFINED
        node02 2 main.q@node02 UNDEFINED

Only the host of the job script has that file. In a task of `qrsh -inherit` on another host the variable may be set
nevertheless, and NHOSTS and NSLOTS describe that host, not the job.

`qrsh -inherit` starts a task on a host of the job. On the other hosts such a task needs MUSTER_HOSTS:

    JOB_SCRIPT=QRSH SGE_JOB_SPOOL_DIR=.../active_jobs/2.1/1.node01

Source: https://manpages.debian.org/bookworm/gridengine-client/submit.1.en.html (ENVIRONMENTAL VARIABLES)
Source: https://manpages.debian.org/bookworm/gridengine-client/qrsh.1.en.html
"""

import re

from muster.entrypoint.detect.allocation import Job, Task
from muster.entrypoint.detect.manual import by_host
from muster.entrypoint.detect.reader import Reader, slots_or_problem
from muster.entrypoint.environment import Environment
from muster.errors import MusterError

VARIABLES = (
    "JOB_ID", "JOB_SCRIPT", "NHOSTS", "NSLOTS", "PE", "PE_HOSTFILE", "RESTARTED", "SGE_HGR_gpu", "SGE_JOB_SPOOL_DIR",
    "SGE_TASK_ID",
)  # fmt: skip
TEXT_FILES = ("PE_HOSTFILE",)

PREFIXES = ("SGE_", "PE_")
# /ocs8012.slice/ocs8012-jobs.slice/ocs8012-jobs-7.slice/ocs8012.7.master.scope      Open Cluster Scheduler with systemd
# Source: https://github.com/hpc-gridware/clusterscheduler/blob/master/source/libs/sgeobj/ocs_Job.cc
CGROUP = re.compile(r"/(\w+)\.slice/\1-jobs\.slice/(?:\1-jobs-[\d.]+\.slice/)?\1\.\d[\w.-]*\.scope")
MOUNT = re.compile(r"/active_jobs/\d+\.\d+(?:/|$)")
PARENT = re.compile(r"^sge_(shepherd|execd)$")

FIX_JOB = "start from a fresh job: `qsub -pe PE SLOTS SCRIPT`, without setting Grid Engine's variables by hand"
FIX_HOSTS = (
    "in the job script: export MUSTER_HOSTS=$(awk '!seen[$1]++ {print $1}' \"$PE_HOSTFILE\" | paste -sd,), "
    "and for each task: qrsh -inherit HOST env MUSTER_HOSTS=$MUSTER_HOSTS COMMAND"
)


def job(env: Environment) -> Job | None:
    """The Grid Engine job in `env`, or None where there is none."""
    # SGE_ROOT and its like are set on a login node too, and JOB_ID alone may come from another program.
    if not {"PE_HOSTFILE", "SGE_JOB_SPOOL_DIR", "SGE_TASK_ID"} & env.keys():
        return None
    read = Reader(env, FIX_JOB)
    job_id = str(read.identifier("JOB_ID"))
    task = env.get("SGE_TASK_ID", "undefined")
    slots, problem = slots_or_problem(lambda: _slots(read))
    nodes = read.sources.get("hosts") or read.seen("PE_HOSTFILE") or "no PE_HOSTFILE"
    # Sites name their resource map of GPUs (gpu, gpu_card, NVIDIA_GPUS, cuda; not gpu_mem) and the GPUs (0, gpu0).
    is_map = re.compile(r"SGE_HGR_(\w+_)?(n?gpus?|cuda)(_cards?)?", re.IGNORECASE).fullmatch
    gpus = next((env[name] for name in sorted(env) if is_map(name) and env[name].strip()), "").split()
    names = tuple(slots) or ("HOST0", "HOST1")
    return Job(
        scheduler="grid_engine",
        job_id=job_id if task == "undefined" else f"{job_id}.{task}",
        attempt=read.optional("RESTARTED") or 0,
        hosts=tuple(slots),
        num_nodes=len(slots) or None,
        slots=tuple(slots.values()),
        cpus_on_node=read.cpus(slots),
        gpus_on_node=len(gpus) or None,
        gpu_ids=tuple(dict.fromkeys(name.removeprefix("gpu") for name in gpus)),
        # A task starts in $HOME, with the PATH of a login, and a second shell parses its command.
        launch=f"for host in {' '.join(names)}; do qrsh -inherit $host "
        f"\"cd '$PWD' && env PATH='$PATH' MUSTER_HOSTS={','.join(names)} \"{{quoted}} & done; wait",
        gpu_request="qsub -l gpu={gpus}, by the name that this site has for it",
        is_shared=len(slots) == 1,
        problem=problem,
        sources={
            "scheduler": f"JOB_ID={job_id}",
            "job_id": read.seen("JOB_ID", "SGE_TASK_ID"),
            "attempt": read.seen("RESTARTED") or "no RESTARTED: the first run",
            "hosts": nodes if slots else f"not read: {nodes}",
            "num_nodes": f"{len(slots)} hosts in {nodes}" if slots else nodes,
        },
    )


def _slots(read: Reader) -> dict[str, int]:
    """The number of slots on each host, over all queues, in the file's order."""
    env = read.env
    is_task = _is_task(env)
    try:
        lines = [line.split() for line in Reader(env, FIX_HOSTS).text_file("PE_HOSTFILE").splitlines()]
    except MusterError:
        # A job on one host needs no file, which a container may not see. In a task NHOSTS counts its own host alone.
        if not is_task and env.host and env.get("NHOSTS") == "1":
            read.sources["hosts"] = "NHOSTS=1"
            return {env.host: read.number("NSLOTS")}
        raise
    pairs = [(words[0], "".join(words[1:2])) for words in lines if words]
    slots = read.slots(pairs, "Grid Engine's list of nodes", "PE_HOSTFILE", "NHOSTS")
    fits = is_task or env.get("NHOSTS", str(len(slots))) == str(len(slots))
    read.agree(fits, f"Grid Engine's list of nodes names {len(slots)} hosts", "PE_HOSTFILE", "NHOSTS")
    return slots


def _is_task(env: Environment) -> bool:
    """Whether `qrsh -inherit` started this process.

    Raises:
        MusterError: the variable that distinguishes a task from a job submitted by qrsh is missing or malformed.
    """
    # A job has .../active_jobs/2.1, the second task on node01 in it .../active_jobs/2.1/2.node01
    match = re.search(r"/active_jobs/[0-9]+\.[0-9]+(/[0-9]+\..+)?$", env.get("SGE_JOB_SPOOL_DIR", ""))
    if match is None and env.get("JOB_SCRIPT") == "QRSH":
        wrong = "SGE_JOB_SPOOL_DIR does not show whether this is a job or a task of one"
        raise Reader(env, FIX_JOB).error(wrong, "JOB_SCRIPT", "SGE_JOB_SPOOL_DIR")
    return match is not None and match[1] is not None


def task(env: Environment, job: Job) -> Task | None:
    """This process's task of qrsh, or None for a job script and outside Grid Engine.

    Raises:
        MusterError: the job's nodes are not known here, or several tasks may be on this one.
    """
    if job.scheduler != "grid_engine" or not _is_task(env):
        return None
    mark = f"SGE_JOB_SPOOL_DIR={env['SGE_JOB_SPOOL_DIR'][:200]}"
    # qrsh is given the host of each task: a user who sets MUSTER_HOSTS is taken to have started one on each.
    if max(job.slots, default=1) > 1 and "MUSTER_HOSTS" not in env:
        raise MusterError(
            f"a node of this job has {max(job.slots)} slots, and qrsh gives the tasks on them no ranks",
            seen=f"{mark}, {job.sources['hosts']}",
            fix=f"start one task on each node, and list the nodes: {FIX_HOSTS}",
        )
    return by_host("qrsh", mark, env, job, FIX_HOSTS)


TASKS = {"qrsh": task}
