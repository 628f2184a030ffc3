"""Restarts and nodes that may come and go, over two nodes of a real Slurm; and the exit codes of both modes."""

import itertools
import json
import shlex
from collections.abc import Callable, Mapping

import pytest

from muster.entrypoint.jobs import making
from muster.entrypoint.jobs.script import Wanted
from tests.clusters.deadline import wait_for
from tests.clusters.hello import FOUR, hello, said
from tests.clusters.slurm import SlurmCluster
from tests.clusters.test_jobs import stand_in  # noqa: F401
from tests.clusters.weights import BIN, MUSTER, ONE_THREAD, summary

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

ONE_A_NODE = ["-N2", "-n2", "--ntasks-per-node=1"]

# Rank 3 dies once. Ranks may be assigned anew after the restart, so a file records that it has happened.
DIES_ONCE = """
import os, socket, sys, torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
if dist.get_rank() == 3:
    try:
        os.close(os.open(sys.argv[1], os.O_CREAT | os.O_EXCL))
        os._exit(9)
    except FileExistsError:
        pass
dist.all_reduce(total)
line = f"sum {total.item()} {socket.gethostname()} {os.environ['TORCHELASTIC_RESTART_COUNT']}\\n"
os.write(1, line.encode())
dist.destroy_process_group()
"""


def test_a_rank_that_dies_once_comes_back_with_all_others(slurm2: SlurmCluster) -> None:
    script = slurm2.shared / "dies_once.py"
    script.write_text(DIES_ONCE)
    argv = [MUSTER, "run", "--nproc-per-node=2", "--max-restarts=1", str(script), str(slurm2.shared / "died")]
    done = slurm2.srun(*ONE_A_NODE, *argv, timeout=400)
    assert done.returncode == 0, done.stderr
    lines = said(done.stdout)
    assert [line.split()[1:3] for line in lines] == [
        ["16.0", host] for host in ("node01", "node01", "node02", "node02")
    ]
    # The node where it died counts the restart; the other node counts it too, or restarts for a change of membership.
    assert "1" in {line.split()[3] for line in lines}


def test_one_to_two_nodes_start_with_both(slurm2: SlurmCluster) -> None:
    done = slurm2.srun(*ONE_A_NODE, *hello(slurm2.shared, "--nnodes=1:2", "--nproc-per-node=2"), timeout=400)
    assert done.returncode == 0, done.stderr
    # Which node is the first is torch's choice.
    assert [line.split()[1:3] for line in said(done.stdout)] == [line.split()[1:3] for line in FOUR]


@pytest.mark.parametrize("options", [["--max-restarts=2"], ["--nnodes=1:2"]], ids=lambda options: options[0])
def test_the_elastic_launch(slurm2: SlurmCluster, options: list[str]) -> None:
    """Its options restarted in 7 of 7 tries: one host for the store, the node's own address, a store of the workers."""
    done = slurm2.srun(*ONE_A_NODE, *hello(slurm2.shared, "--dry-run", *options))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1") == 2
    commands = [shlex.split(line) for line in done.stdout.splitlines() if "--rdzv-backend=c10d" in line]
    told = [{word.partition("=")[0]: word.partition("=")[2] for word in command} for command in commands]
    first, second = sorted(told, key=lambda words: words["--local-addr"])
    addresses = slurm2.hosts.addresses
    assert (first["--local-addr"], second["--local-addr"]) == (addresses["node01"], addresses["node02"])
    conf = "join_timeout=900,read_timeout=30,last_call_timeout=30,keep_alive_max_attempt=6"
    assert first["--rdzv-conf"] == f"is_host=1,{conf}"
    assert second["--rdzv-conf"] == f"is_host=0,{conf}"
    assert first["--rdzv-endpoint"] == second["--rdzv-endpoint"]
    assert first["--rdzv-endpoint"].startswith("node01:6")
    low, high = ("2:2", "2") if "--max-restarts=2" in options else ("1:2", "3")
    assert (first["--nnodes"], first["--max-restarts"]) == (low, high)


