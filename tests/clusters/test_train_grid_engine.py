"""`train` under a real Grid Engine: a task on each host by `qrsh -inherit`, arrays, and the fix of each refusal."""

import re
import shlex
from pathlib import Path

import pytest
import torch

from tests.clusters.grid_engine import GridEngineCluster
from tests.clusters.hello import hello, said
from tests.clusters.weights import MUSTER, STEPS, TRAIN, assert_world_of_four, lines_of_error, summary

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

BOTH = ("node01", "node02")


def on_each_host(argv: list[str], *variables: str) -> str:
    """A job script that starts a task on each host of PE_HOSTFILE, with `variables` (NAME=VALUE) before the command."""
    # qrsh starts in the home folder and gives its line to a shell. The script expands its own variables in that line.
    command = " ".join([*variables, shlex.join(argv)])
    return f"""
hosts=$(awk '!seen[$1]++ {{print $1}}' "$PE_HOSTFILE" | paste -sd,)
codes=
for host in ${{hosts//,/ }}; do
  qrsh -inherit "$host" "cd $PWD && env OMP_NUM_THREADS=1 {command}" & codes="$codes $!"
done
code=0; for pid in $codes; do wait $pid || code=$?; done; exit $code
"""


def test_a_task_on_each_host_trains_to_equal_weights(
    grid_engine2: GridEngineCluster, four_ranks: dict[str, torch.Tensor]
) -> None:
    argv = [TRAIN, "ddp", *STEPS, "--nproc-per-node=2", "--name=pe"]
    job = grid_engine2.qsub(on_each_host(argv, "MUSTER_HOSTS=$hosts"), "-pe", "two", "4", timeout=400)
    assert job.exit_code == 0, job.output
    assert f"muster: grid_engine job {job.id}, qrsh: 2 nodes x 2 = 4 ranks" in job.output
    assert_world_of_four(grid_engine2.shared / "runs" / "pe", four_ranks, BOTH)
    grid_engine2.idle()


def test_the_launch_line_of_a_refusal_works_when_pasted(grid_engine2: GridEngineCluster) -> None:
    """The command is refused in the job script; the line of its `fix` starts it on each host."""
    argv = hello(grid_engine2.shared, "--nproc-per-node=2")
    script = f"""
export PATH={shlex.quote(str(Path(MUSTER).parent))}:$PATH
{shlex.join(argv)} 2> refusal; cat refusal
sed -n 's/^  fix: //p' refusal > line.sh; . ./line.sh
"""
    job = grid_engine2.qsub(script, "-pe", "one", "2", timeout=400)
    wrong, seen, fix = lines_of_error(job.output)[:3]
    assert "grid_engine gave this job 2 nodes" in wrong
    assert "PE_HOSTFILE" in seen
    assert "qrsh -inherit" in fix
    assert [line.split()[:2] for line in said(job.output)] == [["sum", "4.0"]] * 4, job.output
    assert {line.split()[2] for line in said(job.output)} == {*BOTH}
    grid_engine2.idle()


@pytest.mark.parametrize(
    "variables",
    [["--nnodes=2", "--node-rank=$n", "--master-addr=$first"], ["MUSTER_HOSTS"]],
    ids=["by-hand", "hosts"],
)
def test_ways_for_tasks_without_a_host_file(grid_engine2: GridEngineCluster, variables: list[str]) -> None:
    """The variable for which a task's refusal asks, and options in place of it."""
    argv = hello(grid_engine2.shared, "--nproc-per-node=2")
    by_hand = " ".join(variables) if len(variables) > 1 else ""
    given = "" if by_hand else "env MUSTER_HOSTS=$hosts "
    command = shlex.join(argv).replace(" run ", f" run {by_hand} ")
    script = f"""
hosts=$(awk '!seen[$1]++ {{print $1}}' "$PE_HOSTFILE" | paste -sd,); first=${{hosts%%,*}}; n=0
for host in ${{hosts//,/ }}; do qrsh -inherit "$host" "{given}{command}" & n=$((n + 1)); done; wait
"""
    job = grid_engine2.qsub(script, "-pe", "one", "2", timeout=400)
    assert [line.split()[1] for line in said(job.output)] == ["4.0"] * 4, job.output
    grid_engine2.idle()


def test_a_task_without_a_host_file_is_refused_and_told_what_it_needs(grid_engine2: GridEngineCluster) -> None:
    job = grid_engine2.qsub(on_each_host([TRAIN, "ddp", *STEPS]), "-pe", "one", "2", timeout=400)
    assert job.exit_code == 2, job.output
    errors = lines_of_error(job.output)
    assert [line for line in errors if "MUSTER_HOSTS=" in line and "qrsh -inherit HOST env MUSTER_HOSTS" in line]
    assert "Traceback" not in job.output
    grid_engine2.idle()


def test_tasks_of_an_array_train_alone(grid_engine2: GridEngineCluster) -> None:
    command = f"{shlex.join([TRAIN, 'ddp', *STEPS, '--nproc-per-node=1'])} --name=task$SGE_TASK_ID"
    job = grid_engine2.qsub(f"exec env OMP_NUM_THREADS=1 {command}", "-t", "1-2", timeout=400)
    assert job.exit_code == 0, job.output
    for task in (1, 2):
        found = summary(grid_engine2.shared / "runs" / f"task{task}")
        assert (found["world_size"], found["num_nodes"]) == (1, 1)
    assert re.findall(r"muster: grid_engine job \d+\.(\d)", job.output) == ["1", "2"]
    grid_engine2.idle()
