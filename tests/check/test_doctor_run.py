"""What is made of the facts: one fault at a time, planted in facts of healthy nodes that are written by hand."""

from dataclasses import replace
from typing import Any

import pytest

from muster.check.doctor import gpus, memory, network, software, storage
from muster.check.doctor.finding import outliers
from muster.check.doctor.storage import Space
from muster.check.ranks import listed
from tests.check.healthy import (
    ADAPTER,
    PORT,
    SUBJECTS,
    Told,
    found,
    healthy,
    on_cpus,
    only,
    with_gpu,
    with_node,
    with_ranks,
)

MIB, GIB = 2**20, 2**30


@pytest.mark.parametrize("told", [healthy(1, 1), healthy(2, 4), healthy(64, 8), on_cpus(healthy(2, 2))])
def test_nothing_is_found_on_healthy_nodes(told: Told) -> None:
    assert found(told) == []


def test_nothing_is_made_of_what_nobody_can_tell() -> None:
    """Ranks that can tell nothing but where they are."""
    told: Told = {
        "software": {host: [software.Facts()] for host in "ab"},
        "GPUs": {host: [gpus.Facts(rank=rank)] for rank, host in enumerate("ab")},
        "memory": {host: [memory.Facts(rank=rank)] for rank, host in enumerate("ab")},
        "storage": {host: [storage.Facts(checkpoints=Space(path="/"))] for host in "ab"},
        "network": {host: [network.Facts()] for host in "ab"},
    }
    assert found(told) == []
    assert all(subject.summary(told[subject.NAME]) for subject in SUBJECTS)


ODD: list[tuple[dict[str, Any], str, str, str]] = [
    ({"image": "1.1.0"}, "image", "failed", "1.1.0 (0123456789ab) on node02, 1.2.0 (0123456789ab) on node01, node03"),
    ({"revision": "fedcba"}, "image", "failed", "1.2.0 (fedcba) on node02"),
    ({"lock": "d" * 64}, "lock", "failed", "dddddddddddd on node02, aaaaaaaaaaaa on node01, node03"),
    ({"code": "d" * 64}, "code", "failed", "dddddddddddd on node02"),
    (
        {"packages": ("numpy 2.1.0", "torch 2.10.0")},
        "packages",
        "failed",
        "numpy 2.1.0 on node02, numpy 2.2.0 on node01, node03",
    ),
    (
        {"packages": ("numpy 2.2.0", "torch 2.10.0", "wandb 0.19")},
        "packages",
        "failed",
        "wandb 0.19 on node02, none of these on node01, node03",
    ),
    ({"python": "3.11.9"}, "python", "failed", "3.11 on node02, 3.12 on node01, node03"),
    ({"torch": "2.9.1"}, "torch", "failed", "2.9.1, CUDA 12.8 on node02"),
    ({"cuda": None}, "torch", "failed", "2.10.0+cu128, CPU on node02"),
    ({"nccl": "2.21.5"}, "nccl", "failed", "2.21.5 on node02, 2.27.5 on"),
    ({"nccl_path": "/opt/host/libnccl.so.2"}, "nccl", "warning", "/opt/host/libnccl.so.2 on node02"),
    ({"cudnn": "9.5.1"}, "cudnn", "warning", "9.5.1 on node02"),
    ({"driver": "570.1"}, "driver", "warning", "570.1 on node02"),
    ({"fabric": "tcp"}, "fabric", "failed", "tcp on node02, infiniband on"),
    ({"ports": (replace(PORT, is_active=False),)}, "ports", "warning", "0 on node02, 2 on"),
    (
        {"ports": (PORT, replace(PORT, name="mlx5_1/1", rate_gbit_s=50))},
        "ports",
        "warning",
        "mlx5_0/1 at 200 Gb/s, mlx5_1/1 at 50 Gb/s on node02, mlx5_0/1 at 200 Gb/s, mlx5_1/1 at 200 Gb/s on",
    ),
    ({"pcie": (replace(ADAPTER, width=8),)}, "pcie", "warning", "8 lanes of 16"),
    ({"pcie": (replace(ADAPTER, speed_gt_s=8),)}, "pcie", "warning", "8 GT/s of 16"),
    ({"pcie": (replace(ADAPTER, is_gpu=True, width=8),)}, "pcie", "warning", "8 lanes of 16"),
    ({"variables": {"NCCL_NET": "Socket"}}, "NCCL_NET", "warning", "Socket on node02, IB on node01, node03"),
]


