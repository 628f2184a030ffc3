"""The tests' Grid Engine itself: real jobs, slave tasks and arrays on fake hosts."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.clusters.deadline import wait_for
from tests.clusters.grid_engine import GridEngineCluster
from tests.clusters.processes import processes_in

pytestmark = [pytest.mark.cluster, pytest.mark.long]
ROOT = Path(__file__).parents[2]

# Two tasks on each host of the job, as a job script starts them: each prints its place and its variables.
# qrsh joins its arguments and gives the line to a shell: so all is quoted twice here.
TWO_TASKS_A_HOST = """
rank=0
while read -r host slots _; do
  for local in $(seq 0 $((slots - 1))); do
    qrsh -inherit "$host" "echo \\$(hostname) $rank $local \\$JOB_ID \\$NHOSTS \\$NSLOTS \\${PE_HOSTFILE:-none}" &
    rank=$((rank + 1))
  done
done < $PE_HOSTFILE
wait
"""


def test_a_job_has_its_output_exit_code_and_host(grid_engine2: GridEngineCluster) -> None:
    job = grid_engine2.qsub("pwd; hostname; echo error >&2; exit 75")
    assert (job.state, job.exit_code) == ("done", 75)
    assert job.output == f"{grid_engine2.shared}\n{job.accounts[0].host}\nerror\n"


def test_a_job_knows_nothing_of_the_test_runner(
    grid_engine2: GridEngineCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MUSTER_LEAK", "1")
    script, env = "echo $MUSTER_LEAK$GIVEN; cd; pwd", {"GIVEN": "2"}
    home = f"{grid_engine2.hosts.home}\n"
    assert grid_engine2.qsub(script, env=env).output == f"\n{home}"
    assert grid_engine2.qsub(script, "-v", "GIVEN", env=env).output == f"2\n{home}"


@pytest.mark.parametrize(("environment", "slots"), [("one", 1), ("two", 2)])
def test_a_parallel_environment_gives_its_slots_a_host(
    grid_engine2: GridEngineCluster, environment: str, slots: int
) -> None:
    job = grid_engine2.qsub("echo $NHOSTS $NSLOTS; cat $PE_HOSTFILE", "-pe", environment, str(2 * slots))
    sizes, *lines = job.output.splitlines()
    assert sizes == f"2 {2 * slots}"
    assert sorted(lines) == [f"node0{n} {slots} main.q@node0{n} UNDEFINED" for n in (1, 2)]
    # The first host is that of the script, and need not be the first by name.
    assert lines[0].split()[0] == job.accounts[0].host


def test_slave_tasks_run_on_both_hosts_by_qrsh(grid_engine2: GridEngineCluster) -> None:
    job = grid_engine2.qsub(TWO_TASKS_A_HOST, "-pe", "two", "4")
    first = job.accounts[0].host
    (other,) = {"node01", "node02"} - {first}
    # The slave on the script's own host has the job's sizes, the other one its host's; neither has PE_HOSTFILE.
    # A slave on the script's own host may also print a line about its connection at its end.
    lines = [line for line in job.output.splitlines() if line.startswith("node")]
    assert sorted(lines, key=lambda line: line.split()[1]) == [
        f"{first} 0 0 {job.id} 2 4 none",
        f"{first} 1 1 {job.id} 2 4 none",
        f"{other} 2 0 {job.id} 1 2 none",
        f"{other} 3 1 {job.id} 1 2 none",
    ]
    # Four slave tasks have accounts of their own, which are not the job's.
    assert len(job.accounts) == 1


def test_the_host_file_is_readable_on_the_first_host_only(grid_engine2: GridEngineCluster) -> None:
    # With -V a slave task has the variable, and no such file.
    script = "for h in $(cut -d' ' -f1 $PE_HOSTFILE); do qrsh -inherit -V $h 'grep -c main.q $PE_HOSTFILE'; done"
    lines = grid_engine2.qsub(script, "-pe", "two", "4").output.splitlines()
    assert "2" in lines
    assert [line for line in lines if re.fullmatch("grep: /.*/pe_hostfile: No such file or directory", line)]


def test_an_array_has_an_output_and_an_account_a_task(grid_engine2: GridEngineCluster) -> None:
    script = "echo $SGE_TASK_ID of $SGE_TASK_FIRST-$SGE_TASK_LAST; exit $((SGE_TASK_ID == 2))"
    job = grid_engine2.qsub(script, "-t", "1-3")
    assert job.output == "1 of 1-3\n2 of 1-3\n3 of 1-3\n"
    assert [(account.task, account.exit_code) for account in job.accounts] == [(1, 0), (2, 1), (3, 0)]
    assert job.exit_code == 1


def test_gpus_are_counted(grid_engine2: GridEngineCluster) -> None:
    first, second = (grid_engine2.submit("sleep 30", "-l", "gpu=2") for _ in range(2))
    first.wait_for_state("r")
    second.wait_for_state("r")
    third = grid_engine2.submit("echo third", "-l", "gpu=1")
    wait_for(
        "third to be considered", lambda: "scheduling info" in grid_engine2.run("qstat", "-j", third.id).stdout, 10
    )
    assert third.state == "qw"
    first.cancel()
    assert third.wait().output == "third\n"
    second.cancel()
    grid_engine2.idle()


LISTEN = "trap 'echo warned' USR2; trap 'echo TERM' TERM; echo up; while :; do sleep 0.1; done 2> /dev/null"


def test_a_deleted_job_is_killed_without_a_warning(grid_engine2: GridEngineCluster) -> None:
    job = grid_engine2.submit(LISTEN).wait_for_state("r")
    wait_for("its first line", lambda: job.output, timeout_s=20)
    job.cancel()
    assert job.wait().output == "up\n"
    assert (job.accounts[0].failed, job.exit_code) == (100, 128 + signal.SIGKILL)


def test_with_notify_a_deleted_job_gets_usr2_before_it_is_killed(grid_engine2: GridEngineCluster) -> None:
    job = grid_engine2.submit(LISTEN, "-notify").wait_for_state("r")
    wait_for("its first line", lambda: job.output, timeout_s=20)
    job.cancel()
    assert [line for line in job.wait().output.splitlines() if "defined signal" not in line] == ["up", "warned"]
    assert job.exit_code == 128 + signal.SIGKILL


def test_a_deadline_shows_the_job_and_deletes_it(grid_engine2: GridEngineCluster) -> None:
    with pytest.raises(TimeoutError, match=r"(?s)waited 2 s for job \d+ to be done.*state r; it wrote:\nhello"):
        grid_engine2.qsub("echo hello; sleep 60", timeout=2)
    grid_engine2.idle()


def test_a_job_that_cannot_start_says_why(grid_engine2: GridEngineCluster) -> None:
    with pytest.raises(RuntimeError, match=r"can't start: error reason .* can't chdir to /missing"):
        grid_engine2.qsub("true", "-wd", "/missing")
    grid_engine2.idle()


def test_two_clusters_at_once_and_nothing_is_left(
    grid_engine_cluster: Callable[..., GridEngineCluster], grid_engine2: GridEngineCluster
) -> None:
    before = _machine()
    other = grid_engine_cluster(["node01", "node02"], slots=2)
    namespaces = other.hosts.namespaces()
    assert not namespaces & grid_engine2.hosts.namespaces()
    first, second = (cluster.submit("sleep 30", "-pe", "two", "4") for cluster in (grid_engine2, other))
    first.wait_for_state("r")
    second.wait_for_state("r")
    first.cancel()
    first.wait()
    grid_engine2.idle()
    assert second.state == "r"
    assert "sleep" in [process.name for node in other.nodes for process in other.processes(node)]
    other.hosts.close()
    assert processes_in(namespaces) == []
    assert _machine() == before


def test_a_killed_runner_leaves_no_daemon(tmp_path: Path, grid_engine2: GridEngineCluster) -> None:
    code = """
