"""The user's options where they agree with detection, and where they contradict it."""

import pytest

from muster.entrypoint import recording
from muster.entrypoint.detect import resolve
from muster.entrypoint.environment import Environment
from muster.entrypoint.options import LaunchOptions
from muster.errors import MusterError
from tests.entrypoint.recorded import FOLDERS, detect

FOLDER = FOLDERS / "slurm"


def step() -> Environment:
    """Node 1 of two: a task of a Slurm step."""
    return recording.load(FOLDER / "b_srun_N2_1per.node02.1.env")


def test_nodes_asked_for_that_are_not_there() -> None:
    with pytest.raises(MusterError, match="--nnodes says 3"):
        detect(step(), LaunchOptions(nnodes=3))
    with pytest.raises(MusterError, match="--nnodes says 2"):
        detect(Environment({}, host="laptop"), LaunchOptions(nnodes=2))
    with pytest.raises(MusterError, match="--nnodes says 1:2"):
        detect(Environment({}, host="laptop"), LaunchOptions(nnodes="1:2"))
    for nnodes in ("1:1", "3:4"):
        with pytest.raises(MusterError, match="number of nodes is 2") as refusal:
            detect(step(), LaunchOptions(nnodes=nnodes))
        assert refusal.value.seen.startswith(f"--nnodes={nnodes};")
        # This is the second node: no node rank makes it the only one.
        assert ("--node-rank" in refusal.value.fix) == (nnodes == "3:4")


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
    with pytest.raises(MusterError, match="torchrun started this process already") as refusal:
        detect(Environment({"TORCHELASTIC_RUN_ID": "9.0", "RANK": "0"}, host="laptop"))
    # It may be left over, as in a job that a rank submitted: the rank's other variables lead to the old job's master.
    rank = dict.fromkeys(("RANK", "LOCAL_RANK"), "1") | {"WORLD_SIZE": "2", "MASTER_ADDR": "old", "MASTER_PORT": "1"}
    to_unset = refusal.value.fix.partition("unset ")[2].split()
    env = {name: value for name, value in {**step(), **rank}.items() if name not in to_unset}
    assert "TORCHELASTIC_RUN_ID" in to_unset
    assert {"MASTER_ADDR", "MASTER_PORT"}.isdisjoint(env)
    assert detect(Environment(env, step().host)).rejected == ()


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
        with pytest.raises(MusterError, match="this command runs in one process"):
            resolve.resolve(recording.load(FOLDER / file), LaunchOptions(), ["train", "single"], is_single=True)
