"""Kubernetes: the pods of a training job, each taken as a node. A pod alone is taken as a machine without a scheduler.

    Kubeflow Trainer, PyTorchJob   PET_NNODES=2 PET_NODE_RANK=1 PET_NPROC_PER_NODE=4 MASTER_ADDR=job-master-0
    PyTorchJob before 1.7          RANK=1 WORLD_SIZE=2: they count pods, not processes
    LeaderWorkerSet                LWS_GROUP_SIZE=2 LWS_WORKER_INDEX=1 LWS_LEADER_ADDRESS=lws-0.lws.default
    Volcano                        VC_WORKER_HOSTS=job-worker-0.job,job-worker-1.job VC_TASK_INDEX=1 (VK_TASK_INDEX)
    indexed Job, JobSet            JOB_COMPLETION_INDEX=1; no number of pods, unless the job's author sets NNODES=2
    MPIJob                         K_MPI_JOB_ROLE=launcher, whose mpirun starts processes in the pods with =worker
    Volcano's MPI plugin           MPI_HOST=job-worker-0.job,job-worker-1.job in the master's pod, which runs mpirun

Source: https://github.com/kubeflow/training-operator/blob/master/pkg/controller.v1/pytorch/envvar.go
Source: https://github.com/volcano-sh/volcano/tree/master/docs/user-guide (how_to_use_svc_plugin.md, ..._mpi_plugin.md)
Source: https://kubernetes.io/docs/tasks/job/job-with-pod-to-pod-communication/
Source: https://github.com/kubeflow/mpi-operator/blob/master/pkg/controller/mpi_job_controller.go
Source: https://lws.sigs.k8s.io/docs/reference/labels-annotations-and-environment-variables/
"""

import re
from dataclasses import replace

from muster.entrypoint.detect import hostlist
from muster.entrypoint.detect.allocation import Job, Task
from muster.entrypoint.detect.reader import Reader
from muster.entrypoint.environment import Environment
from muster.errors import MusterError

VARIABLES = (
    "GPUS_PER_NODE", "JOB_COMPLETION_INDEX", "KUBERNETES_SERVICE_HOST", "K_MPI_JOB_ROLE", "LOCAL_SIZE",
    "LOCAL_WORLD_SIZE", "LWS_GROUP_SIZE", "LWS_LEADER_ADDRESS", "LWS_WORKER_INDEX", "MPI_HOST", "PET_MASTER_ADDR",
    "PET_MASTER_PORT", "PET_NNODES", "PET_NODE_RANK", "PET_NPROC_PER_NODE", "PET_RDZV_ENDPOINT", "UCLOUD_RANK",
    "UCLOUD_TASK_COUNT", "VC_MASTER_HOSTS", "VC_TASK_INDEX", "VC_WORKER_HOSTS", "VK_TASK_INDEX",
)  # fmt: skip

PREFIXES = ("LWS_", "PET_", "VC_", "VK_")

FIX = "on each pod: {start} --nnodes PODS --node-rank INDEX --master-addr HOST{rest}"
FIX_MPIJOB = "in the launcher's pod: mpirun -n PODS --map-by ppr:1:node --bind-to none {command}"
FIX_VOLCANO = "in the master's pod: mpirun --host $MPI_HOST -n PODS --map-by ppr:1:node --bind-to none {command}"

_HOSTS_OF_VOLCANO = re.compile(r"VC_\w+_HOSTS")
# Variables by which a job's author gives the number of pods, where WORLD_SIZE counts processes.
# Source: https://github.com/SDU-eScience/UCloud (im2/pkg/integrations/k8s/containers: the last, beside Volcano's names)
_NODES = ("AZUREML_NODE_COUNT", "NNODES", "NODE_COUNT", "NUM_NODES", "UCLOUD_TASK_COUNT")
_NO_NAMES = "no names of pods"


def job(env: Environment) -> Job | None:
    """The job that this pod belongs to, or None outside Kubernetes and for a pod alone."""
    if "KUBERNETES_SERVICE_HOST" not in env:
        return None
    pod = _pod(env)
    # Any one of these shows that the job has several pods. The last is an MPIJob's.
    index = Reader(env, FIX).seen("JOB_COMPLETION_INDEX", "VC_TASK_INDEX", "VK_TASK_INDEX", "K_MPI_JOB_ROLE")
    if not pod and not index:
        return None
    of_pod = pod.sources if pod else {"num_nodes": f"{index}: one of several pods", "hosts": _NO_NAMES}
    fix = FIX_VOLCANO if _is_mpi_master(env) else FIX_MPIJOB if "K_MPI_JOB_ROLE" in env else FIX
    problem = MusterError("the names of the job's pods are unknown", seen=of_pod["num_nodes"], fix=fix)
    return Job(
        scheduler="kubernetes",
        job_id=None,
        hosts=pod.hosts if pod else (),
        num_nodes=pod.num_nodes if pod else None,
        launch=fix,
        gpu_request="nvidia.com/gpu: {gpus} in the limits of the pod's resources",
        is_host_certain=True,
        problem=None if pod and pod.hosts else problem,
        sources={**of_pod, "scheduler": "KUBERNETES_SERVICE_HOST"},
    )