import sys, time
from pathlib import Path
from tests.clusters.grid_engine import GridEngineCluster
with GridEngineCluster(Path(sys.argv[1]), ["node01"]) as cluster:
    cluster.submit("sleep 90").wait_for_state("r")
    print(*cluster.hosts.namespaces(), flush=True)
    time.sleep(90)
"""
    runner = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    with runner:
        assert runner.stdout
        namespaces = set(runner.stdout.readline().split())
        assert {process.name for process in processes_in(namespaces)} >= {"sge_qmaster", "sge_execd"}
        os.kill(runner.pid, signal.SIGKILL)
    wait_for("the killed runner's cluster to vanish", lambda: not processes_in(namespaces), timeout_s=60)


def test_no_cluster_where_a_daemon_fails_and_what_it_wrote_is_shown(
    tmp_path: Path, grid_engine2: GridEngineCluster
) -> None:
    cluster = GridEngineCluster(tmp_path, ["node01"])
    (tmp_path / "spool" / "login").rename(tmp_path / "spool" / "elsewhere")
    began = time.monotonic()
    with pytest.raises(RuntimeError, match="daemon of login failed to start") as failed, cluster:
        pass
    assert time.monotonic() - began < 20
    assert "--- login.start\nmount: /var/spool" in failed.value.__notes__[0]
    assert cluster.hosts.namespaces() == set()


def _machine() -> list[str]:
    """What a cluster could leave on the machine: mounts and Grid Engine's files outside its folder."""
    mounts = Path("/proc/self/mountinfo").read_text().splitlines()
    left = [
        str(path) for folder in ("/var/spool/gridengine", "/var/lib/gridengine") for path in Path(folder).rglob("*")
    ]
    return sorted([*mounts, *left, *map(str, Path("/tmp").glob("*_messages*"))])
