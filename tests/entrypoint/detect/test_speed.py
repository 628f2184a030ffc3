"""Detection of a job of 10,000 nodes: its work grows no faster than the nodes, and nothing heavy is loaded for it.

How long it takes is measured by benchmarks/launch.py.
"""

import subprocess
import sys
from collections.abc import Callable

import pytest

from muster.entrypoint import recording
from muster.entrypoint.detect import hostlist
from muster.entrypoint.environment import Environment
from muster.paths import ROOT
from tests.entrypoint.recorded import FOLDERS, detect


def names(nodes: int) -> list[str]:
    return [f"node{number:05}" for number in range(nodes)]


def slurm(nodes: int) -> Environment:
    listed = f"node[{','.join(str(number).zfill(5) for number in range(nodes))}]"
    task = recording.load(FOLDERS / "slurm" / "b_srun_N2_1per.node02.1.env")
    numbers = {name: str(nodes) for name in ("SLURM_JOB_NUM_NODES", "SLURM_STEP_NUM_NODES", "SLURM_STEP_NUM_TASKS")}
    lists = {name: listed for name in ("SLURM_JOB_NODELIST", "SLURM_STEP_NODELIST", "SLURM_NODELIST")}
    tasks = {name: f"1(x{nodes})" for name in ("SLURM_TASKS_PER_NODE", "SLURM_STEP_TASKS_PER_NODE")}
    own = {name: str(nodes - 1) for name in ("SLURM_NODEID", "SLURM_PROCID", "SLURM_GTIDS")}
    return Environment({**task, **numbers, **lists, **tasks, **own}, names(nodes)[-1])


def heterogeneous_slurm(nodes: int) -> Environment:
    """A job of two groups: one node, and all others."""
    groups = {"0": names(nodes)[0], "1": f"node[00001-{nodes - 1:05}]"}
    lists = {f"SLURM_JOB_NODELIST_HET_GROUP_{group}": listed for group, listed in groups.items()}
    env = slurm(nodes)
    return Environment({**env, **lists, "SLURM_HET_SIZE": "2"}, env.host)


def pbs(nodes: int) -> Environment:
    task = recording.load(FOLDERS / "pbs" / "pbs_cgroupshook_gpu1_pbsdsh.pbsn2.task40000001.618.env")
    return Environment(dict(task), names(nodes)[-1], {"PBS_NODEFILE": "\n".join(names(nodes))})


def hydra(nodes: int) -> Environment:
    ranks = {"PMI_RANK": str(4 * nodes - 2), "PMI_SIZE": str(4 * nodes), "MPI_LOCALRANKID": "2", "MPI_LOCALNRANKS": "4"}
    hosts = " ".join(f"{name}.x.org" for name in names(nodes))
    return Environment({**ranks, "MUSTER_HOSTS": hosts}, names(nodes)[-1])


def calls(make: Callable[[int], Environment], nodes: int) -> int:
    """The number of function calls in a process's first detection; Python's own functions count too."""
    env, number = make(nodes), 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal number
        number += event in ("call", "c_call")

    hostlist.expand.cache_clear()
    hostlist.index_of.cache_clear()
    before = sys.getprofile()
    sys.setprofile(count)
    try:
        found = detect(env)
    finally:
        sys.setprofile(before)
    assert (found.num_nodes, found.node_rank) == (nodes, nodes - 1)
    return number


@pytest.mark.parametrize("make", [slurm, heterogeneous_slurm, pbs, hydra])
def test_ten_times_the_nodes_are_ten_times_the_work_at_most(make: Callable[[int], Environment]) -> None:
    assert calls(make, 10_000) <= 10 * calls(make, 1_000)


def test_detection_loads_nothing_heavy() -> None:
    code = (
        "import sys, muster.entrypoint.detect.resolve; print(*sorted({name.partition('.')[0] for name in sys.modules}))"
    )
    answer = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    loaded = set(answer.stdout.split())
    assert not loaded & {"torch", "numpy", "rich", "asyncio", "http", "hypothesis"}
