"""The scripts tell the training when the job ends, and how long it has after a warning.

The commands are stand-ins: that qstat, bjobs, squeue and flux answer so was read in their documentation.
"""

import time
from pathlib import Path

import pytest

from muster.entrypoint.jobs import making
from muster.entrypoint.jobs.script import Wanted
from tests.jobs.standins import NAMES, Cluster


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    return Cluster(tmp_path)


LIMITS = [
    ("pbs", "02:00:00", 7200),
    ("lsf", "120.0/hostA", 7200),
    ("lsf", "02:00:00", 7200),
    ("grid-engine", "7200", 7200),
    ("grid-engine", "2:0:0", 7200),
    ("flux", "7200", 7200),
]


@pytest.mark.parametrize(("name", "told", "limit_s"), LIMITS)
def test_the_end_of_the_job_is_known_to_the_training(cluster: Cluster, name: str, told: str, limit_s: int) -> None:
    before = int(time.time())
    done = cluster.run(name, making.make(name, Wanted(time_s=600)), LIMIT=told)
    assert done.returncode == 0, done.stderr
    variables = cluster.environment(NAMES[name])
    start, end = (int(variables[f"MUSTER_JOB_{which}_TIME"]) for which in ("START", "END"))
    # Flux counts from now on, and the job's seconds before are added.
    assert limit_s <= end - start <= limit_s + 60
    assert before - 1 <= start <= time.time()


@pytest.mark.parametrize("name", ["pbs", "lsf", "grid-engine", "flux"])
@pytest.mark.parametrize("told", ["", "unlimited", "4294967295", "$(touch harm)"])
def test_a_limit_that_is_not_told_is_none(cluster: Cluster, name: str, told: str) -> None:
    # Some seconds into the job: where a limit is counted from now on, they are no limit by themselves.
    done = cluster.run(name, making.make(name, Wanted()), LIMIT=told, SECONDS="5")
    assert done.returncode == 0, done.stderr
    assert "MUSTER_JOB_END_TIME" not in cluster.environment(NAMES[name])
    assert not (cluster.folder / "harm").exists()


@pytest.mark.parametrize("name", NAMES)
def test_an_end_that_the_user_gives_stays(cluster: Cluster, name: str) -> None:
    done = cluster.run(name, making.make(name, Wanted()), LIMIT="7200", MUSTER_JOB_END_TIME="99", MUSTER_GRACE_S="9")
    assert done.returncode == 0, done.stderr
    variables = cluster.environment(NAMES[name])
    assert (variables["MUSTER_JOB_END_TIME"], variables["MUSTER_GRACE_S"]) == ("99", "9")


def test_torque_tells_the_limit_itself(cluster: Cluster) -> None:
    done = cluster.run("pbs", making.make("pbs", Wanted()), PBS_WALLTIME="3600")
    assert done.returncode == 0, done.stderr
    variables = cluster.environment("mpiexec")
    assert int(variables["MUSTER_JOB_END_TIME"]) - int(variables["MUSTER_JOB_START_TIME"]) == 3600


def test_slurm_before_23_is_asked_for_the_end(cluster: Cluster) -> None:
    for told, own, expected in (
        ("2026-11-22T05:00:00", "", "1795323600"),
        ("2026-11-22T05:00:00", "1795329999", None),
        ("NONE", "", None),
        ("", "", None),
    ):
        done = cluster.run("slurm", making.make("slurm", Wanted()), LIMIT=told, SLURM_JOB_END_TIME=own, TZ="UTC")
        assert done.returncode == 0, done.stderr
        assert cluster.environment("srun").get("MUSTER_JOB_END_TIME") == expected


@pytest.mark.parametrize(("name", "grace"), [("slurm", "300"), ("lsf", "300"), ("flux", "300"), ("pbs", None)])
def test_the_grace_is_told_where_the_script_has_set_it(cluster: Cluster, name: str, grace: str | None) -> None:
    assert cluster.run(name, making.make(name, Wanted())).returncode == 0
    assert cluster.environment(NAMES[name]).get("MUSTER_GRACE_S") == grace


@pytest.mark.parametrize(("limit", "warning"), [("75.2", "7"), ("7200", "300"), ("", "300")])
def test_flux_warns_within_the_job_and_not_at_its_start(cluster: Cluster, limit: str, warning: str) -> None:
    done = cluster.run("flux", making.make("flux", Wanted()), LIMIT=limit)
    assert done.returncode == 0, done.stderr
    (words,) = [call for call in cluster.words("flux") if call[0] == "run"]
    assert f"--signal=USR1@{warning}s" in words
    assert cluster.environment("flux")["MUSTER_GRACE_S"] == warning


@pytest.mark.parametrize(
    ("left_s", "grace", "is_told"), [(60, "", True), (60, "20", False), (3600, "", False)], ids=str
)
def test_a_job_shorter_than_slurms_warning_is_told(cluster: Cluster, left_s: int, grace: str, is_told: bool) -> None:
    end = str(int(time.time()) + left_s)
    done = cluster.run("slurm", making.make("slurm", Wanted()), SLURM_JOB_END_TIME=end, MUSTER_GRACE_S=grace)
    assert done.returncode == 0, done.stderr
    assert ("sbatch --signal=USR1@" in done.stderr) == is_told
    # What Slurm sends at the start of such a job is taken by a step of its own.
    assert (["--nodes=1", "--ntasks=1", "sleep", "35"] in cluster.words("srun")) == is_told


@pytest.mark.parametrize("name", ["grid-engine", "flux"])
def test_the_next_attempt_has_an_end_of_its_own(cluster: Cluster, name: str) -> None:
    done = cluster.run(name, making.make(name, Wanted()), LIMIT="7200", CODE="75")
    assert done.returncode == 75, done.stderr
    if name == "flux":
        (again,) = [call for call in cluster.words("flux") if call[0] == "--parent"]
        assert "MUSTER_JOB_END_TIME" not in cluster.environment("flux")
    else:
        (again,) = cluster.words("qsub")
    assert "MUSTER_RUN" in " ".join(again)
    assert "MUSTER_JOB" not in " ".join(again)