def task(env: Environment, job: Job) -> Task | None:
    """This process's pod, as the only task of a node, or None where it is alone or the number of pods is unknown."""
    pod = _pod(env) if "KUBERNETES_SERVICE_HOST" in env else None
    return replace(pod, hosts=job.hosts) if pod and len(job.hosts) == pod.num_nodes else pod


def _pod(env: Environment) -> Task | None:
    """This pod, as a task, with the job's pods where they are known; None as in `task`."""
    if any(_HOSTS_OF_VOLCANO.fullmatch(name) for name in env):
        return None if _is_mpi_master(env) else _of_volcano(Reader(env, FIX))
    # The prefix PET_ is not enough: a Service called pet-shop gives all pods PET_SHOP_PORT.
    if {"PET_MASTER_ADDR", "PET_NNODES", "PET_NODE_RANK", "PET_RDZV_ENDPOINT"} & env.keys():
        return _counted(Reader(env, FIX), "PET_NNODES")
    if {"LWS_GROUP_SIZE", "LWS_WORKER_INDEX"} & env.keys():
        return _counted(Reader(env, FIX), "LWS_GROUP_SIZE")
    counted = next((name for name in _NODES if name in env), "WORLD_SIZE")
    is_indexed = {"JOB_COMPLETION_INDEX", "UCLOUD_RANK"} & env.keys() and counted in env
    return _counted(Reader(env, FIX), counted) if is_indexed or "RANK" in env or "WORLD_SIZE" in env else None


def _is_mpi_master(env: Environment) -> bool:
    """Whether this is the master's pod of Volcano's MPI plugin: MPI_HOST has only other pods of Volcano's lists."""
    listed = {host for name in env if _HOSTS_OF_VOLCANO.fullmatch(name) for host in env[name].split(",")}
    workers = tuple(env.get("MPI_HOST", "").split(","))
    return any(workers) and listed.issuperset(workers) and Reader(env, FIX).own_index(workers, "MPI_HOST") is None


def _counted(read: Reader, name: str) -> Task:
    env = read.env
    # All variables with this pod's index. Kubeflow Trainer sets several of them, and they agree.
    names = ("PET_NODE_RANK", "RANK", "NODE_RANK", "JOB_COMPLETION_INDEX", "LWS_WORKER_INDEX", "UCLOUD_RANK")
    # Each Job of a JobSet counts its pods from 0. This pod SET-b-1-0 and the master SET-a-0-0 are in different Jobs.
    addresses = (env.host or "", env.get("PET_MASTER_ADDR") or env.get("MASTER_ADDR", ""))
    own, first = (re.match(r"(.+)-([^-.]+-\d+)-\d+(?:\.|$)", address) for address in addresses)
    is_again = own and first and own[1] == first[1] and own[2] != first[2]
    places = [name for name in names if name in env and not (is_again and name == "JOB_COMPLETION_INDEX")]
    # An elastic job has 1:3 here, or a number where elasticPolicy has no minReplicas and maxReplicas.
    if ":" in env.get(name, "") or ("PET_RDZV_ENDPOINT" in env and not places):
        fix = f"leave elasticPolicy out of the PyTorchJob, with a fixed number of replicas; or {FIX}"
        raise MusterError("an elastic job gives its pods no ranks", seen=read.seen(name, "PET_RDZV_ENDPOINT"), fix=fix)
    # A launcher inside the pod counts processes, which would be taken for pods.
    read.check_inner_launcher("pod")
    num_pods = read.number(name)
    ranks = {place: read.number(place) for place in places}
    shown = (name, "WORLD_SIZE", "PET_NPROC_PER_NODE", "GPUS_PER_NODE", *names)
    place, rank = next(iter(ranks.items()), ("", num_pods))
    is_one = len(set(ranks.values())) == 1 and rank < num_pods
    read.agree(is_one, "the variables disagree on which pod of the job this is", *shown)
    world_size = read.optional("WORLD_SIZE")
    per_pod = hostlist.whole_number(env.get("PET_NPROC_PER_NODE") or env.get("GPUS_PER_NODE", "1")) or 1
    # WORLD_SIZE counts processes with newer operators, if they know the number per pod, and where users set NNODES.
    is_size = world_size in (None, num_pods, num_pods * per_pod)
    read.agree(is_size, "the variables disagree on the number of pods", *shown)
    is_named = _rank_by_name(env) in (None, rank)
    read.agree(is_named, f"the name of this pod, {env.host}, and its variables disagree on which pod this is", *shown)
    hosts, host_source = _names_of_pods(env, rank, num_pods)
    sources = {"launcher": f"{place}={rank}", "num_nodes": f"{name}={num_pods}", "hosts": host_source}
    return Task.one_a_node("kubernetes", rank, num_pods, hosts, {**sources, "node_rank": sources["launcher"]})


