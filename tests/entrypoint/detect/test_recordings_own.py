"""The recordings of this project's own clusters: detection finds the place in the file's name, or refuses.

A file is SCENARIO.HOST.RANK.env, and all files of a scenario are its world. Folders with an expected.toml are compared
with that too (test_recordings.py); here only the files' names count.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from muster.entrypoint import recording
from tests.entrypoint import recorded

# Scenarios that one process can't know from its environment: what it finds instead, and why that does no harm.
BELIEVED = {
    # Hydra over ssh, host list node01,node02,node01: each process is told that it is alone on its node.
    "hydra_interleaved": "three nodes of one process each; two of them are one host",
    # The process alone on its node takes the others to be alone as well. Those know better, and refuse.
    "hydra_uneven.node01": "three nodes of one process each",
    # Slurm leaves the variables of a step in a job that was submitted inside it; here they fit this job's, too.
    "sbatch_in_task_of_same_shape": "task 0 of that step, which waits for task 1 in vain",
}
# Each task of an array is a job, and a world of its own.
ARRAYS = ("array_script",)


@dataclass(frozen=True)
class Process:
    """A recorded process, and the ranks of its scenario by host."""

    file: str
    scenario: str
    host: str
    rank: str
    ranks: dict[str, list[str]]


def processes() -> Iterator[Process]:
    for folder in sorted(recorded.FOLDERS.glob("*_own")):
        names = [tuple(file.stem.split(".")) for file in sorted(folder.glob("*.env"))]
        for name in names:
            scenario, host, rank = name[0], name[1], name[2]
            ranks: dict[str, list[str]] = {}
            for other in names:
                if other[0] == scenario:
                    ranks.setdefault(other[1], []).append(other[2])
            yield Process(f"{folder.name}/{'.'.join(name)}.env", scenario, host, rank, ranks)


ALL = list(processes())


@pytest.mark.parametrize("process", ALL, ids=lambda process: process.file.removesuffix(".env"))
def test_a_recorded_process_is_where_its_name_says_or_refused(process: Process) -> None:
    found = recorded.find(recording.load(recorded.FOLDERS / process.file))
    if found is None or {process.scenario, f"{process.scenario}.{process.host}"} & set(BELIEVED):
        return
    if process.scenario in ARRAYS:
        assert (found.num_nodes, found.launcher) == (1, "local")
        return
    assert found.num_nodes == len(process.ranks)
    assert found.tasks_on_node == len(process.ranks[process.host])
    if found.mode == "worker":
        own = sorted(process.ranks[process.host], key=int)
        assert (found.rank, found.local_rank) == (int(process.rank), own.index(process.rank))
        assert found.world_size == sum(len(ranks) for ranks in process.ranks.values())


# Launches that must be found, and not refused.
STARTED = {
    "hydra_agent", "hydra_in_salloc", "hydra_in_salloc_one_a_node", "hydra_in_salloc_ppn1", "hydra_in_sbatch",
    "hydra_master", "hydra_one_a_node", "hydra_one_host", "hydra_reversed", "intel_mpi_one_a_node",
    "ompi_agent", "ompi_in_salloc_one_a_node",
    "ompi_in_sbatch", "ompi_in_sbatch_by_node", "ompi_master", "ompi_one_a_node", "ompi_one_host", "ompi_reversed",
    "srun_in_sbatch_in_task", "srun_in_task", "hydra", "ompi", "serial_script", "pe_one_host_script",
}  # fmt: skip


def test_the_usual_launches_are_found() -> None:
    found = [(process.scenario, recorded.find(recording.load(recorded.FOLDERS / process.file))) for process in ALL]
    assert {scenario for scenario, _ in found} >= STARTED
    assert not {scenario for scenario, allocation in found if allocation is None} & STARTED
