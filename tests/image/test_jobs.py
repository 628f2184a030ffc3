"""The job scripts in jobs/, as users submit them: on two hosts with the SIF, with the weights of one process."""

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from muster.paths import ROOT
from tests.clusters.grid_engine import GridEngineCluster
from tests.clusters.slurm import SlurmCluster
from tests.clusters.weights import ONE_THREAD, STEPS, assert_world_of_four
from tests.fabric import nodes
from tests.image.conftest import FIRST_TEST_S
from tests.image.sif import Sif

pytestmark = [pytest.mark.image, pytest.mark.cluster, pytest.mark.timeout(FIRST_TEST_S)]

HOSTS = ("node01", "node02")
FABRIC = "fabric: slingshot: libnccl-net.so, libfabric.so.1, libcxi.so.1 from the host"


def job_env(sif: Sif, folder: Path) -> Mapping[str, str]:
    """The variables of a login with Apptainer on PATH, and with the image's path."""
    programs = folder / "bin"
    programs.mkdir()
    (programs / "apptainer").symlink_to(sif.apptainer)
    env = sif.env(**ONE_THREAD, MUSTER_IMAGE=str(sif.path))
    return {**env, "PATH": f"{programs}:{env['PATH']}"}


def test_slurm_with_a_library_of_the_hosts_network(
    slurm2: SlurmCluster, image_sif: Sif, four_ranks: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    """A stand-in for Slingshot's plugin lies on the hosts: the containers find it below /host, and load it."""
    tree = nodes.host(tmp_path / "host")
    (tmp_path / "site.toml").write_text(nodes.SITE.format(folder=f"{tree}{nodes.FOLDER}"))
    loaded = slurm2.shared / "loaded"
    env = {
        **job_env(image_sif, tmp_path),
        "MUSTER_SITE": str(tmp_path / "site.toml"),
        "LOADED": str(loaded),
    }
    arguments = (*STEPS, "--nproc-per-node=2", "--fabric=slingshot")
    argv = ("sbatch", "--parsable", ROOT / "jobs" / "slurm.sbatch", *arguments)
    job = slurm2.job(slurm2.run(*argv, env=env, check=True).stdout)
    job.wait(400)
    assert job.state == "COMPLETED", job.output
    assert "2 nodes x 2 = 4 ranks" in job.output
    assert job.output.count(FABRIC) == 1, job.output
    assert_world_of_four(slurm2.shared / "runs" / f"muster-{job.id}", four_ranks, HOSTS)
    # Each host has loaded the plugin before the ranks started, as a check.
    names = nodes.loaded(loaded)
    assert set(names) == {"libcxi.so.1.5.0", "libfabric.so.1.25.0", "libnccl-net.so"}
    assert names.count("libnccl-net.so") >= len(HOSTS)


@pytest.mark.long
def test_grid_engine(
    grid_engine2: GridEngineCluster, image_sif: Sif, four_ranks: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    env = job_env(image_sif, tmp_path)
    script = (ROOT / "jobs" / "grid-engine.sge").read_text()
    options = ("-pe", "two", "4", "-v", ",".join(name for name in env if name not in ("HOME", "LANG")))
    job = grid_engine2.submit(script, *options, arguments=(*STEPS, "--nproc-per-node=2"), env=env).wait(400)
    assert job.exit_code == 0, job.output
    assert "2 nodes x 2 = 4 ranks" in job.output
    assert_world_of_four(grid_engine2.shared / "runs" / f"muster-{job.id}", four_ranks, HOSTS)
    grid_engine2.idle()
