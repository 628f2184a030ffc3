"""A training that is deleted on a real Grid Engine leaves no process behind, and goes on in a new job.

`apptainer` is a stand-in here: it starts the command on the host.
"""

import signal
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import torch

from muster.entrypoint.jobs import making
from muster.entrypoint.jobs.script import Wanted
from muster.train.checkpoint import manager as checkpoint
from tests.clusters.deadline import wait_for
from tests.clusters.grid_engine import GridEngineCluster
from tests.clusters.grid_engine_config import QUEUE, QUEUE_ATTRIBUTES
from tests.clusters.grid_engine_job import Job
from tests.clusters.surviving import (
    LONG,
    assert_nothing_left,
    assert_nothing_lost,
    assert_undisturbed,
    hold,
    kill_ranks,
    ranks,
    release,
    resumed_step,
    train_undisturbed,
)
from tests.clusters.test_jobs import stand_in  # noqa: F401
from tests.clusters.weights import BIN, ONE_THREAD
from tests.train.comparing import TEXT

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

NOTIFY = " -notify\n"

# With data workers, which have to end too.
WITH_WORKERS = [*TEXT, "--no-bf16", "--seed=5", "--keep-checkpoints=1", "--nproc-per-node=1", "--train-num-workers=1"]


@pytest.fixture
def env(stand_in: Mapping[str, str]) -> Mapping[str, str]:  # noqa: F811
    """The variables of a job with our programs in place of an image."""
    return {**stand_in, **ONE_THREAD, "PATH": f"{stand_in['PATH']}:{BIN}"}


@pytest.fixture
def into_files(env: Mapping[str, str]) -> Mapping[str, str]:
    """As `env`, and the programs write to files: no closed pipe tells a process that the job is over."""
    program = Path(env["PATH"].partition(":")[0]) / "apptainer"
    program.write_text(program.read_text().replace('exec "$@"', 'exec "$@" > "said.$(uname -n)" 2>&1'))
    return env


@pytest.fixture
def a_minutes_notice(grid_engine2: GridEngineCluster) -> Iterator[None]:
    """Sets Grid Engine's default time between USR2 and KILL, a minute; the other tests have a shorter one."""

    def change(notify: str) -> None:
        grid_engine2.run("qconf", "-mattr", "queue", "notify", notify, QUEUE, check=True)

    change("00:01:00")
    yield
    change(QUEUE_ATTRIBUTES["notify"])


@pytest.fixture(autouse=True)
def clean(grid_engine2: GridEngineCluster) -> Iterator[None]:
    """Removes what a failed test leaves, before the next test."""
    yield
    grid_engine2.run("qdel", "-u", "*")
    kill_ranks(grid_engine2)


def script(name: str, argv: list[str]) -> str:
    return making.make(
        "grid-engine", Wanted(nodes=2, command=("train", "ddp", *argv, f"--name={name}", "--resume=auto"))
    )


def submit(cluster: GridEngineCluster, text: str, env: Mapping[str, str]) -> Job:
    return cluster.submit(text, "-pe", "one", "2", "-v", ",".join(env), env=env)


def test_a_job_deleted_with_notice_goes_on_in_a_new_one(
    grid_engine2: GridEngineCluster,
    env: Mapping[str, str],
    a_minutes_notice: None,
    undisturbed: dict[str, torch.Tensor],
) -> None:
    text, run = script("noticed", LONG), grid_engine2.shared / "runs" / "noticed"
    assert NOTIFY in text
    job = submit(grid_engine2, text, env)
    workers = hold(grid_engine2, run)
    job.cancel()
    release(workers, signal.SIGUSR2, timeout_s=60)
    job.wait(120)
    # No other job either: the job has not submitted itself again.
    assert_nothing_left(grid_engine2)
    again = submit(grid_engine2, text, env).wait(300)
    assert again.exit_code == 0, again.output
    assert_nothing_left(grid_engine2)
    assert_nothing_lost(run, job.output)
    assert_undisturbed(run, undisturbed)


def test_a_job_deleted_without_notice_leaves_no_process(
    grid_engine2: GridEngineCluster, into_files: Mapping[str, str], tmp_path: Path
) -> None:
    """KILL reaches only the job's own processes; the ranks are in sessions of their own, and would train for hours."""
    run = grid_engine2.shared / "runs" / "killed"
    job = submit(grid_engine2, script("killed", [*WITH_WORKERS, "--epochs=100000"]).replace(NOTIFY, "\n"), into_files)
    wait_for("a checkpoint", lambda: checkpoint.saved(run), 200)
    assert len(ranks(grid_engine2)) == 4, "two ranks with a data worker each"
    job.cancel()
    job.wait(60)
    assert_nothing_left(grid_engine2)
    newest, state, _ = checkpoint.load_newest(run)

    longer = [*WITH_WORKERS, f"--epochs={state['progress']['epoch'] + 2}"]
    again = submit(grid_engine2, script("killed", longer).replace(NOTIFY, "\n"), into_files).wait(300)
    assert again.exit_code == 0, (again.output, (grid_engine2.shared / "said.node01").read_text())
    assert_nothing_left(grid_engine2)
    assert resumed_step(run) == checkpoint.step_of(newest)
    assert_undisturbed(run, train_undisturbed(tmp_path, longer))
