"""Kubernetes: the pods of a training job, one for each node. A pod alone is a machine without a scheduler.

    Kubeflow Trainer, PyTorchJob   PET_NNODES=2 PET_NODE_RANK=1 PET_NPROC_PER_NODE=4 MASTER_ADDR=job-master-0
    PyTorchJob before 1.7          RANK=1 WORLD_SIZE=2: they count pods, not processes
    Volcano                        VC_WORKER_HOSTS=job-worker-0.job,job-worker-1.job VC_TASK_INDEX=1 (VK_TASK_INDEX)
    indexed Job, JobSet            JOB_COMPLETION_INDEX=1; how many there are is not told

Source: https://github.com/kubeflow/training-operator/blob/master/pkg/controller.v1/pytorch/envvar.go
Source: https://github.com/volcano-sh/volcano/blob/master/docs/user-guide/how_to_use_svc_plugin.md
Source: https://kubernetes.io/docs/tasks/job/job-with-pod-to-pod-communication/
"""

import re
from typing import NamedTuple

from muster.entrypoint.detect import hostlist
from muster.entrypoint.detect.allocation import Job, Task
from muster.entrypoint.detect.hostlist import whole_number
from muster.entrypoint.detect.reader import Reader
from muster.entrypoint.environment import Environment
from muster.errors import MusterError

VARIABLES = (
    "JOB_COMPLETION_INDEX", "KUBERNETES_SERVICE_HOST", "PET_MASTER_ADDR", "PET_MASTER_PORT", "PET_NNODES",
    "PET_NODE_RANK", "PET_NPROC_PER_NODE", "VC_MASTER_HOSTS", "VC_TASK_INDEX", "VC_WORKER_HOSTS", "VK_TASK_INDEX",
)  # fmt: skip

PREFIXES = ("PET_", "VC_", "VK_")

FIX = "on each pod: train ddp --nnodes PODS --node-rank INDEX --master-addr HOST"

# All that tell this pod's place. Kubeflow Trainer sets several of them, and they agree.
_RANKS = ("PET_NODE_RANK", "RANK", "JOB_COMPLETION_INDEX")


class _Pods(NamedTuple):
    """The pods of a job, and which of them this is; and the variables that say so."""

    num_pods: int | None  # None where nothing tells
    rank: int
    rank_source: str
    hosts: tuple[str, ...]  # empty where unknown
    num_source: str
    host_source: str


def job(env: Environment) -> Job | None:
    """The job that this pod belongs to, or None outside Kubernetes and for a pod alone.

    Raises:
        MusterError: the variables of the pods contradict each other.
    """
    found = _pods(Reader(env, FIX))
    if found is None:
        return None
    problem = MusterError("nothing tells the names of the job's pods", seen=found.num_source, fix=FIX)
    return Job(
        scheduler="kubernetes",
        job_id=None,
        hosts=found.hosts,
        num_nodes=found.num_pods,
        launch=FIX.replace("train ddp", "{command}"),
        gpu_request="nvidia.com/gpu: {gpus} in the limits of the pod's resources",
        is_host_proved=True,
        problem=None if found.hosts else problem,
        sources={
            "scheduler": "KUBERNETES_SERVICE_HOST",
            "num_nodes": found.num_source,
            "hosts": found.host_source,
        },
    )


def _pods(read: Reader) -> _Pods | None:
    """The pods of this pod's job, or None where it is alone."""
    env = read.env
    if "KUBERNETES_SERVICE_HOST" not in env:
        return None
    if any(re.fullmatch(r"VC_\w+_HOSTS", name) for name in env):
        return _volcano(read)
    if any(name.startswith("PET_") for name in env):
        return _counted(read, "PET_NNODES")
    if "RANK" in env or "WORLD_SIZE" in env:
        return _counted(read, "WORLD_SIZE")
    for name in ("JOB_COMPLETION_INDEX", "VC_TASK_INDEX", "VK_TASK_INDEX"):
        if name in env:
            rank = read.number(name)
            return _Pods(None, rank, f"{name}={rank}", (), f"{name}={rank}, and no number of pods", "no names of pods")
    return None


