"""`--backend`: a backend that this torch has is used, any other is refused before anything is opened."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from muster.errors import MusterError
from muster.train.distributed import backends
from muster.train.distributed.backends import backend_for, compare_devices, compare_fabrics, open_group
from muster.train.distributed.world import World
from muster.train.health.faults import SharedFault

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


def one_message(ended, *words):
    assert [rank.code for rank in ended] == [2] * len(ended), [rank.err for rank in ended]
    lines = [line for rank in ended for line in rank.err.splitlines()]
    assert [line.lstrip().partition(":")[0] for line in lines] == ["error", "seen", "fix"], lines
    for word in words:
        assert word in "\n".join(lines)


@pytest.mark.process
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.skipif(dist.is_mpi_available(), reason="this torch has MPI")
def test_mpi_where_torch_has_none(train, tmp_path, world_size):
    argv = ["ddp", "--backend=mpi", "--data=imagefolder:/does/not/exist", f"--runs-dir={tmp_path}"]
    has = ", ".join(["gloo"] + ["nccl"] * dist.is_nccl_available())
    one_message(train(argv, world_size), "built without MPI", f"has: {has}\n", "--backend=gloo")
    assert not list(tmp_path.iterdir())


@pytest.mark.process
@pytest.mark.skipif(not dist.is_nccl_available(), reason="this torch has no NCCL")
def test_nccl_without_gpus(train, tmp_path):
    ended = train(["fsdp", "--backend=nccl", "--device=cpu", f"--runs-dir={tmp_path}"], 2)
    one_message(ended, "between GPUs only", "--backend=gloo")


@pytest.mark.process
def test_gloo_by_name_trains(train, small, summary_of, tmp_path):
    argv = ["ddp", *small, "--backend=gloo", "--max-steps=1", "--name=run", f"--runs-dir={tmp_path}"]
    train([*argv, "--device=cpu"], 2, ok=True)
    assert summary_of(tmp_path / "run")["backend"] == "gloo"


@pytest.mark.process
def test_an_interface_that_is_not_here(train, tmp_path):
    ended = train(["ddp", f"--runs-dir={tmp_path}"], 2, env={"GLOO_SOCKET_IFNAME": "lo,nosuch0"})
    one_message(ended, "no network interface nosuch0", "GLOO_SOCKET_IFNAME=lo,nosuch0", "--interface")


def test_a_firewall_between_ranks_is_told_as_that(monkeypatch):
    def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError(
            "Gloo connectFullMesh failed with [pair.cc:1] Connect timeout [127.0.0.1]:40001\nframe #0: c10"
        )

    monkeypatch.setattr(dist, "init_process_group", refuse)
    with pytest.raises(MusterError) as raised:
        open_group(World(rank=1, world_size=2, backend="gloo", store=dist.HashStore()))
    assert "muster doctor" in raised.value.fix
    assert raised.value.seen.endswith("Connect timeout [127.0.0.1]:40001")


@pytest.mark.parametrize(
    ("wanted", "device", "strategy", "found"),
    [
        ("auto", CPU, "tp", "gloo"),
        ("auto", GPU, "tp", "nccl"),
        ("gloo", CPU, "fsdp", "gloo"),
        ("gloo", GPU, "ddp", "gloo"),
    ],
)
def test_which_backend_is_chosen(wanted, device, strategy, found):
    assert backend_for(wanted, device, strategy) == found


@pytest.mark.parametrize("strategy", ["fsdp", "tp", "pipeline"])
def test_gloo_between_gpus_is_for_ddp(strategy):
    with pytest.raises(MusterError) as raised:
        backend_for("gloo", GPU, strategy)
    assert strategy in raised.value.wrong
    assert "--backend=nccl" in raised.value.fix


class PlayedMpi:
    """Replaces torch's process group by MPI, which no torch here is built with; it reports `rank` and `world_size`."""

    def __init__(self, monkeypatch, rank, world_size):
        self.calls = []
        monkeypatch.setattr(backends.dist, "is_mpi_available", lambda: True)
        monkeypatch.setattr(
            backends.dist, "init_process_group", lambda *args, **kwargs: self.calls.append((args, kwargs))
        )
        monkeypatch.setattr(backends.dist, "get_rank", lambda: rank)
        monkeypatch.setattr(backends.dist, "get_world_size", lambda: world_size)

    def start(self, *args, **kwargs):
        self.calls.append((args, kwargs))


