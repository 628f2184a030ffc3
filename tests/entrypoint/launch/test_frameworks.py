"""Other frameworks than torch, --spawn, and elastic launches: whole argv and variables."""

import argparse
import json
from dataclasses import replace
from pathlib import Path

import pytest
from torch.distributed.run import parse_args

from muster.entrypoint import recording
from muster.entrypoint.agent import rendezvous
from muster.entrypoint.detect import resolve
from muster.entrypoint.detect.allocation import Allocation
from muster.entrypoint.environment import Environment
from muster.entrypoint.launch import frameworks, start
from muster.entrypoint.launch.program import Launch, Program
from muster.entrypoint.options import LaunchOptions
from muster.entrypoint.rendezvous import address
from muster.errors import MusterError

FOLDER = Path(__file__).resolve().parents[2] / "recordings" / "slurm"


def placed(env: Environment, options: LaunchOptions | None = None) -> tuple[Allocation, address.Rendezvous]:
    options = options or LaunchOptions()
    allocation = resolve.resolve(env, options, ["train", "ddp"])
    return allocation, address.meet(allocation, env, options)


def planned(env: Environment, options: LaunchOptions, program: Program) -> Launch:
    return start.plan(start.Context(env, options, *placed(env, options)), program, ["muster", "run"])


def task(name: str, **changes: str) -> Environment:
    env = recording.load(FOLDER / f"{name}.env")
    return replace(env, variables={**env, **changes})


def test_tensorflow_has_a_worker_for_each_task() -> None:
    allocation, meeting = placed(task("c_srun_N2_2per.node02.2"))
    config = json.loads(frameworks.tensorflow(allocation, meeting, 61001)["TF_CONFIG"])
    workers = ["node01:61001", "node01:61002", "node02:61001", "node02:61002"]
    assert config == {"cluster": {"worker": workers}, "task": {"type": "worker", "index": 2}}


def test_tensorflow_has_one_worker_a_node_where_there_is_one_task() -> None:
    allocation, meeting = placed(task("b_srun_N2_1per.node02.1"))
    config = json.loads(frameworks.tensorflow(allocation, meeting, 65535)["TF_CONFIG"])
    assert config["cluster"]["worker"] == ["node01:65535", "node02:65535"]
    assert config["task"]["index"] == 1


def test_tensorflow_counts_cyclic_tasks_alike_on_all_nodes() -> None:
    env = task("c_srun_N2_2per.node02.2", SLURM_PROCID="1", SLURM_GTIDS="1,3")
    allocation, meeting = placed(env)
    config = json.loads(frameworks.tensorflow(allocation, meeting, 61001)["TF_CONFIG"])
    # Rank 1, but the first task of the second node, whose address is third in the list.
    assert config["task"]["index"] == 2


def test_tensorflow_needs_the_names_of_the_hosts() -> None:
    options = LaunchOptions(nnodes="2", node_rank=1, master_addr="a")
    allocation, meeting = placed(Environment({}, host="b"), options)
    with pytest.raises(MusterError, match="names of all hosts") as refusal:
        frameworks.tensorflow(allocation, meeting, 61001)
    assert "MUSTER_HOSTS=" in refusal.value.fix
    # It may be set already, with fewer hosts.
    assert "all 2 of them" in refusal.value.fix


def test_ports_of_tensorflow_stay_in_their_range() -> None:
    allocation, meeting = placed(task("c_srun_N2_2per.node02.2"))
    workers = json.loads(frameworks.tensorflow(allocation, meeting, 65535)["TF_CONFIG"])["cluster"]["worker"]
    assert workers[:2] == ["node01:65535", "node01:61000"]


def test_jax_counts_tasks() -> None:
    allocation, meeting = placed(task("c_srun_N2_2per.node02.2"))
    assert frameworks.jax(allocation, meeting, 61001) == {
        "JAX_COORDINATOR_ADDRESS": "node01:61001",
        "JAX_NUM_PROCESSES": "4",
        "JAX_PROCESS_ID": "2",
    }


