"""`muster run` and `muster env` for other programs: scripts for torchrun, TensorFlow, JAX; and on other networks."""

import json
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.clusters.hello import FOUR, hello, said
from tests.clusters.hosts import Hosts
from tests.clusters.requirements import require_namespaces
from tests.clusters.slurm import SlurmCluster
from tests.clusters.weights import MUSTER, ONE_THREAD, STEPS, TRAIN, summary

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

MODES = [pytest.param(1, id="agent"), pytest.param(2, id="worker")]


def where(tasks: int) -> list[str]:
    return ["-N2", "-n", str(2 * tasks), f"--ntasks-per-node={tasks}"]


@pytest.mark.parametrize("tasks", MODES)
def test_a_script_for_torchrun(slurm2: SlurmCluster, tasks: int) -> None:
    """In agent mode with an option as torchrun's users type it, with underscores."""
    options = ["--nproc_per_node=2"] if tasks == 1 else []
    done = slurm2.srun(*where(tasks), *hello(slurm2.shared, *options), timeout=400)
    assert done.returncode == 0, done.stderr
    assert said(done.stdout) == FOUR


# srun splits long lines: so each task writes its variables into a file of its own.
WRITE = """
import os, sys
name = os.path.join(sys.argv[1], os.uname().nodename + "." + os.environ["SLURM_LOCALID"])
with open(name, "w") as file:
    of_jax = [os.environ[name] for name in sorted(os.environ) if name.startswith("JAX_")]
    file.write(os.environ.get("TF_CONFIG") or "\\n".join(of_jax))
"""


def written(cluster: SlurmCluster, tasks: int, framework: str, folder: str) -> dict[str, str]:
    """The framework's variables of each task, by HOST.LOCALID."""
    path = cluster.shared / f"{folder}{tasks}"
    path.mkdir()
    argv = [MUSTER, "run", f"--framework={framework}", "--", sys.executable, "-c", WRITE, str(path)]
    done = cluster.srun(*where(tasks), *argv)
    assert done.returncode == 0, done.stderr
    return {file.name: file.read_text() for file in sorted(path.iterdir())}


@pytest.mark.parametrize("tasks", MODES)
def test_tensorflow(slurm2: SlurmCluster, tasks: int) -> None:
    found = {name: json.loads(text) for name, text in written(slurm2, tasks, "tensorflow", "tf").items()}
    assert list(found) == [f"node0{node}.{local}" for node in (1, 2) for local in range(tasks)]
    assert [config["task"] for config in found.values()] == [{"type": "worker", "index": i} for i in range(2 * tasks)]
    (workers,) = {json.dumps(config["cluster"]) for config in found.values()}
    addresses = json.loads(workers)["worker"]
    assert [address.partition(":")[0] for address in addresses] == ["node01"] * tasks + ["node02"] * tasks
    # Two workers of one host listen on two ports.
    assert len(set(addresses)) == 2 * tasks


@pytest.mark.parametrize("tasks", MODES)
def test_jax(slurm2: SlurmCluster, tasks: int) -> None:
    found = [text.splitlines() for text in written(slurm2, tasks, "jax", "jax").values()]
    assert len({address for address, *_ in found}) == 1
    assert found[0][0].startswith("node01:6")
    assert [rest for _, *rest in found] == [[str(2 * tasks), str(index)] for index in range(2 * tasks)]


@pytest.mark.parametrize("tasks", MODES)
def test_the_variables_for_a_shell(slurm2: SlurmCluster, tasks: int) -> None:
    """As ZIH's recipe sets TF_CONFIG: each task is a shell that evaluates the output of `muster env`."""
    path = slurm2.shared / f"shell{tasks}"
    path.mkdir()
    write = shlex.join([sys.executable, "-c", WRITE, str(path)])
    script = f'eval "$({shlex.quote(MUSTER)} env --format tensorflow)"; exec {write}'
    done = slurm2.srun(*where(tasks), "sh", "-c", script)
    assert done.returncode == 0, done.stderr
    indices = [json.loads(file.read_text())["task"]["index"] for file in sorted(path.iterdir())]
    assert indices == list(range(2 * tasks))


@pytest.fixture(scope="module")
def two_networks(tmp_path_factory: pytest.TempPathFactory, slurm2: SlurmCluster) -> Iterator[SlurmCluster]:
    """A cluster as at JSC: node01i is node01's name in the InfiniBand network. It has the requirements of `slurm2`."""
    with SlurmCluster(tmp_path_factory.mktemp("fabric"), slurm2.nodes, fabric_suffix="i") as cluster:
        yield cluster


@pytest.mark.parametrize(
    "given", [{"MUSTER_ADDRESS_SUFFIX": "i"}, {"MASTER_ADDR": "node01i"}], ids=["suffix", "address"]
)
def test_names_of_the_fabric(two_networks: SlurmCluster, given: dict[str, str]) -> None:
    """The name is given by our variable, or as in a job script for torchrun."""
    done = two_networks.srun(*where(1), *hello(two_networks.shared, "--nproc-per-node=2"), env=given, timeout=400)
    assert done.returncode == 0, done.stderr
    assert "meeting on node01i:" in done.stderr
    assert said(done.stdout) == [line.replace("eth0", "ib0") for line in FOUR]


def test_training_over_the_fabric(two_networks: SlurmCluster) -> None:
    env = {**ONE_THREAD, "MUSTER_ADDRESS_SUFFIX": "i"}
    argv = [TRAIN, "ddp", *STEPS, "--nproc-per-node=1", "--name=fabric"]
    done = two_networks.srun(*where(1), *argv, env=env, timeout=400)
    assert done.returncode == 0, done.stderr
    found = summary(two_networks.shared / "runs" / "fabric")
    assert (found["world_size"], sorted(found["hosts"])) == (2, ["node01", "node02"])


@pytest.mark.parametrize(
    ("address", "options"),
    [
        pytest.param("node01", [], id="static"),
        pytest.param("fd00:77::1", ["--max-restarts=1"], id="elastic", marks=pytest.mark.long),
        pytest.param("node01", ["--spawn=2"], id="spawn", marks=pytest.mark.long),
    ],
)
def test_hosts_without_ipv4(tmp_path: Path, address: str, options: list[str]) -> None:
    require_namespaces()
    pipe = subprocess.PIPE
    with Hosts(["node01", "node02"], tmp_path, is_ipv6=True) as hosts:
        started = []
        for rank, host in enumerate(hosts.addresses):
            place = ["--nnodes=2", f"--node-rank={rank}", f"--master-addr={address}", "--rdzv-timeout=30"]
            argv = hello(tmp_path, *place, "--nproc-per-node=2", *options)
            started.append(hosts.popen(host, argv, stdout=pipe, stderr=pipe))
        wrote = [process.communicate(timeout=400) for process in started]
    assert [process.returncode for process in started] == [0, 0], wrote
    assert said("".join(out for out, _ in wrote)) == FOUR
