"""The image inside a real Slurm: Apptainer by srun, as users start it, and podman on the hosts' networks."""

import json
import os
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.clusters.deadline import wait_for
from tests.clusters.hosts import Hosts
from tests.clusters.requirements import refuse
from tests.clusters.slurm import SlurmCluster
from tests.clusters.weights import ONE_THREAD, STEPS, assert_world_of_four, lines_of_error, summary
from tests.image.conftest import FIRST_TEST_S
from tests.image.podman import Podman
from tests.image.sif import Sif

pytestmark = [pytest.mark.image, pytest.mark.cluster, pytest.mark.timeout(FIRST_TEST_S)]

TRAIN = ("train", "ddp", *STEPS)


@pytest.mark.parametrize(
    "tasks", [pytest.param(1, id="a task a node"), pytest.param(2, id="a task a rank", marks=pytest.mark.long)]
)
def test_two_nodes_train_to_the_weights_of_one_process(
    slurm2: SlurmCluster, image_sif: Sif, four_ranks: dict[str, torch.Tensor], tasks: int
) -> None:
    name = f"sif{tasks}"
    argv = image_sif.argv(*TRAIN, f"--name={name}")
    done = slurm2.srun("-N2", f"--ntasks-per-node={tasks}", *argv, timeout=600, env=image_sif.env(**ONE_THREAD))
    assert done.returncode == 0, done.stderr
    assert "2 nodes x 2 = 4 ranks" in done.stderr
    assert_world_of_four(slurm2.shared / "runs" / name, four_ranks, ("node01", "node02"))


@pytest.mark.long
def test_three_nodes_from_a_batch_script(slurm3: SlurmCluster, image_sif: Sif) -> None:
    command = " ".join(image_sif.argv(*TRAIN, "--nproc-per-node=1", "--name=three"))
    script = f"srun -n $SLURM_NNODES --ntasks-per-node=1 {command}\n"
    job = slurm3.sbatch(script, "-N3", timeout=600, env=image_sif.env())
    assert job.state == "COMPLETED", job.output
    found = summary(slurm3.shared / "runs" / "three")
    assert (found["world_size"], sorted(found["hosts"])) == (3, ["node01", "node02", "node03"])


def test_an_option_that_removes_the_jobs_variables_is_named(slurm2: SlurmCluster, image_sif: Sif) -> None:
    argv = image_sif.argv("train", "ddp", options=["--cleanenv"])
    done = slurm2.srun("-N2", "--ntasks-per-node=1", *argv, timeout=600, env=image_sif.env())
    assert done.returncode == 2
    assert len(lines_of_error(done.stderr)) >= 3
    assert "slurm" in done.stderr
    assert "--cleanenv" in done.stderr
    assert not list(Path(slurm2.shared / "runs").glob("resnet*"))


@pytest.fixture
def control_group() -> Iterator[Path]:
    """A control group as Slurm makes one for each step of a job; the fake hosts' Slurm makes none."""
    mounts = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    roots = [Path(mount[1]) for mount in mounts if mount[2] == "cgroup2"]
    if not roots:
        refuse("no file system of control groups, version 2, is mounted")
    top = roots[0] / f"test-{os.getpid()}"
    step = top / "slurmstepd.scope" / "job_9" / "step_0"
    step.mkdir(parents=True)
    yield step
    wait_for("the control group to be empty", lambda: not (step / "cgroup.procs").read_text(), 30)
    for folder in (step, step.parent, step.parent.parent, top):
        folder.rmdir()


