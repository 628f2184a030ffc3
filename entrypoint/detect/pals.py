"""Cray PALS, the mpiexec of HPE Cray EX with PBS: this process's task.

    PALS_APID=... PALS_RANKID=3 PALS_NODEID=1 PALS_LOCAL_RANKID=1 PALS_LOCAL_SIZE=2 PALS_APINFO=/var/run/palsd/...

Slurm (mpi/cray_shasta) and Flux (cray-pals) set PALS_ variables for their own tasks, because Cray MPI reads them: then
the launcher is srun or Flux.

The hosts are in the binary file PALS_APINFO. Its header, in the machine's native layout, gives the record size, the
offset and the number of records of each table. Versions 1 and 5 differ in the fields after `nnics` and in the tables
for networks, not in those of nodes and processes.

    int version; size_t total_size; size_t comm_profile_size, comm_profile_offset; int ncomm_profiles;
    size_t cmd_size, cmd_offset; int ncmds; size_t pe_size, pe_offset; int npes;
    size_t node_size, node_offset; int nnodes; size_t nic_size, nic_offset; int nnics;
    process: int localidx, cmdidx, nodeidx;      node: int nid; char hostname[64];

Source: https://cpe.ext.hpe.com/docs/latest/mpt/mpich/intro_mpi.html
Source: https://github.com/SchedMD/slurm/blob/master/src/plugins/mpi/cray_shasta/mpi_cray_shasta.c
Source: https://github.com/SchedMD/slurm/blob/master/src/plugins/mpi/cray_shasta/apinfo.c (version 1)
Source: https://github.com/flux-framework/flux-coral2/tree/master/src/common/libapinfo (versions 1 and 5)
"""

import re
import struct
from collections import Counter
from dataclasses import replace
from typing import Any

from muster.entrypoint.detect import hostlist, mpi, pbs
from muster.entrypoint.detect.allocation import Job, Rejected, Task
from muster.entrypoint.detect.reader import Reader
from muster.entrypoint.environment import Environment
from muster.errors import MusterError

PREFIXES = ("PALS_",)
MOUNT = re.compile(r"/palsd(?:/|$)")
PARENT = re.compile(r"^palsd$")

FIX = "start the command by mpiexec itself, from a shell without another run's PALS_ variables"
FIX_HOSTS = "set MASTER_ADDR to the first node's name"
_NAMES = ("PALS_RANKID", "PALS_NODEID", "PALS_LOCAL_RANKID")
VARIABLES = (*_NAMES, "PALS_APID", "PALS_APINFO", "PALS_LOCAL_SIZE", "PALS_SPOOL_DIR", "PMI_LOCAL_SIZE")
BINARY_FILES = ("PALS_APINFO",)


def task(env: Environment, job: Job) -> Task | Rejected | None:
    """This process's task of PALS, checked against PALS's file of nodes where that can be read."""
    if not {"PALS_APID", *_NAMES} & env.keys():
        return None
    read = Reader(env, FIX)
    if owner := _real_launcher(env):
        return Rejected(f"{read.seen('PALS_APID', 'PALS_RANKID')} was set by {owner}, for Cray MPI", is_certain=True)
    if job.scheduler not in ("pbs", "manual", "local"):
        return Rejected(f"{read.seen('PALS_APID')}, but this is a job of {job.scheduler}")
    if pbs.is_task(env):
        # PALS's own daemons start its processes with the job script's environment, whose PBS_TASKNUM is no task's.
        return Rejected(f"{read.seen('PALS_APID', 'PBS_TASKNUM')}: pbsdsh, not PALS, started this process")
    rank, node_rank, local_rank = (read.number(name) for name in _NAMES)
    shown = ("PALS_APID", *_NAMES, "PALS_LOCAL_SIZE", "PMI_RANK", "PMI_SIZE", "PALS_APINFO")
    fits = env.get("PMI_RANK", str(rank)) == str(rank) and bool(env.get("PALS_APID"))
    read.agree(fits, "PALS's variables contradict each other", *shown)
    try:
        data = Reader(env, FIX_HOSTS).binary_file("PALS_APINFO")
    except MusterError as why:
        return _by_rank(env, job, node_rank, why)
    source = read.seen("PALS_APINFO")
    try:
        hosts, processes = parse_apinfo(data)
    except ValueError as reason:
        raise MusterError(f"PALS's file of nodes can't be read: {reason}", seen=source, fix=FIX) from None
    counts = Counter(node for node, _ in processes)
    tasks = tuple(counts[node] for node in range(len(hosts)))
    fits = (
        processes[rank : rank + 1] == ((node_rank, local_rank),)
        and min(tasks) > 0
        and env.get("PMI_SIZE", str(len(processes))) == str(len(processes))
        and env.get("PALS_LOCAL_SIZE", str(tasks[node_rank])) == str(tasks[node_rank])
    )
    read.agree(fits, "PALS's variables and its file of nodes disagree", *shown)
    is_first = max(tasks) == 1 or processes[0][0] == 0
    read.agree(is_first, "rank 0 is not on the first node, where the ranks would meet", *shown)
    return Task(
        launcher="pals",
        node_rank=node_rank,
        local_rank=local_rank,
        rank=rank,
        tasks_per_node=tasks,
        hosts=hosts,
        job_id=env["PALS_APID"],
        counts_nodes=True,
        sources={
            "launcher": f"PALS_RANKID={rank}",
            "num_nodes": source,
            "hosts": source,
            "node_rank": f"PALS_NODEID={node_rank}",
            "local_rank": f"PALS_LOCAL_RANKID={local_rank}",
            "tasks_on_node": source,
        },
    )


