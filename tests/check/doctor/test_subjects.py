"""All subjects: the facts that each rank gathers, and the finding for each value that differs on one node."""

import json
from importlib import metadata
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from muster.check.doctor import gpus, memory, network, software, storage
from muster.check.doctor.storage import Space
from muster.check.options import DoctorOptions
from muster.train.distributed.world import World
from tests.check.doctor.healthy import SUBJECTS, Told, found, healthy, on_cpus, only, with_gpu, with_node

SECOND = World(rank=1, world_size=2, host="b", hosts=("a", "b"))
"""The first rank of the second host."""


def test_a_rank_tells_of_itself_and_of_its_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"NCCL_NET": "IB", "AWS_SECRET": "hush", "MUSTER_FABRIC_FOUND": "tcp"}.items():
        monkeypatch.setenv(name, value)
    options = DoctorOptions(checkpoint_dir=str(tmp_path / "runs" / "later"), device="cpu")
    installed = software.gather(SECOND, options)
    assert installed is not None
    assert installed.torch is not None
    assert installed.torch.startswith(f"{torch.__version__}, ")
    assert installed.code == software.code()
    assert f"torch {metadata.version('torch')}" in (installed.packages or ())
    assert installed.variables["NCCL_NET"] == "IB"
    assert "AWS_SECRET" not in installed.variables
    assert memory.gather(SECOND, options).cores
    assert gpus.gather(SECOND, options) == gpus.Facts(rank=1)
    told = storage.gather(SECOND, options)
    assert told is not None
    assert (told.checkpoints.path, told.checkpoints.trouble) == (str(tmp_path), None)
    assert network.gather(SECOND, options).fabric == "tcp"


def test_only_the_first_rank_of_a_host_tells_of_it() -> None:
    second, options = World(rank=1, world_size=2, host="a", hosts=("a", "a")), DoctorOptions(device="cpu")
    assert (software.gather(second, options), storage.gather(second, options)) == (None, None)
    assert memory.gather(second, options).shm is None
    assert network.gather(second, options).ports is None


def test_facts_survive_json() -> None:
    for subject in SUBJECTS:
        for ranks in healthy()[subject.NAME].values():
            for facts in ranks:
                told = json.loads(json.dumps(msgspec.to_builtins(facts)))
                assert msgspec.convert(told, subject.Facts) == facts