@pytest.mark.parametrize(("changed", "about", "level", "seen"), ODD, ids=lambda value: str(value)[:30])
def test_the_odd_node_is_listed(changed: dict[str, Any], about: str, level: str, seen: str) -> None:
    finding = only(with_node(healthy(), "node02", **changed))
    assert (finding.host, finding.about, finding.level) == ("node02", about, level)
    assert seen in finding.seen
    assert finding.wrong
    assert finding.fix


def test_of_two_nodes_none_is_called_the_right_one() -> None:
    finding = only(with_node(healthy(2), "node02", lock="d" * 64))
    assert finding.host == "node01, node02"
    assert finding.wrong == "not all nodes have the same lock"
    assert finding.seen == "aaaaaaaaaaaa on node01, dddddddddddd on node02"


def test_among_64_nodes_two_odd_ones_are_named_and_the_text_stays_short() -> None:
    told = with_node(with_node(healthy(64, 8), "node17", torch="2.9.1"), "node40", torch="2.9.1")
    finding = only(told)
    assert finding.host == "node17, node40"
    assert finding.seen.endswith("on node01, node02, node03, node04 and 58 more")


def test_a_majority_is_more_than_half() -> None:
    assert outliers({"a": 1, "b": 1, "c": 2}) == (1, {2: ["c"]})
    assert outliers({"a": 1, "b": 2}) == (None, {1: ["a"], 2: ["b"]})
    assert outliers({"a": 1, "b": 1, "c": 2, "d": 3}) == (None, {1: ["a", "b"], 2: ["c"], 3: ["d"]})
    assert outliers({"a": None, "b": 1}) == (1, {})
    assert outliers({}) == (None, {})


def test_few_hosts_are_named_all() -> None:
    assert listed(list("abcde")) == "a, b, c, d, e"
    assert listed(list("abcdef")) == "a, b, c, d and 2 more"


GPUS: list[tuple[dict[str, Any], str, str, str]] = [
    ({"uncorrected": 3}, "ecc", "failed", "3 since"),
    ({"remapping": "failed"}, "ecc", "failed", "failed"),
    ({"remapping": "pending"}, "ecc", "warning", "pending"),
    ({"used": 40 * GIB}, "gpu memory", "warning", "40.0 GiB"),
    ({"slowed_by": ["heat (hardware)"], "clock_mhz": 345}, "clock", "warning", "heat (hardware); 345 of 1980 MHz"),
    ({"mig": True}, "mig", "warning", "enabled"),
    ({"links": 12}, "nvlink", "warning", "12 up, 18"),
]


@pytest.mark.parametrize(("changed", "about", "level", "seen"), GPUS, ids=lambda value: str(value)[:30])
def test_a_gpu_that_is_not_well(changed: dict[str, Any], about: str, level: str, seen: str) -> None:
    finding = only(with_gpu(healthy(), "node03", 1, **changed))
    assert (finding.host, finding.about, finding.level) == ("node03", about, level)
    assert "GPU 1" in finding.wrong
    assert seen in finding.seen


def test_a_gpu_that_the_job_was_not_given_does_not_matter() -> None:
    told = with_gpu(healthy(2, 2), "node01", 1, uncorrected=3)
    told = with_ranks(told, "node01", lambda rank: {"visible": "0", "num_gpus": 1})
    assert not [finding for finding in found(told) if finding.about == "ecc"]


def test_gpus_of_another_kind() -> None:
    told = with_gpu(with_gpu(healthy(), "node02", 0, name="NVIDIA A100"), "node02", 1, name="NVIDIA A100")
    assert only(told).seen == "NVIDIA A100 on node02, NVIDIA H100 80GB HBM3 on node01, node03"


def test_one_gpu_fewer_than_elsewhere() -> None:
    told = with_ranks(healthy(), "node02", lambda rank: {"visible": "0", "num_gpus": 1})
    differs, few = found(told)
    assert (differs.host, differs.level, differs.seen) == ("node02", "failed", "1 on node02, 2 on node01, node03")
    assert (few.host, few.wrong) == ("node02", "2 ranks, but 1 GPU")


def test_ranks_that_see_one_gpu_each() -> None:
    own = with_ranks(healthy(2), "", lambda rank: {"visible": str(getattr(rank, "rank", 0) % 2), "num_gpus": 1})
    assert found(own) == []
    blind = with_ranks(own, "node02", lambda rank: {"num_gpus": 1 - getattr(rank, "rank", 0) % 2})
    assert only(blind).wrong == "rank 3 sees no GPU, others of its node do"


def test_gpus_that_torch_does_not_see() -> None:
    told = with_ranks(healthy(2), "", lambda rank: {"num_gpus": 0})
    assert {(finding.host, finding.level) for finding in found(told)} == {("node01", "warning"), ("node02", "warning")}


