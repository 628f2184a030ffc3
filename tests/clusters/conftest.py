"""Clusters for every test below this folder; what they offer is told in `slurm.SlurmCluster` and `hosts.Hosts`."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from tests.clusters.requirements import SLURM_PROGRAMS, require_namespaces, require_programs
from tests.clusters.slurm import SlurmCluster

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
    """Starts a cluster of this test's own: `slurm_cluster(["n1-ib", "n2-ib"], gpus=2)`; options of `SlurmCluster`."""
    _require_slurm()
    with contextlib.ExitStack() as running:

        def start(nodes: Sequence[str], **options: Any) -> SlurmCluster:
            return running.enter_context(SlurmCluster(tmp_path_factory.mktemp("slurm"), nodes, **options))

        yield start


def _require_slurm() -> None:
    require_programs(*SLURM_PROGRAMS)
    require_namespaces()