def test_jax_takes_one_device_of_several_that_each_task_sees() -> None:
    allocation, meeting = placed(task("c_srun_N2_2per.node02.3", CUDA_VISIBLE_DEVICES="0,1"))
    assert frameworks.jax(allocation, meeting, 61001)["JAX_LOCAL_DEVICE_IDS"] == "1"


def test_jax_and_an_ipv6_address() -> None:
    options = LaunchOptions(nnodes="2", node_rank=1, master_addr="fd00::7")
    allocation, meeting = placed(Environment({}, host="b"), options)
    assert frameworks.jax(allocation, meeting, 7)["JAX_COORDINATOR_ADDRESS"] == "[fd00::7]:7"


def test_a_framework_runs_the_users_command_once_a_task() -> None:
    program = Program("program", ("python", "main.py"), framework="tensorflow")
    found = planned(task("b_srun_N2_1per.node02.1"), LaunchOptions(), program)
    assert list(found.argv) == ["python", "main.py"]
    assert "TF_CONFIG" in found.additions.variables


def test_spawn_runs_the_program_in_processes_of_multiprocessing() -> None:
    options = LaunchOptions(nnodes="2", node_rank=1, master_addr="a", nproc_per_node="3", spawn=3)
    found = planned(Environment({}, host="b"), options, Program("script", ("s.py", "-x")))
    assert {"--nnodes=2", "--node-rank=1", "--nproc-per-node=3", "--master-addr=a"} <= set(found.argv)
    assert list(found.argv[-3:]) == ["--run-path", "s.py", "-x"]


def test_spawn_runs_python_only() -> None:
    with pytest.raises(MusterError, match="--spawn starts only Python"):
        planned(Environment({}, host="b"), LaunchOptions(nproc_per_node="2", spawn=2), Program("program", ("ls",)))


