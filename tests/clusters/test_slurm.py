"""The tests' Slurm itself: real steps, jobs, allocations and devices on fake hosts."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.clusters import requirements
from tests.clusters.deadline import wait_for
from tests.clusters.processes import processes_in
from tests.clusters.slurm import SlurmCluster

pytestmark = [pytest.mark.cluster, pytest.mark.long]
ROOT = Path(__file__).parents[2]

LOST = "step_launch_notify_io_failure"
"""Slurm's message if it has lost the connection to a node that had answered, which has nothing to do with a test."""


def _seen(cluster: SlurmCluster, variables: str, *options: str) -> list[str]:
    """One line for each task, sorted: its host and these variables, like "node01 SLURM_PROCID=0"."""
    shell = f"echo $(hostname) $(env | grep -E '^({variables})=' | sort)"
    done = cluster.srun(*options, "sh", "-c", shell)
    if done.returncode and LOST in done.stderr:
        done = cluster.srun(*options, "sh", "-c", shell)
    assert done.returncode == 0, done.stderr
    return sorted(done.stdout.splitlines())


def test_a_step_has_a_task_a_node(slurm2: SlurmCluster) -> None:
    assert _seen(slurm2, "SLURM_NODEID|SLURM_STEP_NODELIST", "-N2") == [
        "node01 SLURM_NODEID=0 SLURM_STEP_NODELIST=node[01-02]",
        "node02 SLURM_NODEID=1 SLURM_STEP_NODELIST=node[01-02]",
    ]


def test_each_task_sees_the_one_gpu_that_it_asked_for(slurm2: SlurmCluster) -> None:
    options = ["-N2", "--ntasks-per-node=2", "--gpus-per-task=1"]
    assert _seen(slurm2, "CUDA_VISIBLE_DEVICES|SLURM_GPUS_ON_NODE|SLURM_LOCALID", *options) == [
        "node01 CUDA_VISIBLE_DEVICES=0 SLURM_GPUS_ON_NODE=2 SLURM_LOCALID=0",
        "node01 CUDA_VISIBLE_DEVICES=1 SLURM_GPUS_ON_NODE=2 SLURM_LOCALID=1",
        "node02 CUDA_VISIBLE_DEVICES=0 SLURM_GPUS_ON_NODE=2 SLURM_LOCALID=0",
        "node02 CUDA_VISIBLE_DEVICES=1 SLURM_GPUS_ON_NODE=2 SLURM_LOCALID=1",
    ]


def test_the_step_of_one_task_a_node_sees_all_gpus(slurm2: SlurmCluster) -> None:
    assert _seen(slurm2, "CUDA_VISIBLE_DEVICES", "-N2", "--gpus-per-node=2") == [
        "node01 CUDA_VISIBLE_DEVICES=0,1",
        "node02 CUDA_VISIBLE_DEVICES=0,1",
    ]


def test_more_gpus_than_there_are_is_refused(slurm2: SlurmCluster) -> None:
    done = slurm2.srun("-N2", "--gpus-per-node=3", "true")
    assert done.returncode == 1
    assert "configuration is not available" in done.stderr


def test_a_batch_job_runs_steps_on_its_nodes_in_the_shared_folder(slurm2: SlurmCluster) -> None:
    job = slurm2.sbatch("pwd; hostname; srun --label hostname | sort", "-N2")
    assert (job.state, job.exit_code, job.signal) == ("COMPLETED", 0, 0)
    assert job.output == f"{slurm2.shared}\nnode01\n0: node01\n1: node02\n"


def test_a_failed_job_has_its_exit_code_and_output(slurm2: SlurmCluster) -> None:
    job = slurm2.sbatch("echo before; exit 75")
    assert (job.state, job.exit_code, job.output) == ("FAILED", 75, "before\n")


