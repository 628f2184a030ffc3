"""MUSTER_HOSTS: the user's list of the nodes, where no scheduler has one, or its list can't be read.

    MUSTER_HOSTS=node[01-02],gpu7         compressed as Slurm does, or plain names between commas or blanks

It stands for one process a node: the index of this host in the list is its node rank. The same holds for the remote
shells of schedulers, such as qrsh and pbsdsh, which give a process no rank.
"""

import re
from dataclasses import replace
from pathlib import Path

from muster.entrypoint.detect import hostlist
from muster.entrypoint.detect.allocation import NO_SCHEDULER, Job, Task
from muster.entrypoint.detect.reader import Reader
from muster.entrypoint.environment import Environment
from muster.errors import MusterError

# Variables with a job's number of nodes or tasks: of schedulers without a family here, of scripts for torchrun, or of a
# family whose other variables are lost. Owners and sources of these and of those below: docs/decisions/detection.md.
NUMBERS = (
    "ARNOLD_WORKER_NUM", "AWS_BATCH_JOB_NUM_NODES", "AZUREML_NODE_COUNT", "BACKENDAI_CLUSTER_SIZE",
    "BEAKER_REPLICA_COUNT", "COBALT_JOBSIZE", "CRANE_JOB_NUM_NODES", "DMLC_NUM_WORKER", "DSTACK_NODES_NUM", "HOST_NUM",
    "HQ_NUM_NODES", "JAX_NUM_PROCESSES", "KUBEBRAIN_REPLICA_TOTAL", "LEPTON_JOB_TOTAL_WORKERS", "MF_PARALLEL_NUM_NODES",
    "MLP_WORKER_NUM", "NGC_ARRAY_SIZE", "NHOSTS", "NNODES", "NODE_COUNT", "NODE_NUM", "NUM_NODES",
    "PADDLE_TRAINERS_NUM", "PJM_NODE", "PJM_VNODES", "RLAUNCH_REPLICA_TOTAL", "SENSECORE_PYTORCH_NNODES",
    "SKYPILOT_NUM_NODES", "SLURM_JOB_NUM_NODES", "SLURM_NNODES", "SLURM_NPROCS", "SLURM_NTASKS", "SLURM_STEP_NUM_NODES",
    "SLURM_STEP_NUM_TASKS", "SNOWFLAKE_JOBS_COUNT", "SUBMITIT_LOCAL_NTASKS", "_CONDOR_NPROCS",
)  # fmt: skip
# Variables with a list of nodes, and a pattern that matches where there are several: two HOST:PORT in TF_CONFIG, the
# comma of SageMaker's ["algo-1","algo-2"]. Jhinno's Unischeduler and HPC Pack add each host's cores: gpu01 4 gpu02 4.
LISTS = {
    "AFO_ENV_CLUSTER_SPEC": r'\[\s*"[^"]*"\s*,',
    "AZ_BATCH_HOST_LIST": ",",
    "CCP_NODES": r"\s\d+\s+\S",
    "CLUSTER_SPEC": "workerpool1",
    "COORDINATOR_ADDRESS": "-worker-0$",
    "HYDRA_HOST_FILE": "/etc/mpi/hostfile",
    "I_MPI_HYDRA_HOST_FILE": "/etc/mpi/hostfile",
    "JH_HOSTS": r"\s\d+\s+\S",
    "NCCL_HOSTID": ":",  # with an IPv6 address
    "OCI__WORKER_COUNT": "[1-9]",  # beside the first node
    "OMPI_MCA_orte_default_hostfile": "/etc/mpi/hostfile",
    "SM_HOSTS": ",",
    "TF_CONFIG": r':\d+"[\s\S]*:\d+"',
}
IGNORED_IF_ONE = {"NODE_NUM": "HOST_NUM", "COORDINATOR_ADDRESS": "NUM_PROCESSES"}  # the first, if the second is 1
# In a user's own container, which lacks SageMaker's toolkit, only this file lists the job's hosts.
# Source: https://docs.aws.amazon.com/sagemaker/latest/dg/your-algorithms-training-algo-running-container.html
SAGEMAKER = Path("/opt/ml/input/config/resourceconfig.json")
TEXT_FILES = ("BATCH_HOSTS_FILE", "CCS_ALLOC_FILE", "OAR_NODEFILE")
VARIABLES = (
    "ALPS_APP_PE", "HOROVOD_SIZE", "HQ_TASK_ID", "MUSTER_HOSTS", "MUSTER_NODE_RANK", "NODE_RANK", *NUMBERS, *LISTS,
    *IGNORED_IF_ONE.values(), *TEXT_FILES, "PARSL_WORKER_RANK", "TRAINING_JOB_NAME",
)  # fmt: skip