def test_shared_memory() -> None:
    small = Space(path="/dev/shm", size=64 * MIB, free=64 * MIB)
    finding = only(with_node(healthy(), "node03", shm=small))
    assert (finding.host, finding.about, finding.level) == ("node03", "shm", "failed")
    assert "64.0 MiB free of 64.0 MiB" in finding.seen
    assert "--shm-size" in finding.fix
    # The default of docker, on one node without GPUs, where no workers load data.
    assert only(on_cpus(with_node(healthy(1), "node01", shm=small))).level == "warning"
    assert only(on_cpus(with_node(healthy(2), "node01", shm=small))).level == "failed"
    closed = Space(path="/dev/shm", trouble="Permission denied")
    assert only(with_node(healthy(), "node03", shm=closed)).level == "failed"


def test_where_checkpoints_go() -> None:
    full = Space(path="/scratch", size=10**12, free=0, trouble="No space left on device")
    finding = only(with_node(healthy(), "node02", checkpoints=full))
    assert (finding.host, finding.about, finding.level) == ("node02", "checkpoints", "failed")
    assert finding.seen == "/scratch: No space left on device, 0 KiB free"
    nearly = Space(path="/scratch", size=10**12, free=500 * MIB)
    assert only(with_node(healthy(), "node02", checkpoints=nearly)).level == "warning"
    files = Space(path="/scratch", size=10**12, free=10**12, files_free=7)
    assert "7 inodes" in only(with_node(healthy(), "node02", checkpoints=files)).seen
    gone = Space(path="/scratch", trouble="the file system did not answer within 5 s")
    assert "did not answer" in only(with_node(healthy(), "node02", checkpoints=gone)).seen


def test_limits() -> None:
    finding = only(with_node(healthy(2), "node01", open_files=256))
    assert (finding.host, finding.about, finding.level) == ("node01", "open files", "warning")
    assert found(with_node(healthy(2), "node01", open_files=1024)) == []
    # Each of 512 ranks is connected to all others.
    assert only(with_node(healthy(64, 8), "node01", open_files=1024)).host == "node01"
    finding = only(with_node(healthy(2), "node02", memlock=64 * 1024))
    assert (finding.host, finding.about, finding.level) == ("node02", "memlock", "warning")
    assert "64 KiB" in finding.seen
    assert found(with_node(healthy(2), "node02", memlock=64 * 1024, devices=())) == []


def test_cores() -> None:
    few = with_ranks(healthy(), "node02", lambda rank: {"cores": (getattr(rank, "rank", 0),)})
    assert {(finding.host, finding.about) for finding in found(few)} == {("node02", "cores")}
    assert "2 cores for 2 ranks" in [finding.wrong for finding in found(few)]
    # Ranks on CPUs compute with one core each: nothing is wrong with that, where all nodes are alike.
    assert found(with_ranks(on_cpus(healthy(2)), "", lambda rank: {"cores": (0, 1)})) == []

    def overlap(rank: Any) -> dict[str, Any]:
        first = getattr(rank, "rank", 0) % 2 * 4
        return {"cores": tuple(range(first, first + 8))}

    binding = next(finding for finding in found(with_ranks(healthy(), "node03", overlap)) if finding.about == "binding")
    assert (binding.host, binding.seen) == ("node03", "rank 4: cores 0-7; rank 5: cores 4-11")
    # Not bound at all: all ranks of the node may run anywhere.
    assert found(with_ranks(healthy(), "", lambda rank: {"cores": tuple(range(16))})) == []


def test_the_network_that_was_chosen() -> None:
    astray = with_node(healthy(), "node02", interfaces=("eth0",))
    finding = only(astray)
    assert (finding.host, finding.about, finding.level) == ("node02", "interface", "failed")
    assert finding.seen == "GLOO_SOCKET_IFNAME=ib0; here: eth0"
    alone = with_ranks(healthy(), "node03", lambda rank: {"address": "127.0.1.1", "interface": "lo"})
    assert (only(alone).host, only(alone).about) == ("node03", "address")
    closed = with_node(healthy(), "node01", closed=("/dev/infiniband/uverbs0",))
    assert (only(closed).host, only(closed).about) == ("node01", "fabric")


def test_several_things_at_once_are_all_found() -> None:
    told = with_node(healthy(), "node01", lock="d" * 64, open_files=100)
    told = with_gpu(told, "node03", 0, uncorrected=1)
    assert [(finding.host, finding.about) for finding in found(told)] == [
        ("node01", "lock"),
        ("node03", "ecc"),
        ("node01", "open files"),
    ]


@pytest.mark.parametrize("told", [healthy(), on_cpus(healthy(1))])
def test_each_subject_says_something(told: Told) -> None:
    for subject in SUBJECTS:
        assert subject.summary(told[subject.NAME])
