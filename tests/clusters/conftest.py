"""Clusters for every test below this folder.

They are described in `slurm.SlurmCluster`, `grid_engine.GridEngineCluster`, `mpi.MpiHosts` and `hosts.Hosts`.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.clusters import faults
from tests.clusters.faults import Training, runs_through
from tests.clusters.grid_engine import GridEngineCluster
from tests.clusters.hosts import Hosts
from tests.clusters.mpi import MpiHosts
from tests.clusters.requirements import (
    GRID_ENGINE_PROGRAMS,
    MPI_PROGRAMS,
    SLURM_PROGRAMS,
    require_namespaces,
    require_programs,
)
from tests.clusters.slurm import SlurmCluster
from tests.clusters.surviving import LONG, train_undisturbed
from tests.clusters.weights import train_single

NAMES = ("node01", "node02", "node03")


@pytest.fixture(scope="session")
def slurm2(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    """node01 and node02 with 2 GPUs and 4 CPUs each, shared by all tests of the session."""
    _require_slurm()
    with SlurmCluster(tmp_path_factory.mktemp("slurm2"), NAMES[:2], gpus=2) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def slurm3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    """node01 to node03 with 2 GPUs and 4 CPUs each, shared by all tests of the session."""
    _require_slurm()
    with SlurmCluster(tmp_path_factory.mktemp("slurm3"), NAMES, gpus=2) as cluster:
        yield cluster


@pytest.fixture
def slurm_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., SlurmCluster]]:
    """Starts a cluster for one test: `slurm_cluster(["n1-ib", "n2-ib"], gpus=2)`; options of `SlurmCluster`."""
    _require_slurm()
    with contextlib.ExitStack() as running:

        def start(nodes: Sequence[str], **options: Any) -> SlurmCluster:
            return running.enter_context(SlurmCluster(tmp_path_factory.mktemp("slurm"), nodes, **options))

        yield start


@pytest.fixture(scope="session")
def grid_engine2(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GridEngineCluster]:
    """node01 and node02 with 4 slots and 2 counted GPUs each, shared by all tests of the session."""
    _require_grid_engine()
    with GridEngineCluster(tmp_path_factory.mktemp("grid_engine2"), NAMES[:2], gpus=2) as cluster:
        yield cluster


@pytest.fixture
def grid_engine_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., GridEngineCluster]]:
    """Starts a cluster for one test: `grid_engine_cluster(["a", "b"], slots=2)`; options of `GridEngineCluster`."""
    _require_grid_engine()
    with contextlib.ExitStack() as running:

        def start(nodes: Sequence[str], **options: Any) -> GridEngineCluster:
            folder = tmp_path_factory.mktemp("grid_engine")
            return running.enter_context(GridEngineCluster(folder, nodes, **options))

        yield start


@pytest.fixture(scope="session")
def mpi_hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MpiHosts]:
    """node01 and node02 with ssh between them and no scheduler, shared by all tests of the session."""
    _require_mpi()
    with MpiHosts(tmp_path_factory.mktemp("mpi_hosts"), NAMES[:2]) as hosts:
        yield hosts


@pytest.fixture
def mpi_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., MpiHosts]]:
    """Starts hosts for one test: `mpi_cluster(["a", "b"])`; options of `MpiHosts`."""
    _require_mpi()
    with contextlib.ExitStack() as running:

        def start(names: Sequence[str], **options: Any) -> MpiHosts:
            return running.enter_context(MpiHosts(tmp_path_factory.mktemp("mpi"), names, **options))

        yield start


@pytest.fixture(scope="session")
def four_ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """The parameters with which four ranks have to end: those of one process; see `weights.train_single`."""
    return train_single(tmp_path_factory.mktemp("four_ranks"), 4)


@pytest.fixture(scope="session")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An undisturbed run of `faults.LONG` on two hosts, with all its checkpoints."""
    require_namespaces()
    folder = tmp_path_factory.mktemp("straight")
    with Hosts(NAMES[:2], folder) as hosts:
        return runs_through(Training(hosts, folder), faults.LONG)


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """The parameters with which `surviving.LONG` on two ranks has to end, whatever disturbs it."""
    return train_undisturbed(tmp_path_factory.mktemp("undisturbed"), LONG)


@pytest.fixture(scope="session")
def mpi_in_slurm(slurm2: SlurmCluster) -> SlurmCluster:
    """The cluster of `slurm2`, for MPI launchers inside its allocations."""
    _require_mpi()
    return slurm2


def _require_slurm() -> None:
    require_programs(*SLURM_PROGRAMS)
    require_namespaces()


def _require_grid_engine() -> None:
    require_programs(*GRID_ENGINE_PROGRAMS)
    require_namespaces()


def _require_mpi() -> None:
    require_programs(*MPI_PROGRAMS)
    require_namespaces()
