"""Ranks of a check: the errors for those that do not answer, and their devices."""

import json
from typing import Any

import psutil
import pytest
import torch.distributed as dist

from muster.check import ranks
from muster.check.doctor import run as doctor
from muster.check.doctor.finding import code_of
from muster.check.doctor.run import absence as finding_of
from muster.check.options import DoctorOptions
from muster.train.distributed.world import RanksMissing, World
from muster.train.health.faults import SharedFault
from muster.units import listed


def absence(fault: dict[str, Any] | None = None, hosts: tuple[str, ...] = ("a", "b")) -> RanksMissing:
    """The error of rank 0 after it waited for rank 1: for 2 seconds, or up to an hour with a `fault` in the store."""
    store: Any = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
    if fault is not None:
        store.set("fault", json.dumps(fault))
    world = World(rank=0, world_size=2, host="a", hosts=hosts, store=store, timeout_s=3600 if fault else 2)
    with pytest.raises(RanksMissing) as raised:
        world.gather("here")
    return raised.value


def test_a_rank_that_died_is_told_as_that_and_the_check_failed() -> None:
    # An agent has reported it: rank 0 does not wait for the hour.
    found = absence({"rank": 1, "host": "b", "code": 1, "wrong": "it was ended by SIGKILL"})
    finding = finding_of(found)
    assert (finding.host, finding.wrong) == ("b", "rank 1 on b died during the check")
    assert "SIGKILL" in finding.seen
    assert code_of([finding]) == 1


def test_a_rank_that_had_come_is_not_told_as_one_that_did_not() -> None:
    finding = finding_of(absence())
    assert finding.host == "b"
    assert "rank 1 connected, but stopped answering" in finding.wrong
    assert code_of([finding]) == 1


def test_a_rank_that_never_came_is_for_the_user_to_mend() -> None:
    finding = finding_of(absence(hosts=()))
    assert finding.wrong == "rank 1 did not connect"
    assert code_of([finding]) == 2


def test_the_store_of_one_node_is_for_that_node_alone(monkeypatch: pytest.MonkeyPatch, unused_port: int) -> None:
    """As where Slurm has started a task for each rank: no agent has a store."""
    variables = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(unused_port)}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RanksMissing) as raised:
        ranks.join(1)
    assert raised.value.wrong == "rank 1 did not connect"
    listening = [each for each in psutil.Process().net_connections("tcp") if each.status == psutil.CONN_LISTEN]
    assert [each.laddr.ip for each in listening if each.laddr.port == unused_port] == ["127.0.0.1"]


def test_ranks_with_different_kinds_of_devices_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = [["a", "cuda"], ["b", "cpu"], ["c", "cuda"]]
    monkeypatch.setattr(World, "gather", lambda world, value: kinds if isinstance(value, list) else [value])
    world = World(world_size=3, hosts=("a", "b", "c"))
    with pytest.raises(SharedFault, match="same kind of device") as raised:
        ranks.with_device(world, "cpu")
    assert (raised.value.code, raised.value.seen) == (2, "CPUs on b, GPUs for the other ranks")


def test_gloo_takes_cpus_although_there_are_fewer_gpus_than_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.distributed.is_gloo_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    world = ranks.with_device(World(world_size=1, local_world_size=4, hosts=("a",)), "auto", "gloo")
    assert (world.device.type, world.backend) == ("cpu", "gloo")


def test_a_closed_output_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout", None)  # as Python has it after >&-
    assert ranks.print_answer(lambda: 2) == 2


def test_few_hosts_are_named_all() -> None:
    assert listed(list("abcde")) == "a, b, c, d, e"
    assert listed(list("abcdef")) == "a, b, c, d and 2 more"


def check_that_fails(monkeypatch: pytest.MonkeyPatch, rank: int, error: Exception) -> None:
    """Runs rank `rank` of doctor, which `error` keeps from joining the others; it has to end with 1."""

    def join(timeout_s: int) -> World:
        raise error

    def leave(_: World | None, code: int) -> None:
        raise SystemExit(code)

    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setattr(ranks, "join", join)
    monkeypatch.setattr(ranks, "leave", leave)
    with pytest.raises(SystemExit, match="1"):
        doctor.run(DoctorOptions())


@pytest.mark.parametrize(("rank", "is_told"), [(1, True), (2, False)])
def test_a_rank_0_without_an_answer_is_told_by_the_first_that_is_left(
    rank: int, is_told: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    world = World(rank=rank, world_size=3, hosts=("a", "b", "c"))
    check_that_fails(monkeypatch, rank, RanksMissing(world, [0]))
    assert ("rank 0 connected, but stopped answering" in capsys.readouterr().err) == is_told


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_lost_the_others_tells_a_check_that_failed(
    rank: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As where the host of rank 0, which has the store, has failed."""
    check_that_fails(monkeypatch, rank, dist.DistNetworkError("Broken pipe"))
    said = capsys.readouterr()
    assert f"rank {rank} lost the other ranks" in (said.err if rank else said.out)