def test_a_batch_job_knows_nothing_of_the_test_runner(slurm2: SlurmCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MUSTER_LEAK", "1")
    job = slurm2.sbatch("env", env={"GIVEN": "1"})
    assert "GIVEN=1\n" in job.output
    assert f"HOME={slurm2.hosts.home}\n" in job.output
    assert "MUSTER_LEAK" not in job.output
    assert "PYTEST" not in job.output


def test_the_command_of_salloc_runs_on_the_login_host(slurm2: SlurmCluster) -> None:
    done = slurm2.salloc("-N2", "sh", "-c", "hostname; srun hostname | sort", check=True)
    assert done.stdout.split() == ["login", "node01", "node02"]


def test_a_step_on_a_subset_numbers_its_own_nodes(slurm2: SlurmCluster) -> None:
    shown = "echo $SLURM_NODEID $SLURM_NNODES $SLURM_STEP_NODELIST $SLURM_JOB_NODELIST"
    done = slurm2.salloc("-N2", "srun", "-N1", "-n1", "-w", "node02", "sh", "-c", shown, check=True)
    assert done.stdout == "0 1 node02 node[01-02]\n"


def test_three_nodes(slurm3: SlurmCluster) -> None:
    assert sorted(slurm3.srun("-N3", "hostname", check=True).stdout.split()) == ["node01", "node02", "node03"]


@pytest.mark.parametrize(
    ("nodes", "compressed"),
    [
        (
            ["gpu-a1", "gpu-a2", "gpu-b7", "rack10n008", "rack10n009", "rack11n010"],
            "gpu-a[1-2],gpu-b7,rack10n[008-009],rack11n010",
        ),
        (["r0_b0", "r0_b1", "r1_b0", "r1_b1"], "r0_b[0-1],r1_b[0-1]"),
        (["n1-ib", "n2-ib"], "n1-ib,n2-ib"),
    ],
)
def test_irregular_host_names(slurm_cluster: Callable[..., SlurmCluster], nodes: list[str], compressed: str) -> None:
    cluster = slurm_cluster(nodes)
    size = f"-N{len(nodes)}"
    assert {line.split("=")[1] for line in _seen(cluster, "SLURM_STEP_NODELIST", size)} == {compressed}
    assert cluster.expand(compressed) == nodes
    # The order of the list is the order of the node ids, and each host has the name that Slurm gives it.
    by_id = cluster.srun(size, "sh", "-c", "echo $SLURM_NODEID $(hostname)", check=True).stdout.splitlines()
    assert [line.split()[1] for line in sorted(by_id)] == nodes


def test_two_clusters_at_once(slurm_cluster: Callable[..., SlurmCluster], slurm2: SlurmCluster) -> None:
    other = slurm_cluster(["node01", "node02"])
    first, second = slurm2.submit("sleep 30", "-N2"), other.submit("sleep 30", "-N2")
    first.wait_for_state("RUNNING")
    second.wait_for_state("RUNNING")
    first.cancel()
    assert first.wait().state == "CANCELLED"
    assert second.state == "RUNNING"
    assert wait_for("node02 to be without a job", lambda: not slurm2.processes("node02"), timeout_s=20)
    assert "sleep" in [process.name for process in other.processes("node01")]
    slurm2.idle()


def test_hosts_whose_own_name_is_loopback(slurm_cluster: Callable[..., SlurmCluster]) -> None:
    cluster = slurm_cluster(["node01", "node02"], own_name_is_loopback=True)
    job = cluster.sbatch("getent hosts $(hostname); srun hostname | sort", "-N2")
    assert job.output == "127.0.1.1       node01\nnode01\nnode02\n"


def test_a_job_in_hi_preempts_and_the_victim_is_requeued(slurm_cluster: Callable[..., SlurmCluster]) -> None:
    cluster = slurm_cluster(["node01"], credential_lifetime_s=5)
    # A trap of bash runs when the foreground command has ended: only `wait` is interrupted.
    script = "trap 'echo TERM; exit' TERM; echo run $SLURM_RESTART_COUNT.; sleep ${SLURM_RESTART_COUNT:+0.}50 & wait"
    victim = cluster.submit(script, "--exclusive", "--open-mode=append")
    victim.wait_for_state("RUNNING")
    wait_for("the victim's first line", lambda: victim.output, timeout_s=20)
    urgent = cluster.sbatch("echo urgent", "--exclusive", "--partition=hi")
    assert urgent.output == "urgent\n"
    assert victim.wait().state == "COMPLETED"
    assert victim.restarts == 1
    assert [line for line in victim.output.splitlines() if "PREEMPTION" not in line] == ["run .", "TERM", "run 1."]


def test_a_node_dies_and_comes_back(slurm_cluster: Callable[..., SlurmCluster]) -> None:
    cluster = slurm_cluster(["node01", "node02"], gpus=1)
    cluster.kill("node02")
    cluster.idle()
    assert cluster.srun("-N1", "hostname", check=True).stdout == "node01\n"
    cluster.start("node02")
    cluster.idle()
    assert _seen(cluster, "CUDA_VISIBLE_DEVICES", "-N2", "--gpus-per-node=1") == [
        "node01 CUDA_VISIBLE_DEVICES=0",
        "node02 CUDA_VISIBLE_DEVICES=0",
    ]


def test_a_deadline_shows_the_job_and_cancels_it(slurm2: SlurmCluster) -> None:
    with pytest.raises(TimeoutError, match=r"(?s)waited 2 s for job \d+ to end.*state RUNNING.*it wrote:\nhello"):
        slurm2.sbatch("echo hello; sleep 60", timeout=2)
    slurm2.idle()


def test_a_hanging_srun_is_named_and_leaves_no_job(slurm2: SlurmCluster) -> None:
    with pytest.raises(TimeoutError, match=r"waited 2 s for `srun --input=none -N2 sleep 60` on login"):
        slurm2.srun("-N2", "sleep", "60", timeout=2)
    slurm2.idle()


def test_no_cluster_where_a_daemon_fails_and_its_log_is_shown(tmp_path: Path) -> None:
    requirements.require_programs(*requirements.SLURM_PROGRAMS)
    requirements.require_namespaces()
    cluster = SlurmCluster(tmp_path, ["node01"])
    with (tmp_path / "etc" / "slurm.conf").open("a") as config:
        config.write("NoSuchSetting=1\n")
    with pytest.raises(RuntimeError, match=r"the Slurm daemon of .* ended with 1") as failed, cluster:
        pass
    assert "NoSuchSetting" in failed.value.__notes__[0]
    assert cluster.hosts.namespaces() == set()


def test_a_killed_runner_leaves_no_daemon(tmp_path: Path, slurm2: SlurmCluster) -> None:
    code = """
import sys, time
from pathlib import Path
from tests.clusters.slurm import SlurmCluster
with SlurmCluster(Path(sys.argv[1]), ["node01"], gpus=1) as cluster:
    cluster.submit("srun sleep 90").wait_for_state("RUNNING")
    print(*cluster.hosts.namespaces(), flush=True)
    time.sleep(90)
"""
    runner = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    with runner:
        assert runner.stdout
        namespaces = set(runner.stdout.readline().split())
        names = {process.name for process in processes_in(namespaces)}
        assert names >= {"munged", "slurmctld", "slurmd"}
        os.kill(runner.pid, signal.SIGKILL)
    wait_for("the killed runner's cluster to vanish", lambda: not processes_in(namespaces), timeout_s=60)
    cgroups = [path for path in Path("/sys/fs/cgroup").glob("**/*slurm*") if path.is_dir()]
    assert cgroups == []


def test_packages_are_those_of_the_programs() -> None:
    assert requirements.PACKAGES_FILE.read_text().split() == sorted(set(requirements.PACKAGE_OF.values()))


@pytest.mark.parametrize(("ci", "outcome"), [("true", pytest.fail.Exception), ("", pytest.skip.Exception)])
def test_a_missing_program_is_a_failure_in_ci_only(
    monkeypatch: pytest.MonkeyPatch, ci: str, outcome: type[BaseException]
) -> None:
    monkeypatch.setenv("CI", ci)
    monkeypatch.setattr(requirements, "SEARCH_PATH", "/nowhere")
    with pytest.raises(outcome, match=r"srun; fix: apt-get install --no-install-recommends slurm-client"):
        requirements.require_programs("srun", "salloc")