@pytest.mark.parametrize(("nnodes", "node_rank", "is_host"), [("1:2", 0, 1), ("1:2", 1, 0), ("2", 1, 0)])
def test_restarts_take_the_elastic_form(nnodes: str, node_rank: int, is_host: int) -> None:
    options = LaunchOptions(nnodes=nnodes, node_rank=node_rank, master_addr="a", nproc_per_node="2", max_restarts=3)
    found = planned(Environment({}, host="b"), options, Program("script", ("s.py",)))
    conf = f"is_host={is_host},join_timeout=900,read_timeout=30,last_call_timeout=30,keep_alive_max_attempt=6"
    assert list(found.argv[4:]) == [
        f"--nnodes={'1:2' if ':' in nnodes else '2:2'}",
        "--rdzv-backend=c10d",
        "--rdzv-endpoint=a:61000",
        f"--rdzv-conf={conf}",
        "--nproc-per-node=2",
        "--rdzv-id=local.0",
        "--max-restarts=3",
        "s.py",
    ]
    assert found.additions.variables["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] == "1"


def test_restarts_on_one_node_take_the_static_form() -> None:
    found = planned(Environment({}, host="b"), LaunchOptions(max_restarts=3), Program("script", ("s.py",)))
    assert {"--nnodes=1", "--rdzv-backend=static", "--master-port=0", "--max-restarts=3"} <= set(found.argv)
    assert found.additions.variables["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] == "1"


def test_binding_is_torchruns_own() -> None:
    found = planned(Environment({}, host="b"), LaunchOptions(numa_binding="node"), Program("script", ("s.py",)))
    assert parse_args(list(found.argv[4:])).numa_binding == "node"


@pytest.mark.parametrize("nnodes", ["0", "2:1", "0:2", ":2", "two", "1:2:3", "-1", "9" * 20])
def test_a_range_of_nodes_that_is_none(nnodes: str) -> None:
    with pytest.raises(MusterError, match="--nnodes is a number"):
        resolve.resolve(Environment({}, host="b"), LaunchOptions(nnodes=nnodes, node_rank=0), ["train", "ddp"])


@pytest.mark.parametrize(("nnodes", "taken"), [("1:4", "1:2"), ("2:3", "2:2"), ("1:2", "1:2")])
def test_a_range_of_nodes_ends_at_those_that_the_job_has(nnodes: str, taken: str) -> None:
    options = LaunchOptions(nnodes=nnodes, nproc_per_node="2")
    found = planned(task("b_srun_N2_1per.node02.1"), options, Program("script", ("s.py",)))
    assert {f"--nnodes={taken}", "--rdzv-backend=c10d", "--max-restarts=3"} <= set(found.argv)
    assert any(nnodes in note and taken in note for note in found.additions.notes) == (nnodes != taken)


@pytest.mark.parametrize("nproc_per_node", ["1", "2"])
def test_a_range_of_nodes_in_a_job_of_one(nproc_per_node: str) -> None:
    options = LaunchOptions(nnodes="1:4", nproc_per_node=nproc_per_node)
    found = planned(task("g_array_0.node01.0"), options, Program("script", ("s.py",)))
    assert {"--nnodes=1", f"--nproc-per-node={nproc_per_node}", "--max-restarts=3"} <= set(found.argv)


def chosen(*words: str) -> argparse.Namespace:
    return parse_args([*words, "s.py"])


def test_the_agent_waits_for_whoever_listens() -> None:
    static = ("--nnodes=2", "--rdzv-backend=static", "--master-addr=a", "--master-port=7", "--rdzv-conf=timeout=5")
    joining = chosen("--node-rank=1", *static)
    assert rendezvous.joins_other_store(joining)
    assert (rendezvous.endpoint_of(joining), rendezvous.timeout_s(joining)) == (("a", 7), 5)
    assert not rendezvous.joins_other_store(chosen("--node-rank=0", *static))
    elastic = ("--nnodes=1:2", "--rdzv-backend=c10d", "--rdzv-endpoint=[fd00::1]:7")
    joining = chosen("--rdzv-conf=is_host=0,join_timeout=6", *elastic)
    assert rendezvous.joins_other_store(joining)
    assert (rendezvous.endpoint_of(joining), rendezvous.timeout_s(joining)) == (("fd00::1", 7), 6)
    assert not rendezvous.joins_other_store(chosen("--rdzv-conf=is_host=1", *elastic))
    assert not rendezvous.joins_other_store(chosen("--nnodes=1", "--rdzv-backend=static", "--master-port=0"))


@pytest.mark.parametrize(
    ("host", "name"), [("jwb0001", "jwb0001i"), ("jwb0001.juwels", "jwb0001i.juwels"), ("a-1", "a-1i")]
)
def test_the_fabrics_name_of_a_host(host: str, name: str) -> None:
    assert address.with_suffix(host, "i") == name


def test_the_suffix_goes_to_listed_hosts_and_not_to_what_the_user_gave() -> None:
    env = task("b_srun_N2_1per.node02.1")
    assert placed(env, LaunchOptions(address_suffix="i"))[1].master_addr == "node01i"
    assert placed(env, LaunchOptions(address_suffix="i", master_addr="x"))[1].master_addr == "x"


@pytest.mark.parametrize("name", ["ompi_ssh", "mpich_ssh"])
def test_without_hosts_the_meeting_is_open(name: str) -> None:
    env = recording.load(FOLDER.parent / "mpi" / f"{name}.node02.3.env")
    allocation, meeting = placed(env)
    assert (allocation.rank, allocation.world_size, allocation.hosts) == (3, 4, ())
    assert meeting.master_addr is None
    assert address.needs_file(meeting, allocation)
    allocation, meeting = placed(replace(env, variables={**env, "MASTER_ADDR": "a"}))
    assert meeting.master_addr == "a"
    assert meeting.master_port is not None
    assert not address.needs_file(meeting, allocation)
