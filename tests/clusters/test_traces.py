"""A launch in a container that got none of its job's variables, under real schedulers and launchers: all tasks refuse.

An environment of PATH and Apptainer's own variable stands in for the container; the processes above it are real.
"""

import os
import re
import shlex
from collections.abc import Callable
from typing import Any

import pytest

from tests.clusters.grid_engine import GridEngineCluster
from tests.clusters.mpi import MpiHosts, hydra, openmpi
from tests.clusters.slurm import SlurmCluster
from tests.clusters.weights import TRAIN, lines_of_error

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

CLEAN = ["env", "-i", f"PATH={os.environ['PATH']}", "APPTAINER_CONTAINER=/image.sif"]
DRY = [*CLEAN, TRAIN, "ddp", "--dry-run", "--nproc-per-node=1"]


WRONG = "error: this container is inside a job of {}, but none of the job's variables reached it"


def refused(text: str, owner: str, process: str) -> None:
    """Asserts that `text` has the refusal, with the process by which the job was noticed."""
    wrong, seen, fix = lines_of_error(text)[:3]
    assert wrong == WRONG.format(owner)
    assert f"the process {process} above this one" in seen
    assert "leave --cleanenv or --containall out" in fix


def test_slurm(slurm2: SlurmCluster) -> None:
    done = slurm2.srun("-N2", "--ntasks-per-node=1", *DRY)
    assert done.returncode != 0
    assert done.stderr.count("inside a job of slurm") == 2
    assert done.stdout == ""
    batch = slurm2.sbatch(f"{shlex.join(DRY)}\n", "-N2")
    refused(batch.output, "slurm", "slurmstepd")


def test_slurm_with_one_node_by_option(slurm2: SlurmCluster) -> None:
    done = slurm2.srun("-N1", "-n1", *DRY, "--nnodes=1")
    assert done.returncode == 0, done.stderr
    assert "-m muster.train ddp" in done.stdout


def test_grid_engine(grid_engine2: GridEngineCluster) -> None:
    job = grid_engine2.qsub(f"{shlex.join(DRY)}\n", "-pe", "two", "4")
    assert job.exit_code == 2
    refused(job.output, "grid_engine", "sge_shepherd")


@pytest.mark.parametrize(
    ("launch", "processes"),
    [
        pytest.param(openmpi, {"mpirun.openmpi", "orted"}, id="openmpi"),
        pytest.param(hydra, {"hydra_pmi_proxy"}, id="hydra"),
    ],
)
def test_mpi(mpi_hosts: MpiHosts, launch: Callable[..., Any], processes: set[str]) -> None:
    """On the host that the launch starts from, and on the other."""
    for host in mpi_hosts.names:
        done = launch(mpi_hosts, DRY, ranks={host: 1}, check=False)
        assert done.returncode != 0
        assert done.stdout.count("-m muster.train") == 0
        lines = lines_of_error(done.stderr)
        assert lines[0] == WRONG.format("mpi")
        assert re.findall(r"the process (\S+) above", lines[1])[0] in processes
