"""Kubernetes' manifests: what `train` detects in their pods; the pods' rights, restarts, exit codes and waits."""

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from muster.entrypoint.jobs.kubernetes import KINDS
from muster.errors import ExitCode
from tests.clusters.deadline import wait_for
from tests.clusters.requirements import require_programs
from tests.jobs import pods
from tests.jobs.pods import IMAGE, manifest

MASTERS = {"job": "muster-0.muster", "jobset": "muster-node-0-0.muster", "pytorchjob": "muster-master-0"}
PORTS = {"job": 29500, "jobset": 29500, "pytorchjob": 23456}


def detected(pod: pods.Pod, folder: Path) -> dict[str, Any]:
    """The output of `muster detect` in a pod."""
    file = pod.record(folder / f"{pod.host}.env")
    code = "import sys; from muster.entrypoint.cli import muster; sys.argv[0] = 'muster'; muster()"
    answer = subprocess.run(
        [sys.executable, "-c", code, "detect", "--json", "--env-file", str(file)],
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert answer.returncode == 0, answer.stderr
    return json.loads(answer.stdout)


@pytest.mark.parametrize("nodes", [1, 12])
@pytest.mark.parametrize("kind", KINDS)
def test_each_pod_finds_its_rank_the_world_and_the_master(kind: str, nodes: int, tmp_path: Path) -> None:
    made = pods.of(manifest(kind, nodes=nodes))
    assert len(made) == nodes
    for rank in sorted({0, nodes // 2, nodes - 1}):
        found = detected(made[rank], tmp_path)
        assert (found["scheduler"], found["launcher"], found["mode"]) == ("kubernetes", "kubernetes", "agent")
        assert (found["num_nodes"], found["node_rank"]) == (nodes, rank)
        if nodes > 1:
            assert (found["master_addr"], found["master_port"]) == (MASTERS[kind], PORTS[kind])
            assert found["master_addr"] == made[0].address
        if kind != "pytorchjob":
            assert found["hosts"] == [pod.address for pod in made]


def test_the_training_operators_before_1_7_give_enough_too(tmp_path: Path) -> None:
    made = pods.of(manifest("pytorchjob", nodes=3), old_operator=True)
    for rank, pod in enumerate(made):
        found = detected(pod, tmp_path)
        assert (found["num_nodes"], found["node_rank"], found["master_addr"]) == (3, rank, "muster-master-0")


@pytest.mark.parametrize("kind", KINDS)
def test_a_pod_has_what_training_needs_and_no_more_rights(kind: str) -> None:
    spec = pods.template(pods.job(manifest(kind, gpus=4, claim="runs")))["spec"]
    container = spec["containers"][0]
    assert container["image"] == IMAGE
    assert container["resources"]["limits"] == {"nvidia.com/gpu": "4"}
    volumes = {volume.pop("name"): volume for volume in spec["volumes"]}
    mounts = {mount["mountPath"]: volumes[mount["name"]] for mount in container["volumeMounts"]}
    assert mounts["/dev/shm"] == {"emptyDir": {"medium": "Memory", "sizeLimit": "16Gi"}}
    assert mounts["/workspace"] == {"persistentVolumeClaim": {"claimName": "runs"}}
    assert mounts["/tmp"] == {"emptyDir": {}}
    assert spec["terminationGracePeriodSeconds"] == 300
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert {spec["securityContext"][name] for name in ("runAsUser", "runAsGroup", "fsGroup")} == {1000}
    for each in (*spec.get("initContainers", ()), container):
        assert each["securityContext"]["readOnlyRootFilesystem"] is True
        assert each["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert not {"hostNetwork", "hostIPC", "hostPID"} & spec.keys()
    # A Service called master would set MASTER_PORT=tcp://..., which is no port.
    assert spec["enableServiceLinks"] is False


@pytest.mark.parametrize("kind", KINDS)
def test_rdma_is_asked_for_by_the_name_that_a_cluster_gives_it(kind: str) -> None:
    devices = ("rdma/hca_shared_devices_a", "vpc.amazonaws.com/efa=4")
    container = pods.template(pods.job(manifest(kind, gpus=0, device=devices)))["spec"]["containers"][0]
    assert container["resources"]["limits"] == {"rdma/hca_shared_devices_a": "1", "vpc.amazonaws.com/efa": "4"}
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["IPC_LOCK"]}


def test_a_job_is_repeated_after_75_only_and_within_its_time() -> None:
    document = pods.job(manifest("job", nodes=3, time="2h"))
    spec = document["spec"]
    evicted, others = spec["podFailurePolicy"]["rules"]
    assert (spec["activeDeadlineSeconds"], spec["backoffLimit"]) == (7200, 9)
    assert evicted["onPodConditions"] == [{"type": "DisruptionTarget", "status": "True"}]
    assert others["action"] == "FailJob"
    container = pods.template(document)["spec"]["containers"][0]["name"]
    assert others["onExitCodes"] == {"containerName": container, "operator": "NotIn", "values": [ExitCode.PREEMPTED]}
    # Without it, podFailurePolicy is refused.
    assert pods.template(document)["spec"]["restartPolicy"] == "Never"


def test_a_jobset_is_repeated_as_a_whole_but_not_after_2() -> None:
    document = pods.job(manifest("jobset", time="2h"))
    policy, spec = document["spec"]["failurePolicy"], document["spec"]["replicatedJobs"][0]["template"]["spec"]
    assert policy["maxRestarts"] == 3
    assert policy["rules"][0]["action"] == "FailJobSet"
    assert policy["rules"][0]["onJobFailureReasons"] == ["PodFailurePolicy", "DeadlineExceeded"]
    assert (spec["activeDeadlineSeconds"], spec["backoffLimit"]) == (7200, 0)
    container = pods.template(document)["spec"]["containers"][0]["name"]
    (rule,) = spec["podFailurePolicy"]["rules"]
    assert rule["onExitCodes"] == {"containerName": container, "operator": "In", "values": [ExitCode.USER_MUST_CHANGE]}
    assert pods.template(document)["spec"]["restartPolicy"] == "Never"


def test_a_pytorchjob_stops_all_pods_when_one_has_failed() -> None:
    spec = pods.job(manifest("pytorchjob", nodes=3, time="2h"))["spec"]
    assert spec["runPolicy"] == {"activeDeadlineSeconds": 7200, "cleanPodPolicy": "Running"}
    assert {group["restartPolicy"] for group in spec["pytorchReplicaSpecs"].values()} == {"ExitCode"}
    # With ExitCode, a backoffLimit of 0 would fail the job at the first 75; any other does nothing.
    assert "backoffLimit" not in spec["runPolicy"]


@pytest.mark.parametrize(("code", "seen"), [(0, 0), (1, 1), (ExitCode.USER_MUST_CHANGE, 2), (ExitCode.PREEMPTED, 203)])
def test_a_pytorchjobs_pod_ends_by_a_code_that_the_operator_understands(code: int, seen: int) -> None:
    require_programs("tini")
    (pod,) = pods.of(manifest("pytorchjob", nodes=1, command=("sh", "-c", f"exit {code}")))
    assert subprocess.run(pod.command, timeout=240, check=False).returncode == seen


def test_a_pytorchjobs_pod_waits_for_training_to_end_after_sigterm(tmp_path: Path) -> None:
    """As the kubelet does it: SIGTERM goes to process 1 of the pod, whose exit code counts."""
    require_programs("tini")
    code = (
        "import pathlib, signal, sys, time\n"
        "def end(*_):\n"
        "    pathlib.Path(sys.argv[1], 'checkpoint').touch()\n"
        f"    sys.exit({ExitCode.PREEMPTED})\n"
        "signal.signal(signal.SIGTERM, end)\n"
        "pathlib.Path(sys.argv[1], 'started').touch()\n"
        "time.sleep(600)\n"
    )
    (pod,) = pods.of(manifest("pytorchjob", nodes=1, command=(sys.executable, "-c", code, str(tmp_path))))
    process = subprocess.Popen(pod.command)
    try:
        wait_for("training to start", (tmp_path / "started").exists, timeout_s=60)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 203
    finally:
        process.kill()
    assert (tmp_path / "checkpoint").exists()


@pytest.mark.parametrize("kind", ["job", "jobset"])
def test_pods_wait_until_the_names_of_all_are_known(kind: str, tmp_path: Path) -> None:
    """The wait in the manifest; a stand-in for `getent` knows a name only when it is asked a second time."""
    text = manifest(kind, nodes=3)
    stand_in = tmp_path / "getent"
    stand_in.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/asked\n[ "$(grep -c "$2" {tmp_path}/asked)" -ge 2 ]\n')
    stand_in.chmod(0o755)
    (tmp_path / "sleep").symlink_to("/bin/true")
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    words = pods.of(text)[2].before
    assert words[:2] == ["timeout", "1800"]
    assert subprocess.run(words, env=env, timeout=240, check=False).returncode == 0
    asked = (tmp_path / "asked").read_text().splitlines()
    assert asked == [f"ahosts {pod.address}" for pod in pods.of(text) for _ in range(2)]
    # If a name stays unknown, the wait ends with an exit code that is neither 2 nor 75.
    stand_in.write_text("#!/bin/sh\nexit 2\n")
    assert subprocess.run(["timeout", "0.2", *words[2:]], env=env, timeout=240, check=False).returncode == 124


@pytest.mark.parametrize("kind", KINDS)
def test_shellcheck_finds_nothing_in_the_scripts(kind: str) -> None:
    (pod, *_) = pods.of(manifest(kind))
    scripts = [words[words.index("-c") + 1] for words in (pod.before, pod.command) if "-c" in words]
    assert len(scripts) == 1
    found = subprocess.run(
        [Path(sys.executable).with_name("shellcheck"), "--shell=sh", "-"],
        input=scripts[0],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (found.returncode, found.stdout) == (0, "")


@pytest.mark.parametrize("kind", KINDS)
def test_one_pod_waits_for_no_other(kind: str) -> None:
    assert "initContainers" not in pods.template(pods.job(manifest(kind, nodes=1)))["spec"]
