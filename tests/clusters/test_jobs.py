"""The job scripts of jobs/ under real schedulers: when they go back into the queue, and with which code they end.

`apptainer` is a stand-in here: it starts the command on the host. tests/image/test_jobs.py runs them with the SIF.
"""

from collections.abc import Mapping
from pathlib import Path

import pytest

from muster.entrypoint.jobs import making
from muster.entrypoint.jobs.script import Wanted
from tests.clusters.deadline import wait_for
from tests.clusters.grid_engine import GridEngineCluster
from tests.clusters.namespaces import PATH
from tests.clusters.slurm import SlurmCluster
from tests.clusters.slurm_job import Job

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

APPTAINER = """#!/bin/bash
# A stand-in: no container, only the command after the image.
until [[ $1 = *.sif ]]; do shift; done
shift; exec "$@"
"""
# Ends with its arguments as exit codes, one for each attempt; after the last one, always with that.
CODES = """
attempt=${MUSTER_ATTEMPT:-${SLURM_RESTART_COUNT:-0}}
echo "attempt $attempt on $(uname -n)"
for ((passed = 0; passed < attempt && $# > 1; passed++)); do shift; done
exit "$1"
"""
WAITS = """
trap 'sleep ${WARNED:-0}; exit 75' TERM USR1 USR2
attempt=${MUSTER_ATTEMPT:-${SLURM_RESTART_COUNT:-0}}
echo "attempt $attempt waits"
until [ "$attempt" -gt 0 ]; do sleep 0.1; done
"""


@pytest.fixture
def stand_in(tmp_path: Path) -> Mapping[str, str]:
    """The variables by which a job finds the stand-in, and an empty file in the place of an image."""
    program = tmp_path / "bin" / "apptainer"
    program.parent.mkdir()
    program.write_text(APPTAINER)
    program.chmod(0o755)
    image = tmp_path / "an image.sif"
    image.touch()
    return {"PATH": f"{program.parent}:{PATH}", "MUSTER_IMAGE": str(image)}


def script(site: str, *command: str, nodes: int = 1) -> str:
    return making.make(site, Wanted(nodes=nodes, command=command))


def ends_with(site: str, *codes: int) -> str:
    return script(site, "bash", "-c", CODES, "codes", *map(str, codes))


def test_slurm_requeues_75_and_nothing_else(slurm2: SlurmCluster, stand_in: Mapping[str, str]) -> None:
    limited = {**stand_in, "MUSTER_MAX_REQUEUES": "1"}
    preempted = slurm2.submit(ends_with("slurm", 75, 0), env=stand_in)
    again = slurm2.submit(ends_with("slurm", 75), env=limited)
    users = slurm2.submit(ends_with("slurm", 2), env=stand_in)
    failed = slurm2.submit(ends_with("slurm", 1), env=stand_in)

    assert ended(preempted) == ("COMPLETED", 0, 1)
    # Both attempts wrote into one file.
    assert preempted.output.count("attempt 0 on") == preempted.output.count("attempt 1 on") == 1, preempted.output
    assert ended(again) == ("FAILED", 75, 1)
    assert again.output.count(" on ") == 2, again.output
    assert ended(users) == ("FAILED", 2, 0)
    assert ended(failed) == ("FAILED", 1, 0)
    slurm2.idle()


def ended(job: Job) -> tuple[str, int, int]:
    job.wait(120)
    return job.state, job.exit_code, job.restarts


def test_slurm_requeues_a_warned_job_but_not_a_cancelled_one(slurm2: SlurmCluster, stand_in: Mapping[str, str]) -> None:
    """Both programs end with 75: they can't know why they were told to end."""
    env = {**stand_in, "WARNED": "1"}
    warned = slurm2.submit(script("slurm", "bash", "-c", WAITS), env=env)
    cancelled = slurm2.submit(script("slurm", "bash", "-c", WAITS), env=env)
    for job in (warned, cancelled):
        wait_for(f"job {job.id} to wait", lambda job=job: "attempt 0 waits" in job.output, 60)
    # As Slurm does for --signal=USR1@300: to the steps, and not to the script.
    warned.cancel("--signal=USR1")
    cancelled.cancel()
    assert ended(warned) == ("COMPLETED", 0, 1), warned.output
    # The script has waited for the program, which took a second to end.
    assert ended(cancelled) == ("CANCELLED", 75, 0)
    slurm2.idle()


def test_grid_engine_gets_the_script_again(grid_engine2: GridEngineCluster, stand_in: Mapping[str, str]) -> None:
    """Its own requeue, by exit code 99, keeps a job of several hosts waiting for a clean-up that never comes."""

    def run(name: str, *codes: int, **more: str) -> list[int]:
        env = {**stand_in, **more}
        grid_engine2.submit(ends_with("grid-engine", *codes), *options(name, env), env=env).wait(90)
        grid_engine2.idle(90)
        accounting = grid_engine2.workdir / "root" / "default" / "common" / "accounting"
        records = [line.split(":") for line in accounting.read_text().splitlines() if not line.startswith("#")]
        # The records of the scripts, and not those of their slave tasks.
        return [int(record[12]) for record in records if record[4] == name and record[-4] == "NONE"]

    def options(name: str, env: Mapping[str, str]) -> list[str]:
        return ["-pe", "one", "2", "-v", ",".join(env), "-N", name]

    def output(name: str) -> str:
        return "".join(path.read_text() for path in sorted(grid_engine2.shared.glob(f"{name}.o*")))

    # qdel warns the programs with USR2, and they end with 75; a deleted job must not be submitted again.
    deleted = grid_engine2.submit(
        script("grid-engine", "bash", "-c", WAITS), *options("deleted", stand_in), env=stand_in
    )
    wait_for("the programs to wait", lambda: output("deleted").count("attempt 0 waits") == 2, 60)
    deleted.cancel()
    deleted.wait(60)
    grid_engine2.idle(60)
    assert len(list(grid_engine2.shared.glob("deleted.o*"))) == 1, output("deleted")

    assert run("preempted", 75, 0) == [75, 0], output("preempted")
    for host in grid_engine2.nodes:
        assert [f"attempt {attempt} on {host}" in output("preempted") for attempt in (0, 1)] == [True, True]
    assert run("users", 2) == [2], output("users")
    assert run("again", 75, MUSTER_MAX_REQUEUES="1") == [75, 75], output("again")