def _counted(read: Reader, name: str) -> _Pods:
    env = read.env
    if ":" in env.get(name, ""):
        raise MusterError(
            "an elastic job gives its pods no ranks",
            seen=read.seen(name),
            fix="leave elasticPolicy out of the PyTorchJob, with a fixed number of replicas",
        )
    num_pods = read.number(name)
    ranks = {place: read.number(place) for place in _RANKS if place in env}
    seen = read.seen(name, "WORLD_SIZE", "PET_NPROC_PER_NODE", *ranks)
    if len(set(ranks.values())) != 1 or num_pods < 1 or next(iter(ranks.values())) >= num_pods:
        raise MusterError("the variables disagree on which pod of the job this is", seen=seen, fix=FIX)
    world_size = read.optional("WORLD_SIZE")
    per_pod = whole_number(env.get("PET_NPROC_PER_NODE", "1"))
    # Newer operators count processes in WORLD_SIZE, as far as their number is given.
    if world_size not in (None, num_pods, num_pods * (per_pod or 1)):
        raise MusterError("the variables disagree on the number of pods", seen=seen, fix=FIX)
    place, rank = next(iter(ranks.items()))
    if _rank_by_name(env) not in (None, rank):
        raise MusterError(
            "the pod's name and its variables disagree on which pod this is", seen=f"{env.host}: {seen}", fix=FIX
        )
    hosts, host_source = _indexed_names(env, rank, num_pods)
    return _Pods(num_pods, rank, f"{place}={rank}", hosts, f"{name}={num_pods}", host_source)


def _rank_by_name(env: Environment) -> int | None:
    """The rank that the name of a PyTorchJob's pod stands for: JOB-master-0, then JOB-worker-0, JOB-worker-1..."""
    job = env.get("MASTER_ADDR", "").partition(".")[0].removesuffix("-master-0")
    match = re.fullmatch(rf"{re.escape(job)}-(master|worker)-([0-9]{{1,9}})", env.host or "") if job else None
    return int(match[2]) + (match[1] == "worker") if match else None


def _indexed_names(env: Environment, rank: int, num_pods: int) -> tuple[tuple[str, ...], str]:
    """The names of an indexed Job's pods, BASE-0 to BASE-N, where this pod's and the master's show that pattern."""
    master = env.get("PET_MASTER_ADDR") or env.get("MASTER_ADDR", "")
    name, dot, domain = master.partition(".")
    base = name.removesuffix("-0")
    if (
        "JOB_COMPLETION_INDEX" not in env
        or base == name
        or env.host is None
        or hostlist.short(env.host) != f"{base}-{rank}".lower()
        or not hostlist.is_name(name)
        or num_pods > hostlist.MAX_HOSTS
    ):
        return (), "no names of pods"
    return tuple(f"{base}-{pod}{dot}{domain}" for pod in range(num_pods)), f"the pattern of {master}"


def _volcano(read: Reader) -> _Pods:
    env = read.env
    # The task called master goes first: its index 0 is where Volcano's PyTorch plugin puts MASTER_ADDR.
    names = sorted(
        (name for name in env if re.fullmatch(r"VC_\w+_HOSTS", name)),
        key=lambda name: (name != "VC_MASTER_HOSTS", name),
    )
    by_task = {name: read.hosts(name) for name in names}
    hosts = tuple(host for task in by_task.values() for host in task)
    seen = read.seen(*names, "VC_TASK_INDEX", "VK_TASK_INDEX", "RANK")
    index_name = "VC_TASK_INDEX" if "VC_TASK_INDEX" in env else "VK_TASK_INDEX"
    index = read.number(index_name)
    own = read.own_index(hosts, seen)
    if own is None and len(names) == 1 and index < len(hosts):
        own = index
    if (
        len(set(hosts)) != len(hosts)
        or own is None
        or not any(task[index : index + 1] == (hosts[own],) for task in by_task.values())
    ):
        raise MusterError("the variables disagree on which pod of the job this is", seen=seen, fix=FIX)
    if env.get("RANK", str(own)) != str(own) or env.get("WORLD_SIZE", str(len(hosts))) != str(len(hosts)):
        raise MusterError("RANK and WORLD_SIZE disagree with the list of pods", seen=seen, fix=FIX)
    if env.get("VK_TASK_INDEX", str(index)) != str(index):
        raise MusterError("the variables disagree on which pod of the task this is", seen=seen, fix=FIX)
    listed = read.seen(*names)
    return _Pods(len(hosts), own, f"{index_name}={index}", hosts, f"{len(hosts)} hosts in {listed}", listed)


def task(env: Environment, job: Job | None) -> Task | None:
    """The pod that this process is in, as the one task of a node, or None outside a job of several pods.

    Raises:
        MusterError: the variables contradict each other.
    """
    found = _pods(Reader(env, FIX))
    if found is None or found.num_pods is None:
        return None
    hosts = job.hosts if job and len(job.hosts) == found.num_pods else found.hosts
    sources = {
        "launcher": found.rank_source,
        "num_nodes": found.num_source,
        "hosts": found.host_source,
        "node_rank": found.rank_source,
    }
    return Task.one_a_node("kubernetes", found.rank, found.num_pods, hosts, sources)


TASKS = {"kubernetes": task}