def test_containall_hides_all_but_the_control_group(image_sif: Sif, control_group: Path, tmp_path: Path) -> None:
    argv = image_sif.argv("train", "ddp", "--max-steps=1", options=["--containall"])
    script = f"echo $$ > {control_group}/cgroup.procs && exec {shlex.join(argv)}"
    done = subprocess.run(
        ["sh", "-c", script], cwd=tmp_path, env=image_sif.env(), capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 2, done.stderr
    assert "slurm" in done.stderr
    assert "--containall" in done.stderr


@pytest.mark.parametrize("option", ["--cleanenv", "--containall"])
def test_the_printed_options_pass_a_job_in_spite_of_such_an_option(
    slurm2: SlurmCluster, image_sif: Sif, option: str
) -> None:
    """The host has no muster: the image prints the options for itself."""
    inner = " ".join(image_sif.argv("muster", "env", "--apptainer-args"))
    detect = " ".join(image_sif.argv("muster", "detect", "--json", options=[option, "$args"]))
    script = f'args=$({inner}) || exit 1; eval "{detect}"'
    done = slurm2.srun("-N2", "--ntasks-per-node=1", "sh", "-c", script, timeout=600, env=image_sif.env())
    assert done.returncode == 0, done.stderr
    assert re.findall(r'"num_nodes": (\d)', done.stdout) == ["2", "2"]
    assert sorted(re.findall(r'"node_rank": (\d)', done.stdout)) == ["0", "1"]


@pytest.mark.long
def test_two_podman_containers_on_the_hosts_networks(
    slurm2: SlurmCluster, podman: Podman, image: str, four_ranks: dict[str, torch.Tensor]
) -> None:
    """Each gets the variables of a task of the step by --env, and the network and the name of its host.

    podman itself can't run inside such a host: the tests start it outside, while the step waits.
    """
    folder = slurm2.shared / "podman"
    folder.mkdir()
    waiting = (
        f"env -0 > {folder}/$SLURM_NODEID.tmp; mv {folder}/$SLURM_NODEID.tmp {folder}/$SLURM_NODEID; exec sleep 600"
    )
    step = slurm2.hosts.popen(slurm2.login, ["srun", "-N2", "--ntasks-per-node=1", "sh", "-c", waiting], cwd=folder)
    containers: list[str] = []
    try:
        for index in range(2):
            wait_for(f"the task of node {index}", (folder / str(index)).exists, 60)
        for index, host in enumerate(slurm2.nodes):
            variables = dict(
                pair.split("=", 1) for pair in (folder / str(index)).read_text().split("\0") if "=" in pair
            )
            containers.append(started(podman, image, slurm2.hosts, host, variables, folder))
        assert [podman.wait(container, 300) for container in containers] == [0, 0], podman.logs(containers[0])
    finally:
        for container in containers:
            podman("rm", "--force", "--time=0", container, check=False)
        step.kill()
        slurm2.run("scancel", "--user=root", check=True)
        slurm2.idle()
    assert_world_of_four(folder / "runs" / "podman", four_ranks, ("node01", "node02"))


def started(podman: Podman, image: str, hosts: Hosts, host: str, variables: dict[str, str], folder: Path) -> str:
    """The id of a container on `host`, with the options that `muster env --docker-args` prints for these variables."""
    job = {name: value for name, value in variables.items() if name.startswith("SLURM_")}
    asked = [word for name in job for word in ("--env", name)]
    printed = podman("run", "--rm", *asked, image, "muster", "env", "--docker-args", env=job).stdout.split()
    assert printed[-2:] == ["--network", "host"]
    options = [
        "--detach",
        *printed[:-2],
        f"--network=ns:{hosts.network(host)}",
        f"--hostname={host}",
        "--env=OMP_NUM_THREADS=1",
    ]
    options += [f"--volume={hosts.workdir}/hosts/{host}/hosts:/etc/hosts:ro", f"--volume={folder}:/workspace"]
    return podman("run", *options, image, *TRAIN, "--name=podman", env=job).stdout.strip()


def test_detection_in_the_sif_is_that_of_the_host(slurm2: SlurmCluster, image_sif: Sif) -> None:
    argv = image_sif.argv("muster", "detect", "--json")
    done = slurm2.srun("-w", "node01", "-n1", *argv, timeout=600, env=image_sif.env())
    found = json.loads(done.stdout)
    assert (found["scheduler"], found["launcher"], found["hosts"]) == ("slurm", "srun", ["node01"])
