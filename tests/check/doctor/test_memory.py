"""Cores, /dev/shm and open files."""

from pathlib import Path
from typing import Any

import pytest

from muster.check.doctor import memory
from muster.check.doctor.storage import Space
from muster.check.options import DoctorOptions
from muster.train.distributed.world import World
from tests.check.doctor.healthy import found, healthy, on_cpus, only, with_node, with_ranks
from tests.test_control_groups import write


def test_shared_memory() -> None:
    small = Space(path="/dev/shm", size=64 * 2**20, free=64 * 2**20)
    finding = only(with_node(healthy(), "node03", shm=small))
    assert (finding.host, finding.about, finding.level) == ("node03", "shm", "failed")
    assert "64M free of 64M" in finding.seen
    assert "--shm-size" in finding.fix
    # 64 MiB is docker's default; without GPUs it is only a warning, as by default no workers load data there.
    assert only(on_cpus(with_node(healthy(2), "node01", shm=small))).level == "warning"
    closed = Space(path="/dev/shm", trouble="Permission denied")
    assert only(with_node(healthy(), "node03", shm=closed)).level == "failed"


def test_open_files() -> None:
    finding = only(with_node(healthy(2), "node01", open_files=256))
    assert (finding.host, finding.about, finding.level) == ("node01", "open files", "warning")
    assert found(with_node(healthy(2), "node01", open_files=1024)) == []
    # Each of 512 ranks is connected to all others.
    assert only(with_node(healthy(64, 8), "node01", open_files=1024)).host == "node01"


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
    assert (binding.host, binding.seen) == (
        "node03",
        "rank 4: cores 0, 1, 2, 3, 4, 5, 6, 7; rank 5: cores 4, 5, 6, 7, 8, 9, 10, 11",
    )
    # Not bound at all: all ranks of the node may run anywhere.
    assert found(with_ranks(healthy(), "", lambda rank: {"cores": tuple(range(16))})) == []


def test_a_limit_of_processor_time() -> None:
    """As docker's --cpus and Kubernetes' limits set it: all cores may be used, but only for a part of the time."""
    finding = only(with_ranks(healthy(1), "", lambda rank: {"quota": 2.5}))
    assert (finding.about, finding.wrong) == ("cores", "2 cores for 2 ranks")
    assert "limited to 2.5 by the control group" in finding.seen
    assert only(with_ranks(healthy(1, 1), "", lambda rank: {"quota": 1.5})).wrong == "1 core for 1 rank"
    assert found(with_ranks(healthy(1), "", lambda rank: {"quota": 8.0})) == []


def test_what_a_container_uses_already_is_not_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, monkeypatch, "0::/", {"memory.max": "1048576", "memory.current": "1000000"})
    facts = memory.gather(World(host="a", hosts=("a",)), DoctorOptions(device="cpu"))
    assert facts.memory_free == 48576
