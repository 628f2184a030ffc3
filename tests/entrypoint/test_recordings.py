"""Environments of real processes, through the whole of detection."""

import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from entrypoint import detection, environment
from entrypoint.allocation import Allocation
from entrypoint.environment import Environment
from entrypoint.options import LaunchOptions
from train.errors import MusterError

RECORDINGS = Path(__file__).resolve().parent.parent / "recordings"
FOLDER = RECORDINGS / "slurm"
# `slurm` came with the facts that this project started from, `slurm_own` is made by tests/clusters/record.py.
FILES = sorted([*FOLDER.glob("*.env"), *(RECORDINGS / "slurm_own").glob("*.env")])
EXPECTED: dict[Path, dict[str, Any]] = {
    folder: tomllib.loads((folder / "expected.toml").read_text()) for folder in {file.parent for file in FILES}
}


def scenario_of(file: Path) -> str:
    return file.name.split(".")[0]


def expected_of(file: Path) -> dict[str, Any]:
    return EXPECTED[file.parent][scenario_of(file)]


TASKS = [file for file in FILES if "hosts" in expected_of(file)]
SHELLS = [file for file in FILES if "launch" in expected_of(file)]
REFUSED = [file for file in FILES if "refusal" in expected_of(file)]


def named(file: Path) -> str:
    return file.stem


def detect(env: Environment, options: LaunchOptions | None = None) -> Allocation:
    return detection.allocate(env, options or LaunchOptions(), ["train", "ddp"])


def test_every_scenario_has_recordings_and_every_recording_a_scenario() -> None:
    for folder, expected in EXPECTED.items():
        assert {scenario_of(file) for file in FILES if file.parent == folder} == set(expected)
    assert TASKS
    assert SHELLS
    assert REFUSED


def ranks_on(file: Path) -> dict[str, list[int]]:
    """The ranks of a recording's scenario by host, as the names of all its files tell."""
    ranks: dict[str, list[int]] = {}
    for other in sorted(file.parent.glob(f"{scenario_of(file)}.*.env")):
        _, host, rank = other.name.removesuffix(".env").rsplit(".", 2)
        ranks.setdefault(host, []).append(int(rank))
    return {host: sorted(found) for host, found in ranks.items()}


@pytest.mark.parametrize("file", TASKS, ids=named)
def test_a_task_knows_its_place(file: Path) -> None:
    _, host, rank = file.name.removesuffix(".env").rsplit(".", 2)
    expected, ranks = expected_of(file), ranks_on(file)
    hosts = expected["hosts"]
    node_rank = hosts.index(host)
    found = detect(environment.load(file))
    assert found.scheduler == "slurm"
    assert list(found.hosts) == hosts
    assert found.num_nodes == len(hosts)
    assert found.node_rank == node_rank
    assert found.tasks_on_node == len(ranks[host])
    assert found.mode == expected["mode"]
    assert found.local_rank == ranks[host].index(int(rank))
    if found.mode == "worker":
        assert found.rank == int(rank)
        assert found.ranks_per_node == tuple(len(ranks[name]) for name in hosts)
    else:
        assert found.nproc_per_node == expected.get("nproc_per_node", 2)
        assert found.rank == node_rank * found.nproc_per_node
    assert expected.get("note", "") in "\n".join(found.notes)


@pytest.mark.parametrize("file", SHELLS, ids=named)
def test_what_is_no_task_of_several_nodes_is_refused_with_the_launch_line(file: Path) -> None:
    with pytest.raises(MusterError) as refusal:
        detect(environment.load(file))
    assert refusal.value.code == 2
    assert refusal.value.fix == expected_of(file)["launch"]


@pytest.mark.parametrize("file", REFUSED, ids=named)
def test_what_cannot_be_started_is_refused_with_the_reason(file: Path) -> None:
    with pytest.raises(MusterError, match=expected_of(file)["refusal"]):
        detect(environment.load(file))


def mutations(recorded: Environment) -> list[tuple[tuple[str, str | None], Environment]]:
    """The recording with one of Slurm's or CUDA's variables missing, empty, doubled, no number, off by one."""
    changed: list[tuple[tuple[str, str | None], Environment]] = []
    for name, value in recorded.items():
        if not name.startswith(("SLURM_", "CUDA_")):
            continue
        values: list[str | None] = [None, "", value + value, "x", "-1", "99", "$(reboot)", f"{value},9"]
        if value.isdigit():
            values.append(str(int(value) + 1))
        for other in values:
            variables = {**recorded, name: other} if other is not None else dict(recorded)
            if other is None:
                del variables[name]
            changed.append(((name, other), replace(recorded, variables=variables)))
    return changed


@pytest.mark.parametrize("file", TASKS, ids=named)
def test_one_variable_less_or_worse_never_gives_another_world(file: Path) -> None:
    """Right answer or refusal, whatever happened to one variable: missing, empty, doubled, no number, off by one."""
    recorded = environment.load(file)
    truth = detect(recorded)
    same = ["num_nodes", "node_rank", "hosts", "tasks_on_node"]
    if truth.mode == "worker":
        same += ["rank", "world_size"]
    for change, changed in mutations(recorded):
        try:
            found = detect(changed)
        except MusterError:
            continue
        assert [getattr(found, name) for name in same] == [getattr(truth, name) for name in same], change


@pytest.mark.parametrize("file", SHELLS, ids=named)
def test_one_variable_less_or_worse_never_makes_a_shell_a_task(file: Path) -> None:
    # A reserved step id that became another number can't be told from a real one.
    changes = [item for item in mutations(environment.load(file)) if item[0][0] != "SLURM_STEP_ID"]
    assert [change for change, changed in changes if not refused(changed)] == []


