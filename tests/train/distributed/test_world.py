from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist

from muster.config import Options
from muster.errors import MusterError
from muster.train.distributed.backends import run_gloo_on_one_thread
from muster.train.distributed.world import (
    HashStore,
    World,
    device_for,
    open_mesh,
    open_side_group,
    read_environment,
)
from muster.train.health.parent import Guard
from muster.train.process import Process
from tests.train.conftest import free_port


@pytest.fixture
def device_of(monkeypatch):
    """The index of the GPU that a rank takes on a node with `num_gpus`."""

    def device_of(local_rank, local_world_size, num_gpus, **more):
        monkeypatch.setattr("torch.cuda.device_count", lambda: num_gpus)
        return device_for(World(local_rank=local_rank, local_world_size=local_world_size), "auto", **more).index

    return device_of


@pytest.mark.parametrize(
    ("local_rank", "local_world_size", "device_count", "device"),
    [
        (0, 1, 1, 0),
        (3, 4, 4, 3),
        (1, 2, 8, 1),
        # srun --gpus-per-task=1: each task sees its own GPU only, as number 0
        (3, 4, 1, 0),
        (2, None, 4, 2),
        (5, None, 1, 0),
    ],
)
def test_device_of_a_rank(device_of, local_rank, local_world_size, device_count, device):
    assert device_of(local_rank, local_world_size, device_count) == device


@pytest.mark.parametrize(("local_rank", "local_world_size"), [(0, 4), (3, 4), (3, None)])
def test_fewer_gpus_than_processes_names_both_numbers(device_of, local_rank, local_world_size):
    with pytest.raises(MusterError) as raised:
        device_of(local_rank, local_world_size, 2)
    assert "4 processes" in str(raised.value)
    assert "2 GPUs" in str(raised.value)


def test_processes_that_share_gpus_are_dealt_out_over_them(device_of):
    assert [device_of(local_rank, 4, 2, share_gpus=True) for local_rank in range(4)] == [0, 1, 0, 1]


def test_cuda_without_gpu(monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    assert device_for(World(), "auto").type == "cpu"
    with pytest.raises(MusterError, match="no GPU can be seen") as raised:
        device_for(World(), "cuda")
    assert "--nv" in raised.value.fix


def test_without_variables_the_world_is_one():
    world = read_environment({}, 7)
    assert (world.rank, world.world_size, world.timeout_s, world.main) == (0, 1, 7, True)
    assert world.gather({"a": 1}) == [{"a": 1}]


def test_gathers_what_all_ranks_say():
    store = HashStore()
    worlds = [World(rank=rank, world_size=3, store=store) for rank in range(3)]
    with ThreadPoolExecutor(3) as pool:
        for said in ([0, 1, 2], [None, None, None], [None, [1], None], [{"a": 1}] * 3, [[], [], []]):
            assert list(pool.map(World.gather, worlds, said)) == [said] * 3


def test_a_rank_that_does_not_come_is_named(monkeypatch):
    """Where a job's launcher has started each rank, no other process knows which rank is missing."""
    names = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    for name, value in {**names, "MASTER_PORT": str(free_port()), "MUSTER_NODES": "node01,node02"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as ended:
        Process().train("ddp", Options(timeout_s=1), Guard({}))
    assert ended.value.code == 1
    assert ended.value.__cause__.wrong == "rank 1 did not connect"
    assert "node02" in ended.value.__cause__.seen


def test_rank_0_that_dies_before_all_have_come_is_told_without_a_traceback(monkeypatch, capsys):
    store: Any = dist.TCPStore
    server = store("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    names = {"RANK": "1", "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(server.port)}
    for name, value in names.items():
        monkeypatch.setenv(name, value)
    rank = Process()
    with ThreadPoolExecutor(1) as pool:
        ended = pool.submit(rank.train, "ddp", Options(timeout_s=60), Guard({}))
        server.wait(["muster/gather/0/1"], timedelta(seconds=30))
        del server
        error = ended.exception(30)
    assert rank.answer(error) == 1
    said = capsys.readouterr().err.splitlines()
    assert [line.partition(":")[0].strip() for line in said] == ["error", "seen", "fix"]
    assert "the connection to another rank is lost" in said[0]


def test_variables_are_read():
    environ = {"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "MASTER_ADDR": "n1", "MASTER_PORT": "1"}
    world = read_environment(environ, 600)
    assert (world.rank, world.local_rank, world.world_size, world.local_world_size) == (5, 1, 8, None)
    assert not world.main


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({"RANK": "0"}, "WORLD_SIZE=(unset)"),
        ({"WORLD_SIZE": "2"}, "RANK=(unset)"),
        ({"RANK": "x", "WORLD_SIZE": "2"}, "RANK=x"),
        ({"RANK": "2", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}, "RANK=2 WORLD_SIZE=2"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a"}, "MASTER_PORT=(unset)"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "70000"}, "MASTER_PORT=70000"),
        ({"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "1"}, "WORLD_SIZE=1 LOCAL_RANK=1"),
    ],
)
def test_broken_variables_are_named(environ, words):
    with pytest.raises(MusterError) as raised:
        read_environment(environ, 600)
    assert words in str(raised.value)
    assert raised.value.code == 2


def test_groups_beside_the_first_have_its_time_out(monkeypatch):
    run_gloo_on_one_thread()  # as trainings do
    store: Any = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1, timeout=timedelta(seconds=90))
    try:
        part: Any = dist.new_group(backend="gloo")
        monkeypatch.setattr(
            "muster.train.distributed.world.init_device_mesh", lambda *_, **__: Mock(get_all_groups=lambda: [part])
        )
        world = World(backend="gloo", timeout_s=77)
        open_mesh(world, data=1, tensor=1)
        found = [group._get_backend(torch.device("cpu")).options._timeout for group in (part, open_side_group(world))]
        assert found == [timedelta(seconds=77)] * 2
    finally:
        dist.destroy_process_group()