def _rank_by_name(env: Environment) -> int | None:
    """This pod's rank by its name: JOB-master-0, JOB-worker-0, JOB-worker-1...; LEADER, LEADER-1...; or None."""
    base, _, number = (env.host or "").rpartition("-")
    if leader := env.get("LWS_LEADER_ADDRESS", "").partition(".")[0]:
        return 0 if env.host == leader else hostlist.whole_number(number) if base == leader else None
    job = env.get("MASTER_ADDR", "").partition(".")[0].removesuffix("-master-0")
    first = {f"{job}-master": 0, f"{job}-worker": 1}.get(base) if job else None
    index = hostlist.whole_number(number)
    return None if first is None or index is None else first + index


def _names_of_pods(env: Environment, rank: int, num_pods: int) -> tuple[tuple[str, ...], str]:
    """The names of all pods, where those of this pod and the first one show the pattern, else none; and their source.

    Those of an indexed Job are BASE-0, BASE-1..., those of a LeaderWorkerSet's group LEADER, LEADER-1...
    """
    master = env.get("PET_MASTER_ADDR") or env.get("MASTER_ADDR") or env.get("LWS_LEADER_ADDRESS", "")
    name, dot, domain = master.partition(".")
    is_group = master == env.get("LWS_LEADER_ADDRESS")
    base = name if is_group else name.removesuffix("-0")
    is_indexed = base != name and "JOB_COMPLETION_INDEX" in env
    is_own = env.host is not None and hostlist.short(env.host) == (f"{base}-{rank}" if rank else name).lower()
    if not (is_own and (is_group or is_indexed) and hostlist.is_name(name) and num_pods <= hostlist.MAX_HOSTS):
        return (), _NO_NAMES
    return (master, *(f"{base}-{pod}{dot}{domain}" for pod in range(1, num_pods))), f"the pattern of {master}"


def _of_volcano(read: Reader) -> Task:
    env = read.env
    # The master's task comes first, whatever its name: MASTER_ADDR of Volcano's PyTorch plugin is its pod of index 0.
    master = env.get("MASTER_ADDR", "")
    names = sorted(
        (name for name in env if _HOSTS_OF_VOLCANO.fullmatch(name)),
        key=lambda name: (env[name].partition(",")[0] != master, name != "VC_MASTER_HOSTS", name),
    )
    by_task = [read.hosts(name) for name in names]
    # The PyTorch plugin counts its master's and its workers' pods alone, and gives those of a third task no RANK.
    counted = [len(by_task[0]) + len(task) for task in by_task[1:]]
    if len(names) > 2 and "RANK" in env and read.optional("WORLD_SIZE") in counted:
        return _counted(read, "WORLD_SIZE")
    hosts = tuple(host for task in by_task for host in task)
    listed, shown = read.seen(*names), (*names, "VC_TASK_INDEX", "VK_TASK_INDEX", "RANK", "WORLD_SIZE")
    index_name = "VC_TASK_INDEX" if "VC_TASK_INDEX" in env else "VK_TASK_INDEX"
    own = read.own_index(hosts, listed)
    if own is None and len(names) == 1:
        own = read.number(index_name)
    # Each pod's index in its task, as the env plugin sets it; a job with the PyTorch plugin need not have that plugin.
    places = [str(place) for task in by_task for place in range(len(task))]
    place = None if own is None or own >= len(places) else places[own]
    expected = {"RANK": str(own), "WORLD_SIZE": str(len(hosts)), "VC_TASK_INDEX": place, "VK_TASK_INDEX": place}
    is_same = all(env.get(name, value) == value for name, value in expected.items())
    if own is None or place is None or not is_same or len(set(hosts)) != len(hosts):
        raise read.error("the variables disagree on which pod of the job this is", *shown)
    mark = read.seen(index_name) or f"the name of this pod, {env.host}"
    sources = {"launcher": mark, "num_nodes": f"{len(hosts)} hosts in {listed}", "hosts": listed, "node_rank": mark}
    return Task.one_a_node("kubernetes", own, len(hosts), hosts, sources)


TASKS = {"kubernetes": task}
