"""`train` and `muster` as users start them under a real Slurm: worlds, weights, refusals."""

import json
import re
import shlex
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.clusters.hello import FOUR, hello, said
from tests.clusters.slurm import SlurmCluster
from tests.clusters.weights import MUSTER, ONE_THREAD, STEPS, TRAIN, assert_world_of_four, lines_of_error, summary

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]


@pytest.mark.quick
@pytest.mark.parametrize(("mode", "tasks"), [("agent", 1), ("worker", 2)])
def test_two_nodes_are_a_world_of_four_with_the_weights_of_one_process(
    slurm2: SlurmCluster, four_ranks: dict[str, torch.Tensor], mode: str, tasks: int
) -> None:
    where = ["-N2", f"--ntasks-per-node={tasks}"]
    done = slurm2.srun(*where, TRAIN, "ddp", *STEPS, f"--name={mode}", timeout=400, env=ONE_THREAD)
    assert done.returncode == 0, done.stderr
    # Printed once, by rank 0, and not by every rank.
    assert done.stderr.count("muster: slurm job") == 1
    assert "2 nodes x 2 = 4 ranks" in done.stderr
    assert done.stdout.count("validation accuracy") == 1
    assert_world_of_four(slurm2.shared / "runs" / mode, four_ranks, ("node01", "node02"))


def test_three_nodes_from_a_batch_script(slurm3: SlurmCluster) -> None:
    command = shlex.join([TRAIN, "ddp", *STEPS, "--nproc-per-node=1", "--name=batch"])
    job = slurm3.sbatch(f"srun -n $SLURM_NNODES --ntasks-per-node=1 {command}\n", "-N3", timeout=400)
    assert job.state == "COMPLETED", job.output
    found = summary(slurm3.shared / "runs" / "batch")
    assert (found["world_size"], sorted(found["hosts"])) == (3, ["node01", "node02", "node03"])


DETECT = """
import json, socket, subprocess, sys
found = json.loads(subprocess.run([sys.argv[1], "detect", "--json"], stdout=subprocess.PIPE, check=True).stdout)
# srun cuts longer lines up, and mixes them with those of other tasks.
short = {name: value for name, value in found.items() if name not in ("argv", "sources")}
short["nproc_source"] = found["sources"]["nproc_per_node"]
print(json.dumps(short | {"own_host": socket.gethostname()}))
"""


def detected(cluster: SlurmCluster, *options: str) -> list[dict[str, Any]]:
    """The output of `muster detect` in each task, sorted by node rank and local rank; `own_host` is the host's name."""
    done = cluster.srun(*options, sys.executable, "-c", DETECT, MUSTER)
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    return sorted(found, key=lambda task: (task["node_rank"], task["local_rank"]))


UGLY = [
    ["gpu-a1", "gpu-a2", "gpu-b7", "rack10n008", "rack10n009", "rack11n010"],
    ["r0_b0", "r0_b1", "r1_b0", "r1_b1"],
    ["n1-ib", "n2-ib", "n10-ib"],
]


@pytest.mark.parametrize("names", UGLY, ids=lambda names: names[0])
def test_irregular_host_names(slurm_cluster: Callable[..., SlurmCluster], names: list[str]) -> None:
    cluster = slurm_cluster(names)
    tasks = detected(cluster, f"-N{len(names)}", "--ntasks-per-node=1")
    assert len(tasks) == len(names)
    listed = cluster.srun(f"-N{len(names)}", "--ntasks-per-node=1", "printenv", "SLURM_STEP_NODELIST").stdout.split()[0]
    for task in tasks:
        assert task["hosts"] == cluster.expand(listed)
        assert task["hosts"][task["node_rank"]] == task["own_host"]
        assert task["interface"] == "eth0"
        assert task["env"]["GLOO_SOCKET_IFNAME"] == "eth0"


@pytest.mark.quick
def test_tasks_under_salloc(slurm2: SlurmCluster) -> None:
    done = slurm2.salloc("-N2", "--ntasks-per-node=1", "srun", MUSTER, "detect", "--json")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count('"num_nodes": 2') == 2
    assert done.stdout.count('"mode": "agent"') == 2


@pytest.mark.parametrize("options", [["--gpus-per-task=1"], ["--gres=gpu:2", "--gpu-bind=single:1"]])
def test_a_gpu_for_each_task(slurm2: SlurmCluster, options: list[str]) -> None:
    tasks = detected(slurm2, "-N2", "--ntasks-per-node=2", *options)
    assert [task["mode"] for task in tasks] == ["worker"] * 4
    assert [task["env"]["RANK"] for task in tasks] == ["0", "1", "2", "3"]
    assert [task["local_rank"] for task in tasks] == [0, 1, 0, 1]


@pytest.mark.quick
def test_the_gpus_of_a_node_are_its_processes(slurm2: SlurmCluster) -> None:
    tasks = detected(slurm2, "-N2", "--ntasks-per-node=1", "--gpus-per-node=2")
    assert [task["nproc_per_node"] for task in tasks] == [2, 2]
    assert "CUDA_VISIBLE_DEVICES" in tasks[0]["nproc_source"]


