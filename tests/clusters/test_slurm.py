"""The tests' Slurm itself: real steps, jobs, allocations and devices on fake hosts."""

import pytest

from tests.clusters.slurm import SlurmCluster

pytestmark = pytest.mark.cluster


def test_srun_starts_a_task_a_node(slurm2: SlurmCluster) -> None:
    done = slurm2.srun("-N2", "hostname")
    assert sorted(done.stdout.split()) == ["node01", "node02"], done
