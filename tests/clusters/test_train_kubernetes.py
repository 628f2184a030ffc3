"""The pods of a manifest as fake hosts: they wait for each other's names, and train as one world.

No Kubernetes runs here: pods.py stands in for its controllers, /etc/hosts for its name server.
"""

import subprocess
from pathlib import Path

import pytest
import torch

from muster.entrypoint.jobs.kubernetes import KINDS
from tests.clusters.hosts import Hosts
from tests.clusters.requirements import require_namespaces
from tests.clusters.weights import ONE_THREAD, STEPS, TRAIN, assert_world_of_four
from tests.jobs import pods

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]


def name_server_learns(workdir: Path, hosts: Hosts, made: list[pods.Pod]) -> None:
    """Adds all pods' names to the /etc/hosts of each: they have addresses by now."""
    for pod in made:
        with (workdir / "hosts" / pod.host / "hosts").open("a") as file:
            file.writelines(f"{hosts.addresses[other.host]} {other.address}\n" for other in made)


@pytest.mark.parametrize(
    "kind", [pytest.param(each, marks=pytest.mark.long) if each == "job" else each for each in KINDS]
)
def test_the_pods_of_a_manifest_train_as_one_world(
    kind: str, tmp_path: Path, four_ranks: dict[str, torch.Tensor]
) -> None:
    require_namespaces()
    workspace = tmp_path / "workspace"
    workspace.mkdir()
    command = (TRAIN, "ddp", *STEPS, f"--name={kind}", "--resume=auto")
    made = pods.of(pods.manifest(kind, command=command, gpus=0))
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with Hosts([pod.host for pod in made], tmp_path) as hosts:
        waiting = [hosts.popen(pod.host, pod.before) for pod in made if pod.before]
        name_server_learns(tmp_path, hosts, made)
        assert [process.wait(timeout=400) for process in waiting] == [0] * len(waiting)
        # The master is started last: the others wait for it.
        running = [
            hosts.popen(pod.host, pod.command, env={**pod.env, **ONE_THREAD}, cwd=workspace, **pipes)
            for pod in reversed(made)
        ]
        said = [process.communicate(timeout=400)[0] for process in running]
        assert [process.returncode for process in running] == [0, 0], said
    assert_world_of_four(workspace / "runs" / kind, four_ranks, tuple(pod.host for pod in made))