def refused(env: Environment) -> bool:
    try:
        detect(env)
    except MusterError:
        return True
    return False


def step(**changes: str) -> Environment:
    """A task of a Slurm step, rank 1 of 2 nodes, with some variables changed."""
    variables = dict(environment.load(FOLDER / "b_srun_N2_1per.node02.1.env").variables)
    return Environment(variables | changes, host=changes.get("host", "node02"))


def test_host_list_that_cannot_be_read() -> None:
    with pytest.raises(MusterError, match="SLURM_STEP_NODELIST can't be read"):
        detect(step(SLURM_STEP_NODELIST="node[01-02"))


def test_task_count_that_disagrees_with_the_list() -> None:
    with pytest.raises(MusterError, match="disagree on the number of nodes"):
        detect(step(SLURM_STEP_TASKS_PER_NODE="1(x3)", SLURM_TASKS_PER_NODE="1(x3)", SLURM_STEP_NUM_TASKS="3"))


def test_variables_of_another_node_are_noticed() -> None:
    with pytest.raises(MusterError, match="this host is the one with 0"):
        detect(step(host="node01"))


def test_a_host_name_that_slurm_does_not_know_is_no_error() -> None:
    assert detect(step(host="node02-ib0")).node_rank == 1


def test_cyclic_ranks_are_not_computed_from_the_node() -> None:
    env = environment.load(FOLDER / "c_srun_N2_2per.node02.2.env")
    cyclic = Environment({**env, "SLURM_PROCID": "1", "SLURM_GTIDS": "1,3"}, host="node02")
    found = detect(cyclic)
    assert (found.node_rank, found.local_rank, found.rank) == (1, 0, 1)


def test_uneven_tasks_are_ranks_each() -> None:
    env = environment.load(FOLDER / "c_srun_N2_2per.node02.2.env")
    uneven = {"SLURM_STEP_TASKS_PER_NODE": "2,1", "SLURM_TASKS_PER_NODE": "2,1", "SLURM_STEP_NUM_TASKS": "3"}
    uneven["SLURM_GTIDS"] = "2"
    found = detect(Environment({**env, **uneven}, host="node02"))
    assert (found.rank, found.world_size, found.ranks_per_node) == (2, 3, (2, 1))


def test_several_tasks_a_node_and_nproc_per_node_contradict_each_other() -> None:
    env = environment.load(FOLDER / "c_srun_N2_2per.node02.2.env")
    with pytest.raises(MusterError, match="torchrun wants one task a node") as refusal:
        detect(env, LaunchOptions(nproc_per_node="2"))
    assert "--ntasks=2 --ntasks-per-node=1" in refusal.value.fix


def test_nodes_asked_for_that_are_not_there() -> None:
    with pytest.raises(MusterError, match="--nnodes says 3"):
        detect(step(), LaunchOptions(nnodes=3))
    with pytest.raises(MusterError, match="--nnodes says 2"):
        detect(Environment({}, host="laptop"), LaunchOptions(nnodes=2))


def test_by_hand_wins_over_the_scheduler() -> None:
    found = detect(step(), LaunchOptions(nnodes=2, node_rank=0, nproc_per_node="4"))
    assert (found.launcher, found.node_rank, found.world_size, found.hosts) == ("manual", 0, 8, ("node01", "node02"))


@pytest.mark.parametrize(
    "options", [LaunchOptions(node_rank=0), LaunchOptions(node_rank=2, nnodes=2), LaunchOptions(nproc_per_node="two")]
)
def test_options_that_make_no_sense(options: LaunchOptions) -> None:
    with pytest.raises(MusterError):
        detect(Environment({}, host="laptop"), options)


def test_a_worker_of_torchrun_does_not_start_another() -> None:
    with pytest.raises(MusterError, match="worker of torchrun already"):
        detect(Environment({"TORCHELASTIC_RUN_ID": "9.0", "RANK": "0"}, host="laptop"))


@pytest.mark.parametrize(
    ("variables", "nproc"),
    [
        ({}, 2),
        ({"CUDA_VISIBLE_DEVICES": ""}, 2),
        ({"CUDA_VISIBLE_DEVICES": "-1"}, 2),
        ({"CUDA_VISIBLE_DEVICES": "0"}, 1),
        ({"CUDA_VISIBLE_DEVICES": "0,1,2,3"}, 4),
        ({"CUDA_VISIBLE_DEVICES": "0,-1,2"}, 1),
        ({"CUDA_VISIBLE_DEVICES": "GPU-8a56a4bc-e184-a047-2620-be19fdf913d5,GPU-f0e5"}, 2),
        ({"CUDA_VISIBLE_DEVICES": "MIG-GPU-8a56a4bc/0/0"}, 1),
    ],
)
def test_one_process_for_each_visible_gpu_and_two_without(variables: dict[str, str], nproc: int) -> None:
    found = detect(Environment(variables, host="laptop"))
    assert found.nproc_per_node == nproc
    assert found.mode == ("single" if nproc == 1 else "agent")


def test_single_is_refused_where_several_processes_were_started() -> None:
    for file in ("b_srun_N2_1per.node02.1.env", "c_srun_N2_2per.node02.2.env"):
        allocation = detect(environment.load(FOLDER / file))
        with pytest.raises(MusterError, match="single is one process"):
            detection.single(allocation, ["train", "single"])