@pytest.mark.quick
def test_cyclic_tasks(slurm2: SlurmCluster) -> None:
    tasks = detected(slurm2, "-N2", "--ntasks-per-node=2", "-m", "cyclic")
    assert [task["env"]["RANK"] for task in tasks] == ["0", "2", "1", "3"]
    assert {task["master_addr"] for task in tasks} == {"node01"}


@pytest.mark.quick
def test_a_second_step_meets_on_another_port(slurm2: SlurmCluster) -> None:
    line = f"srun -n2 --ntasks-per-node=1 {shlex.quote(MUSTER)} detect --json\n"
    job = slurm2.sbatch(line + line, "-N2", "--ntasks-per-node=1")
    assert job.state == "COMPLETED", job.output
    ports = re.findall(r'"master_port": (\d+)', job.output)
    assert len(ports) == 4
    assert len(set(ports)) == 2


def test_own_names_that_resolve_to_loopback(slurm_cluster: Callable[..., SlurmCluster]) -> None:
    """Debian's installer gives a host's own name the address 127.0.1.1: nobody else can reach it there."""
    cluster = slurm_cluster(["node01", "node02"], own_name_is_loopback=True)
    for tasks in (1, 2):
        done = cluster.srun("-N2", f"--ntasks-per-node={tasks}", *hello(cluster.shared), timeout=400)
        assert done.returncode == 0, done.stderr
        assert said(done.stdout) == FOUR


def test_the_users_variables_are_kept(slurm2: SlurmCluster) -> None:
    script = f"export GLOO_SOCKET_IFNAME=ib0 OMP_NUM_THREADS=3; exec {shlex.quote(MUSTER)} detect --json"
    done = slurm2.srun("-N2", "-n2", "--ntasks-per-node=1", "sh", "-c", script)
    assert done.returncode == 0, done.stderr
    assert "GLOO_SOCKET_IFNAME" not in done.stdout
    assert "OMP_NUM_THREADS" not in done.stdout
    assert '"NCCL_SOCKET_IFNAME": "eth0"' in done.stdout


@pytest.mark.quick
def test_a_batch_script_without_srun_is_refused(slurm2: SlurmCluster) -> None:
    job = slurm2.sbatch(f"{shlex.quote(TRAIN)} ddp --epochs 3\n", "-N2", "--ntasks-per-node=1")
    assert job.state == "FAILED"
    assert job.exit_code == 2
    wrong, seen, fix = job.output.splitlines()
    assert "2 nodes" in wrong
    assert "SLURM_JOB_NUM_NODES=2" in seen
    assert "srun --nodes=2 --ntasks=2 --ntasks-per-node=1 train ddp --epochs 3" in fix


@pytest.mark.quick
def test_the_launch_line_of_that_refusal_is_right(slurm2: SlurmCluster) -> None:
    """In a job with two tasks per node, the line still starts one per node."""
    script = f'{shlex.quote(TRAIN)} ddp 2>&1 | sed -n "s/^  fix: //p" > line; $(sed "s/ train ddp//" line) hostname\n'
    job = slurm2.sbatch(script, "-N2", "--ntasks-per-node=2")
    assert job.state == "COMPLETED", job.output
    assert sorted(job.output.split()) == ["node01", "node02"]


@pytest.mark.quick
def test_torchrun_wants_one_task_a_node(slurm2: SlurmCluster) -> None:
    done = slurm2.srun("-N2", "--ntasks-per-node=2", TRAIN, "ddp", "--nproc-per-node=2")
    assert done.returncode == 2
    assert "torchrun needs one task a node" in done.stderr


def test_single_on_two_nodes_is_refused(slurm2: SlurmCluster) -> None:
    done = slurm2.srun("-N2", "--ntasks-per-node=1", TRAIN, "single")
    assert done.returncode == 2
    assert "this command runs in one process" in done.stderr


def test_a_folder_that_is_on_no_node_ends_every_rank_with_one_message(slurm2: SlurmCluster) -> None:
    done = slurm2.srun("-N2", "--ntasks-per-node=1", TRAIN, "ddp", "--data=imagefolder:/none", timeout=400)
    assert done.returncode == 2
    assert len(lines_of_error(done.stderr)) == 3, done.stderr
    assert "/none" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.quick
def test_a_taken_port_is_named(slurm2: SlurmCluster) -> None:
    """On the first node, another process listens on the port before the training starts."""
    listen = (
        "import socket,subprocess,sys; s=socket.create_server(('',int(sys.argv[1]))); "
        "sys.exit(subprocess.call(sys.argv[2:]))"
    )
    port = 61777
    command = [TRAIN, "ddp", f"--master-port={port}", "--rdzv-timeout=5"]
    script = f"""
if [ "$SLURM_NODEID" = 0 ]; then exec {shlex.join([sys.executable, "-c", listen, str(port), *command])}
else exec {shlex.join(command)}; fi
"""
    done = slurm2.srun("-N2", "--ntasks-per-node=1", "sh", "-c", script, timeout=400)
    assert done.returncode == 2
    assert f"port {port} on node01 is taken" in done.stderr