def test_mpi_finds_the_ranks_and_gets_no_store(monkeypatch):
    played = PlayedMpi(monkeypatch, 1, 2)
    assert backend_for("mpi", CPU, "fsdp") == "mpi"
    open_group(World(rank=1, world_size=2, backend="mpi", store=dist.HashStore()))
    [(args, kwargs)] = played.calls
    assert args == ("mpi",)
    assert set(kwargs) == {"timeout"}


def test_mpi_that_did_not_start_the_ranks(monkeypatch):
    PlayedMpi(monkeypatch, 0, 1)
    with pytest.raises(MusterError, match="count the processes differently") as raised:
        open_group(World(rank=1, world_size=2, backend="mpi", store=dist.HashStore()))
    assert "mpirun" in raised.value.fix


@pytest.mark.process
def test_every_group_of_gloo_has_one_thread(train, small, tmp_path):
    """With two, torch frees the names of tensor parallelism's collectives twice, and the process crashes."""
    look = """
import threading, torch.distributed as dist
from torch.distributed.distributed_c10d import _world
from muster.train import trainer
fit = trainer.Trainer.train_epochs
def look(self):
    backends = [group._get_backend(self.world.device) for group in _world.pg_map]
    print("threads", len(backends), {backend.options._threads for backend in backends})
    return fit(self)
trainer.Trainer.train_epochs = look
"""
    argv = ["tp", "--model=gpt-tiny", "--data=synthetic", "--seq-len=8", "--max-steps=1", "--num-samples=8"]
    argv += ["--batch-size=2", "--tensor-parallel=2", "--device=cpu", "--name=run", f"--runs-dir={tmp_path}"]
    ended = train(argv, 4, ok=True, before=look)
    found = [line.split(maxsplit=2) for rank in ended for line in rank.out.splitlines() if line.startswith("threads")]
    assert found
    assert all(int(number) > 2 and threads == "{1}" for _, number, threads in found), found


def test_ranks_that_share_a_gpu_speak_through_gloo():
    assert backend_for("auto", GPU, "ddp", share_gpus=True) == "gloo"
    assert backend_for("auto", CPU, "fsdp", share_gpus=True) == "gloo"
    with pytest.raises(MusterError, match="a GPU for each process"):
        backend_for("nccl", GPU, "ddp", share_gpus=True)
    with pytest.raises(MusterError, match="the strategy fsdp") as raised:
        backend_for("auto", GPU, "fsdp", share_gpus=True)
    assert "leave out --share-gpus" in raised.value.fix


def test_two_ranks_on_one_gpu_are_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="GPU-1"))
    world: Any = SimpleNamespace(device=GPU, host="node", world_size=2, gather=lambda value: [value, value])
    with pytest.raises(SharedFault, match="share one GPU") as raised:
        compare_devices(world)
    # Where each task sees only one GPU, NCCL can't copy directly between GPUs.
    assert "--gpus-per-task" not in raised.value.fix
    assert "--gpu-bind=none" in raised.value.fix


def test_nodes_that_found_different_fabrics_are_refused(monkeypatch):
    monkeypatch.setenv("MUSTER_FABRIC_FOUND", "infiniband")
    found = ["infiniband", "infiniband", "tcp", "tcp"]
    monkeypatch.setattr(World, "gather", lambda world, value: found)
    world = World(world_size=4, backend="nccl", hosts=("a", "a", "b", "c"))
    with pytest.raises(SharedFault, match="different fabrics") as raised:
        compare_fabrics(world)
    assert raised.value.seen == "infiniband on a; tcp on b, c"
    monkeypatch.setattr(World, "gather", lambda world, value: [value] * 4)
    compare_fabrics(world)


@pytest.mark.process
def test_one_rank_alone_trains_in_a_group(train, small, summary_of, tmp_path):
    argv = ["fsdp", *small, "--single-rank-group", "--max-steps=2", "--name=run", f"--runs-dir={tmp_path}"]
    train(argv, ok=True)
    assert summary_of(tmp_path / "run")["backend"] == "gloo"
