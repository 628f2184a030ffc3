"""Trainings that a real Slurm stops and starts again end with the weights of an undisturbed one.

`apptainer` is a stand-in here: it starts the command on the host.
"""

import signal
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import torch

from muster.entrypoint.jobs import making
from muster.entrypoint.jobs.script import Wanted
from tests.clusters.deadline import wait_for
from tests.clusters.slurm import SlurmCluster
from tests.clusters.slurm_job import Job
from tests.clusters.surviving import (
    LONG,
    STOPPED,
    assert_nothing_left,
    assert_nothing_lost,
    assert_undisturbed,
    hold,
    kill_ranks,
    release,
)
from tests.clusters.test_jobs import stand_in  # noqa: F401
from tests.clusters.weights import BIN, ONE_THREAD

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

Weights = dict[str, torch.Tensor]


@pytest.fixture
def env(stand_in: Mapping[str, str]) -> Mapping[str, str]:  # noqa: F811
    """The variables of a job with our programs in place of an image."""
    return {**stand_in, **ONE_THREAD, "PATH": f"{stand_in['PATH']}:{BIN}"}


@pytest.fixture(autouse=True)
def clean(slurm2: SlurmCluster) -> Iterator[None]:
    """Removes what a failed test leaves, before the next test."""
    yield
    slurm2.run("scancel", "--user=root")
    kill_ranks(slurm2)


def script(name: str, *more: str) -> str:
    return making.make("slurm", Wanted(nodes=2, command=("train", "ddp", *LONG, f"--name={name}", *more)))


def outcome(job: Job) -> tuple[str, int, int]:
    """How the job ended: its state, its exit code, how often it was requeued."""
    job.wait(300)
    return job.state, job.exit_code, job.restarts


def held(cluster: SlurmCluster, job: Job, run: Path) -> list[int]:
    """The job's ranks, stopped in mid-training; see `hold`."""
    job.wait_for_state("RUNNING", timeout=60)
    return hold(cluster, run)


def test_a_job_warned_of_its_time_limit_requeues_itself(
    slurm2: SlurmCluster, env: Mapping[str, str], undisturbed: Weights
) -> None:
    """The warning is the script's own --signal=USR1@300; Slurm checks the limits every 30 s."""
    job, run = slurm2.submit(script("limit"), env=env), slurm2.shared / "runs" / "limit"
    workers = held(slurm2, job, run)
    slurm2.run("scontrol", "update", f"JobId={job.id}", "TimeLimit=5", check=True)
    release(workers, signal.SIGUSR1, timeout_s=90)
    wait_for("the job to wait in the queue", lambda: job.restarts == 1 and job.state == "PENDING", 90)
    slurm2.run("scontrol", "update", f"JobId={job.id}", "TimeLimit=60", check=True)
    assert outcome(job) == ("COMPLETED", 0, 1), job.output
    assert_nothing_left(slurm2)
    assert_nothing_lost(run, job.output)
    assert_undisturbed(run, undisturbed)


def test_a_cancelled_job_is_over_and_its_training_goes_on_in_a_new_one(
    slurm2: SlurmCluster, env: Mapping[str, str], undisturbed: Weights
) -> None:
    text, run = script("cancelled", "--resume=auto"), slurm2.shared / "runs" / "cancelled"
    job = slurm2.submit(text, env=env)
    workers = held(slurm2, job, run)
    job.cancel()
    release(workers, signal.SIGTERM, timeout_s=60)
    assert outcome(job) == ("CANCELLED", 75, 0), job.output
    assert_nothing_left(slurm2)
    again = slurm2.submit(text, env=env)
    assert outcome(again) == ("COMPLETED", 0, 0), again.output
    assert_nothing_left(slurm2)
    assert_nothing_lost(run, job.output)
    assert_undisturbed(run, undisturbed)


def test_a_job_requeued_by_an_operator_goes_on(
    slurm2: SlurmCluster, env: Mapping[str, str], undisturbed: Weights
) -> None:
    job, run = slurm2.submit(script("requeued"), env=env), slurm2.shared / "runs" / "requeued"
    workers = held(slurm2, job, run)
    slurm2.run("scontrol", "requeue", job.id, check=True)
    release(workers, signal.SIGTERM, timeout_s=60)
    assert outcome(job) == ("COMPLETED", 0, 1), job.output
    assert_nothing_left(slurm2)
    assert_nothing_lost(run, job.output)
    assert_undisturbed(run, undisturbed)


def test_a_job_preempted_by_a_higher_partition_goes_on_after_it(
    slurm2: SlurmCluster, env: Mapping[str, str], undisturbed: Weights
) -> None:
    job, run = slurm2.submit(script("preempted"), "--partition=spare", env=env), slurm2.shared / "runs" / "preempted"
    workers = held(slurm2, job, run)
    urgent = slurm2.submit(
        "echo urgent, and $(ls $RUN/checkpoints)", "--partition=hi", "-N2", "--exclusive", env={"RUN": str(run)}
    )
    release(workers, signal.SIGTERM, timeout_s=60)
    urgent.wait(200)
    assert outcome(job) == ("COMPLETED", 0, 1), job.output
    assert_nothing_left(slurm2)
    (step,) = STOPPED.findall(job.output)
    assert urgent.output.split() == ["urgent,", "and", "latest", f"step-{int(step):08}"]
    assert_nothing_lost(run, job.output)
    assert_undisturbed(run, undisturbed)