ENDS = """
import os, sys, torch, torch.distributed as dist
dist.init_process_group("gloo")
dist.barrier()
if os.environ["RANK"] in sys.argv[2:]:
    sys.exit(int(sys.argv[1]))
dist.barrier()
"""


@pytest.mark.parametrize(("code", "ranks"), [(2, "3"), (75, "0 1 2 3")])
@pytest.mark.parametrize("mode", ["agent", "worker"])
def test_exit_codes_of_an_own_script(slurm2: SlurmCluster, code: int, ranks: str, mode: str) -> None:
    """A task that is a rank ends with the script's code; an agent with 1, as it doesn't know what that code means."""
    script = slurm2.shared / "ends.py"
    script.write_text(ENDS)
    where, own = (ONE_A_NODE, ["--nproc-per-node=2"]) if mode == "agent" else (["-N2", "--ntasks-per-node=2"], [])
    done = slurm2.srun(*where, MUSTER, "run", *own, str(script), str(code), *ranks.split(), timeout=400)
    assert done.returncode == (code if mode == "worker" else 1), done.stderr


def test_spawn_on_one_node(slurm2: SlurmCluster) -> None:
    done = slurm2.srun("-N1", "-n1", "-w", "node01", *hello(slurm2.shared, "--spawn=2"), timeout=400)
    assert done.returncode == 0, done.stderr
    assert said(done.stdout) == ["sum 2.0 node01 0/0 lo", "sum 2.0 node01 1/1 lo"]


# 20 steps an epoch by two ranks, 40 by one.
ELASTIC = ["--data=synthetic", "--num-classes=10", "--num-samples=320", "--image-size=16", "--batch-size=8"]
ELASTIC += ["--epochs=3", "--warmup-steps=0", "--lr=0.01", "--lr-scale=linear", "--no-bf16", "--name=elastic"]


@pytest.mark.timeout(600)
def test_a_training_goes_on_without_a_node_that_has_died(
    slurm_cluster: Callable[..., SlurmCluster],
    stand_in: Mapping[str, str],  # noqa: F811
) -> None:
    """The job script has --no-kill, so that Slurm lets the job continue on the other node."""
    cluster = slurm_cluster(["node01", "node02"])
    env = {**stand_in, **ONE_THREAD, "PATH": f"{stand_in['PATH']}:{BIN}"}
    command = ("train", "ddp", "--nnodes=1:2", "--nproc-per-node=1", *ELASTIC)
    job = cluster.submit(making.make("slurm", Wanted(nodes=2, command=command)), env=env)

    def is_saved() -> bool:
        assert job.state in ("PENDING", "RUNNING"), job.output
        return bool(list(cluster.shared.glob("runs/elastic/checkpoints/step-*")))

    wait_for("a checkpoint", is_saved, 400)
    cluster.kill("node02")
    wait_for("the training to end", lambda: (cluster.shared / "runs/elastic/summary.json").exists(), 300)
    job.wait(120)
    said = job.output
    assert (job.state, job.exit_code) == ("COMPLETED", 0), said
    assert "muster: goes on with 1 node instead of 2" in said
    assert "goes on with 1 rank instead of 2: global batch 16 -> 8, learning rate 0.02 -> 0.01" in said
    found = summary(cluster.shared / "runs" / "elastic")
    assert (found["world_size"], found["hosts"]) == (1, ["node01"])
    lines = [json.loads(line) for line in (cluster.shared / "runs/elastic/metrics.jsonl").read_text().splitlines()]
    ends = [0, *(line["step"] for line in lines if line["kind"] == "epoch")]
    steps = [after - before for before, after in itertools.pairwise(ends)]
    # Each epoch has all samples, with two ranks or with one.
    assert steps in ([20, 40, 40], [20, 20, 40])
    rates = {line["step"]: line["lr"] for line in lines if line["kind"] == "steps"}
    last_of_two = 20 * steps.count(20)
    assert {lr for step, lr in rates.items() if step <= last_of_two} == {0.02}
    assert {lr for step, lr in rates.items() if step > last_of_two} == {0.01}