def _real_launcher(env: Environment) -> str | None:
    """The launcher other than PALS that set PALS's variables, here or in the step that submitted this job; or None."""
    # Slurm's value is JOB.STEP, two numbers; PALS's own is a UUID.
    if "SLURM_JOB_ID" in env and re.fullmatch(r"[0-9]+\.[0-9]+", env.get("PALS_APID", "")):
        return "srun"
    folder = env.get("FLUX_JOB_TMPDIR")
    if folder and env.get("PALS_SPOOL_DIR") == folder and env.get("PALS_RANKID") == env.get("FLUX_TASK_RANK"):
        return "Flux"
    return None


def _by_rank(env: Environment, job: Job, node_rank: int, why: MusterError) -> Task:
    """The task without PALS's file: by PMI's sizes, and the scheduler's hosts if this host is among them."""
    # Without PMI_SIZE, as with PALS_PMI=pmix, an address does not help: only the file has the number of processes.
    way = why.fix if "PMI_SIZE" in env else why.fix.removesuffix(f"; or {FIX_HOSTS}")
    read = Reader(env, f"make the file of its nodes visible: {way}")
    local_size = "PALS_LOCAL_SIZE" if "PALS_LOCAL_SIZE" in env else "PMI_LOCAL_SIZE"
    names = mpi.Names("PALS_RANKID", "PMI_SIZE", "PALS_LOCAL_RANKID", local_size)
    task = mpi.by_rank("pals", names, read, job, job_id=env["PALS_APID"], known_node_rank=node_rank)
    is_known = task.num_nodes == 1 or task.hosts
    return task if is_known else replace(task, notes=(f"{why.wrong}; {why.fix}", *task.notes))


# `i4x` is an int and the gap before the next size_t. All machines with PALS are little-endian.
_HEADER = struct.Struct("<i4xQ QQi4x QQi4x QQi4x QQi4x QQi4x")
_PROCESS = struct.Struct("<iii")
_NODE = struct.Struct("<i64s")


def parse_apinfo(data: bytes) -> tuple[tuple[str, ...], tuple[tuple[int, int], ...]]:
    """The content of an apinfo file: the nodes' names by PALS_NODEID; (node, local rank) of processes by PALS_RANKID.

    Raises:
        ValueError: an unknown version, a table outside of the file, an invalid node or name; the message says which.
    """
    if len(data) < _HEADER.size:
        raise ValueError(f"{len(data)} bytes are too few for a header")
    header = _HEADER.unpack_from(data)
    version, total_size = header[:2]
    if version not in (1, 5):
        raise ValueError(f"version {version} is unknown, only 1 and 5 are known")
    if total_size > len(data):
        raise ValueError(f"{len(data)} of {total_size} bytes are there")
    pe_size, pe_offset, num_pes, node_size, node_offset, num_nodes = header[8:14]
    nodes = _records(data, _NODE, node_size, node_offset, num_nodes)
    hosts = tuple(bytes(name).split(b"\0", 1)[0].decode("ascii", "replace") for _, name in nodes)
    if wrong := [name for name in hosts if not hostlist.is_name(name)]:
        raise ValueError(f"{wrong[0]!r} is no host name")
    records = _records(data, _PROCESS, pe_size, pe_offset, num_pes)
    processes = tuple((int(node), int(local)) for local, _, node in records)
    if any(not (0 <= node < len(hosts) and local >= 0) for node, local in processes):
        raise ValueError("a process is on a node that is not listed")
    if len(set(hosts)) != len(hosts) or len(set(processes)) != len(processes):
        raise ValueError("a node or a process is listed twice")
    return hosts, processes


def _records(data: bytes, layout: struct.Struct, size: int, offset: int, count: int) -> list[tuple[Any, ...]]:
    """The records of one table, by the fields of `layout`; in the file they may be longer."""
    is_inside = size >= layout.size and offset >= _HEADER.size and offset + size * count <= len(data)
    if not (1 <= count <= hostlist.MAX_COUNT and is_inside):
        raise ValueError(f"{count} records of {size} bytes at {offset} do not fit into {len(data)} bytes")
    return [layout.unpack_from(data, offset + size * index) for index in range(count)]


TASKS = {"pals": task}