def test_a_query_that_fails_costs_only_its_own_fact(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> Any:
        raise RuntimeError

    for module, name in (
        (network, "own_addresses"),
        (network, "ports"),
        (network, "source_address"),
        (software, "packages"),
    ):
        monkeypatch.setattr(module, name, fail)
    assert network.gather(SECOND, DoctorOptions()).address is None
    assert network.gather_places(World(host="a", hosts=("a",))) == (network.Place(0, "a", (), "", ""), [])
    installed = software.gather(SECOND, DoctorOptions())
    assert installed is not None
    assert installed.packages is None
    assert installed.torch


@pytest.mark.parametrize("told", [healthy(1, 1), healthy(2, 4), healthy(64, 8), on_cpus(healthy(2, 2))])
def test_nothing_is_found_on_healthy_nodes(told: Told) -> None:
    assert found(told) == []


def test_unknown_facts_give_no_findings() -> None:
    """Facts in which almost all values are unknown."""
    told: Told = {
        "software": {host: [software.Facts()] for host in "ab"},
        "GPUs": {host: [gpus.Facts(rank=rank)] for rank, host in enumerate("ab")},
        "memory": {host: [memory.Facts(rank=rank, cores=(0,))] for rank, host in enumerate("ab")},
        "storage": {host: [storage.Facts(checkpoints=Space(path="/"))] for host in "ab"},
        "network": {host: [network.Facts()] for host in "ab"},
    }
    assert found(told) == []
    assert all(subject.summary(told[subject.NAME]) for subject in SUBJECTS)


ODD: list[tuple[dict[str, Any], str, str, str]] = [
    (
        {"image": "1.1.0 (fedcba)"},
        "image",
        "failed",
        "1.1.0 (fedcba) on node02, 1.2.0 (0123456789ab) on node01, node03",
    ),
    ({"image": "none"}, "image", "failed", "none on node02"),
    ({"code": "d" * 12}, "code", "failed", "dddddddddddd on node02, cccccccccccc on node01, node03"),
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
    ({"python": "3.11"}, "python", "failed", "3.11 on node02, 3.12 on node01, node03"),
    ({"torch": "2.9.1, CPU"}, "torch", "failed", "2.9.1, CPU on node02"),
    ({"nccl": "2.21.5"}, "nccl", "failed", "2.21.5 on node02, 2.27.5 on"),
    ({"nccl_path": "/opt/host/libnccl.so.2"}, "nccl", "warning", "/opt/host/libnccl.so.2 on node02"),
    ({"cudnn": "9.5.1"}, "cudnn", "warning", "9.5.1 on node02"),
    ({"driver": "570.1"}, "driver", "warning", "570.1 on node02"),
    ({"fabric": "tcp"}, "fabric", "failed", "tcp on node02, infiniband on"),
    ({"ports": {"mlx5_0/1": None}}, "ports", "warning", "mlx5_0/1 down on node02, mlx5_0/1 at 200 Gb/s, "),
    ({"ports": {}}, "ports", "warning", "none on node02, mlx5_0/1 at 200 Gb/s, "),
    (
        {"ports": {"mlx5_0/1": 200, "mlx5_1/1": 50}},
        "ports",
        "warning",
        "mlx5_0/1 at 200 Gb/s, mlx5_1/1 at 50 Gb/s on node02, mlx5_0/1 at 200 Gb/s, mlx5_1/1 at 200 Gb/s on",
    ),
    ({"pcie": {"mlx5_0": "8 lanes of 16"}}, "pcie", "warning", "8 lanes of 16"),
    ({"variables": {"NCCL_NET": "Socket"}}, "NCCL_NET", "warning", "Socket on node02, IB on node01, node03"),
]


@pytest.mark.parametrize(("changed", "about", "level", "seen"), ODD, ids=lambda value: str(value)[:30])
def test_the_odd_node_is_listed(changed: dict[str, Any], about: str, level: str, seen: str) -> None:
    finding = only(with_node(healthy(), "node02", **changed))
    assert (finding.host, finding.about, finding.level) == ("node02", about, level)
    assert seen in finding.seen
    assert finding.wrong
    assert finding.fix


def test_several_things_at_once_are_all_found() -> None:
    told = with_node(healthy(), "node01", code="d" * 12, open_files=100)
    told = with_gpu(told, "node03", 0, uncorrected=1)
    assert [(finding.host, finding.about) for finding in found(told)] == [
        ("node01", "code"),
        ("node03", "ecc"),
        ("node01", "open files"),
    ]


@pytest.mark.parametrize("told", [healthy(), on_cpus(healthy(1))])
def test_each_subject_says_something(told: Told) -> None:
    for subject in SUBJECTS:
        assert subject.summary(told[subject.NAME])


def test_what_is_said_of_nodes_where_nothing_is_wrong() -> None:
    of_two, of_one = (
        {subject.NAME: subject.summary(told[subject.NAME]) for subject in SUBJECTS} for told in (healthy(2), healthy(1))
    )
    versions = "image 1.2.0 (0123456789ab), torch 2.10.0+cu128, CUDA 12.8, NCCL 2.27.5, Python 3.12"
    assert (of_two["software"], of_one["software"]) == (f"{versions}, the same everywhere", versions)
    assert "500G free on node01, the least" in of_two["memory"]
    assert "500G free, " in of_one["memory"]
    assert of_two["network"] == of_one["network"] == "infiniband by ib0; 2 ports up, at 200 Gb/s"