FIX = "MUSTER_HOSTS=node01,node02 or MUSTER_HOSTS=node[01-02], the same on all nodes"


def listed(env: Environment) -> Job:
    """The job with the nodes that MUSTER_HOSTS lists.

    Raises:
        MusterError: it is no list of hosts, or a name in it does not stand for exactly one host.
    """
    with_commas = re.sub(r"\s*,\s*|\s+", ",", env["MUSTER_HOSTS"].strip())
    read = Reader(Environment({"MUSTER_HOSTS": with_commas}), FIX)
    hosts = read.hosts("MUSTER_HOSTS")
    undotted = {host for host in hosts if "." not in host}
    for wrong, found in (
        ("a host with a number of slots, or a port", [host for host in hosts if host.count(":") == 1]),
        ("a name of every host", {"localhost", "127.0.0.1", "::1"}.intersection(hosts) if len(hosts) > 1 else ()),
        ("listed with and without domain", [host for host in hosts if "." in host and host.split(".")[0] in undotted]),
    ):
        read.agree(not found, f"{next(iter(found), '')} is {wrong}", "MUSTER_HOSTS")
    source = Reader(env, FIX).seen("MUSTER_HOSTS")
    return Job(
        scheduler="manual",
        job_id=None,
        hosts=hosts,
        num_nodes=len(hosts),
        launch="on each host: {command}",
        sources={"scheduler": source, "hosts": source, "num_nodes": f"{len(hosts)} hosts in {source}"},
    )


def override(job: Job, listed: Job) -> Job:
    """`job` with the nodes that the user listed."""
    if job is NO_SCHEDULER:
        return listed
    # How many processes the scheduler planned for each host holds for the user's list too.
    planned = {hostlist.short(host): slots for host, slots in zip(job.hosts, job.slots, strict=False)}
    slots = tuple(planned.get(hostlist.short(host), 0) for host in listed.hosts)
    return replace(
        job,
        hosts=listed.hosts,
        num_nodes=listed.num_nodes,
        is_shared=True,
        is_host_certain=job.is_host_certain and listed.hosts == job.hosts,
        slots=slots if all(slots) else (),
        problem=None,
        sources={**job.sources, "hosts": listed.sources["hosts"], "num_nodes": listed.sources["num_nodes"]},
    )


def by_host(launcher: str, mark: str, env: Environment, job: Job, fix: str) -> Task:
    """The only task on this host, of a `launcher` that gives no ranks; `mark` is the variable that shows it.

    Raises:
        MusterError: the hosts are unknown, or this one is not clearly one of them.
    """
    if job.problem:
        raise job.problem
    source = job.sources["hosts"]
    if (own := Reader(env, fix).own_index(job.hosts, source)) is None:
        wrong = f"this host, {env.host}, is not in the job's list of nodes"
        raise MusterError(wrong, seen=f"{source}: {' '.join(job.hosts[:20])}", fix=fix)
    note = f"{launcher} gives no ranks: one process on each of the {len(job.hosts)} nodes is assumed"
    sources = {"launcher": mark, "node_rank": f"the place of {env.host} in {source}"}
    return Task.one_a_node(launcher, own, len(job.hosts), job.hosts, sources, (note,) if len(job.hosts) > 1 else ())


def task(env: Environment, job: Job) -> Task | None:
    """The only task on this host, where MUSTER_HOSTS lists the hosts and no scheduler does.

    Raises:
        MusterError: this host is not clearly one of them.
    """
    if job.scheduler != "manual":
        return None
    return by_host("manual", job.sources["hosts"], env, job, f"{FIX}; or --nnodes N --node-rank I")


TASKS = {"manual": task}
