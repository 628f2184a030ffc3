"""The scripts tell the training when the job ends, and how long it has after a warning.

The commands are stand-ins, which answer as the documentation of qstat, bjobs, squeue and flux says.
"""

import re
import time
from pathlib import Path

import pytest

from muster.entrypoint.jobs import making
from muster.entrypoint.jobs.script import Wanted
from tests.jobs.standins import NAMES, Cluster


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    return Cluster(tmp_path)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("told", ["02:00:00", "120.0/hostA", "7200", "", "unlimited", "$(touch harm)"])
def test_the_launch_is_told_what_the_scheduler_says_of_the_limit(cluster: Cluster, name: str, told: str) -> None:
    """tests/entrypoint/launch/test_job.py tests how the launch reads it."""
    before = int(time.time())
    done = cluster.run(name, making.make(name, Wanted()), LIMIT=told)
    assert done.returncode == 0, done.stderr
    start, _, limit = cluster.environment(NAMES[name])["MUSTER_JOB_LIMIT"].partition("+")
    assert before <= int(start) <= time.time()
    # Flux prints seconds, with a fraction.
    assert limit == (re.sub("[^0-9].*", "", told) if name == "flux" else told)
    assert not (cluster.folder / "harm").exists()


@pytest.mark.parametrize("name", NAMES)
def test_an_end_that_the_user_gives_stays(cluster: Cluster, name: str) -> None:
    done = cluster.run(name, making.make(name, Wanted()), LIMIT="7200", MUSTER_JOB_END_TIME="99", MUSTER_GRACE_S="9")
    assert done.returncode == 0, done.stderr
    variables = cluster.environment(NAMES[name])
    assert (variables["MUSTER_JOB_END_TIME"], variables["MUSTER_GRACE_S"]) == ("99", "9")


@pytest.mark.parametrize(
    ("name", "variable", "told"), [("pbs", "PBS_WALLTIME", "3600"), ("slurm", "SLURM_JOB_END_TIME", "1795329999")]
)
def test_schedulers_that_tell_the_limit_themselves_are_not_asked(
    cluster: Cluster, name: str, variable: str, told: str
) -> None:
    done = cluster.run(name, making.make(name, Wanted()), **{variable: told})
    assert done.returncode == 0, done.stderr
    assert cluster.environment(NAMES[name])["MUSTER_JOB_LIMIT"].endswith(told)
    assert not cluster.words("squeue") + cluster.words("qstat")


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


@pytest.mark.parametrize("name", ["grid-engine", "flux"])
def test_the_next_attempt_has_an_end_of_its_own(cluster: Cluster, name: str) -> None:
    done = cluster.run(name, making.make(name, Wanted()), LIMIT="7200", CODE="75")
    assert done.returncode == 75, done.stderr
    if name == "flux":
        (again,) = [call for call in cluster.words("flux") if call[:2] == ["--parent", "batch"]]
    else:
        (again,) = cluster.words("qsub")
    assert "MUSTER_RUN" in " ".join(again)
    assert "MUSTER_JOB" not in " ".join(again)
