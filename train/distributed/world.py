"""The rank of this process, its device, and its communication with the other ranks."""

import json
import os
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from muster.errors import ExitCode, MusterError
from muster.train.reporting.metrics import Stopwatch
from muster.units import listed
from muster.variables import LaunchVariable

SET_UP, COMPUTING, DATA, LEFT = "set-up", "computing", "waiting for data", "left"
CONNECTING = "connecting to the other ranks"
VALIDATION, CHECKPOINT, ENDING = "validation", "checkpoint", "ending"

HashStore: Any = dist.HashStore  # pyright: ignore[reportPrivateImportUsage]
"""A store within one process."""

FAULT_POLL_S = 1.0
"""Seconds between two checks for a published fault, by a rank that waits for others."""


class RanksMissing(MusterError):
    """The error on all ranks that are left: some `ranks` are missing, or a `fault` was published (health/faults.py).

    Attributes:
        world: of the rank that raises this; its `hosts` are set where the missing ranks had connected before.
        host: the host where the missing ranks are, or should be; empty where that is not known.
        has_died: whether a rank has ended or hangs; False where it never connected.
        is_reporter: whether this rank is the lowest that is left, which reports this for all.
    """

    def __init__(self, world: "World", ranks: Sequence[int], fault: Mapping[str, Any] | None = None) -> None:
        lost = ranks if fault is None else [fault["rank"]]
        which = f"{'rank' if len(lost) == 1 else 'ranks'} {listed(lost)}"
        self.world, self.host = world, listed(host_of(rank, world) for rank in lost)
        self.has_died = bool(world.hosts) or fault is not None
        seen = f"waited {world.timeout_s} s on rank {world.rank} of {world.world_size} ({world.host})"
        seen += f" for {self.host}" if self.host else ""
        wrong = f"{which} connected, but stopped answering" if world.hosts else f"{which} did not connect"
        fix = "look at that node: does it answer, did the command start there? If it starts slowly: --timeout-s"
        if self.has_died:
            fix = "look at its output and at its node's log (dmesg): memory ran out, a GPU failed, or it hangs"
        if fault is not None:
            self.host, seen = fault["host"], fault["wrong"]
            wrong = f"{which} on {self.host} died during the check"
        super().__init__(wrong, seen=seen, fix=fix, code=ExitCode.FAILED)
        self.is_reporter = world.rank == min(set(range(world.world_size)).difference(lost), default=0)


@dataclass
class RankStatus:
    """The progress of this rank. The trainer writes it and the heartbeat reads it; neither waits for the other.

    Attributes:
        ticks: a count of phases and steps; the same on all ranks that are at the same place.
        step: how many steps are complete.
        has_stepped: whether a step is complete in this process.
        compiles: whether kernels are compiled in the first step.
        lost_peer: whether a connection of this rank broke, so that another rank may be dead.
        folder: the folder for this rank's stacks; None until the run's folder is known.
        end_reported: whether this rank has reported why it ends.
    """

    ticks: int = 0
    step: int = 0
    phase: str = SET_UP
    has_stepped: bool = False
    compiles: bool = False
    lost_peer: bool = False
    end_reported: bool = False
    folder: Path | None = None

    def enter(self, phase: str) -> None:
        """Notes that this rank has entered `phase`."""
        self.phase = phase
        self.ticks += 1

    def stepped(self, step: int) -> None:
        """Notes that a step is complete."""
        self.step, self.has_stepped = step, True
        self.ticks += 1

    @contextmanager
    def connecting(self) -> Iterator[None]:
        """A context in which this rank waits for the others, and for nothing else."""
        before = self.phase
        self.enter(CONNECTING)
        yield
        self.enter(before)

    @property
    def is_patient(self) -> bool:
        """Whether this rank may stand still for longer: files of any size are read or written, or kernels compiled.

        It may not where it only waits for others: NCCL ends the process when a collective times out, without naming the
        missing rank, and waits for a communicator without a limit.
        """
        return self.phase in (SET_UP, CHECKPOINT, ENDING) or (self.compiles and not self.has_stepped)


@dataclass(frozen=True, kw_only=True)
class World:
    """This process among all ranks of a training.

    Attributes:
        store: the key-value store shared by all ranks; None where this process has not connected to it.
        dp: (dp_rank, dp_size), where several ranks train on the same data; None where each rank has data of its own.
        reports_loss: whether this rank reports the loss of its data, which others may train on too.
        waits: the time that steps wait for other ranks, where the strategy can measure it.
    """

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int | None = None
    timeout_s: int = 600
    host: str = field(default_factory=socket.gethostname)
    hosts: tuple[str, ...] = ()
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    backend: str | None = None
    store: Any = None
    dp: tuple[int, int] | None = None
    reports_loss: bool = True
    turns: Any = field(default_factory=count)
    waits: Stopwatch = field(default_factory=lambda: Stopwatch(torch.device("cpu"), is_counting=False))
    status: RankStatus = field(default_factory=RankStatus)

    @property
    def main(self) -> bool:
        """True on the one rank that prints and writes."""
        return self.rank == 0

    @property
    def dp_rank(self) -> int:
        """The data-parallel rank, from 0: the number of the part of the data on which this rank trains."""
        return self.rank if self.dp is None else self.dp[0]

    @property
    def dp_size(self) -> int:
        """The data-parallel size: the number of parts of the data, on which different ranks train."""
        return self.world_size if self.dp is None else self.dp[1]

    @property
    def nodes(self) -> list[str]:
        """Host names, each once, in the order of their first rank."""
        return list(dict.fromkeys(self.hosts))

    def gather(self, value: Any, *, to_all: bool = True) -> list[Any]:
        """Gathers the `value` of each rank, by rank; unless `to_all`, the list is empty on all ranks but rank 0.

        Values are what JSON can hold. They go through the store, and so before there is a process group.

        Raises:
            RanksMissing: on all ranks that are left: one did not call this within `timeout_s`, or died.
        """
        if self.store is None:
            return [value]
        turn = f"gather/{next(self.turns)}"
        self.store.set(f"{turn}/{self.rank}", json.dumps(value))
        keys = [f"{turn}/{rank}" for rank in range(self.world_size)] if self.main else [f"{turn}/all"]
        # The others wait a little longer than rank 0, which knows the missing ranks.
        missing, values = self._missing(keys, self.timeout_s if self.main else self.timeout_s + 5), list[Any]()
        if self.main:
            texts = [] if missing else self.store.multi_get(keys)
            # Equal values, the usual case, are sent once: else what ranks read grows with the square of their number.
            values = [json.loads(text) for text in (texts[:1] if len(set(texts)) == 1 else texts)]
            self.store.set(f"{turn}/all", json.dumps([missing, values if to_all else []]))
        elif not missing:
            missing, values = json.loads(self.store.get(f"{turn}/all"))
        if missing:
            raise RanksMissing(self, missing, fault_in(self.store))
        return values if len(values) == self.world_size else values * self.world_size

    def hosts_by(self, value: Any) -> dict[Any, str]:
        """The hosts by the `value` that their ranks have: {value: names of hosts}; one entry where all ranks agree."""
        values = self.gather(value)
        places = list(zip(values, self.hosts or (self.host,), strict=True))
        return {value: listed(host for other, host in places if other == value) for value in dict.fromkeys(values)}

    def _missing(self, keys: Sequence[str], limit_s: float) -> list[int]:
        """The ranks that have not set their key of `keys` within `limit_s`, or before a fault was published.

        Raises dist.DistError where the connection breaks: the process of the store is gone then, and not merely slow.
        """
        ends = time.monotonic() + limit_s
        while True:
            left_s = ends - time.monotonic()
            try:
                self.store.wait(list(keys), timedelta(seconds=max(0.1, min(FAULT_POLL_S, left_s))))
            except dist.DistError:
                if left_s <= 0 or fault_in(self.store) is not None:
                    return [rank for rank, key in enumerate(keys) if not self.store.check([key])]
            else:
                return []

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """`tensor`, summed over all ranks in place."""
        if self.backend is not None:
            dist.all_reduce(tensor)
        return tensor


def fault_in(store: Any) -> dict[str, Any] | None:
    """The fault published by a rank (health/faults.py) or by the agent of a dead one (agent/nodes.py); None without."""
    return json.loads(store.get("fault")) if store.check(["fault"]) else None


def host_of(rank: int, world: World) -> str:
    """The node that `rank` is on, or should be; empty where that is not known."""
    if world.hosts:
        return world.hosts[rank]
    nodes = [name for name in os.environ.get(LaunchVariable.NODES, "").split(",") if name]  # by node_rank
    a_node = world.local_world_size or 1
    # Where nodes have different numbers of ranks, the node of a rank is not known here.
    return nodes[rank // a_node] if nodes and len(nodes) * a_node == world.world_size else ""


def to_device(values: Sequence[float], device: torch.device, dtype: torch.dtype | None = None) -> torch.Tensor:
    """`values` as a tensor on `device`, without waiting for the device's queue."""
    if device.type == "cpu":
        return torch.tensor(values, dtype=dtype)
    # From pinned memory: a copy from other memory waits for all work that is queued on the device.
    return torch.tensor(values, dtype=dtype, pin_memory=True).to(device, non_blocking=True)


def read_environment(environ: Mapping[str, str], timeout_s: int) -> World:
    """The world that RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE describe, not yet connected.

    Raises:
        MusterError: a variable is missing, is no number, or contradicts another.
    """

    def number(name: str) -> int | None:
        if (text := environ.get(name)) is None:
            return None
        if not text.isdecimal():
            raise MusterError(f"{name} is not a number", seen=f"{name}={text}", fix=f"unset {name}, or start by muster")
        return int(text)

    rank, world_size = number("RANK"), number("WORLD_SIZE")
    if rank is None and world_size is None:
        return World(timeout_s=timeout_s)
    local_rank = number("LOCAL_RANK") or 0
    if (
        rank is None
        or world_size is None
        or rank >= world_size
        or (world_size == 1 and local_rank > 0)  # the second process of a node would train alone
        or (world_size > 1 and not (environ.get("MASTER_ADDR") and 0 < (number("MASTER_PORT") or 0) < 1 << 16))
    ):
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
        raise MusterError(
            "the variables that describe this rank are incomplete, or contradict each other",
            seen=" ".join(f"{name}={environ.get(name, '(unset)')}" for name in names),
            fix="start by 'train STRATEGY' or torchrun, or export all of them with RANK < WORLD_SIZE; or unset them",
        )
    return World(
        rank=rank,
        local_rank=local_rank,
        world_size=world_size,
        local_world_size=number("LOCAL_WORLD_SIZE"),
        timeout_s=timeout_s,
    )


def connect(world: World) -> Any:
    """Connects to the store of all ranks, at once, so that rank 0 can name missing ranks; a single rank has its own.

    Raises:
        MusterError: rank 0 can't be reached, or its port is taken.
    """
    if world.world_size == 1:
        return HashStore()
    address, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
    is_host = world.main and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    tcp_store: Any = dist.TCPStore  # pyright: ignore[reportPrivateImportUsage]
    own: dict[str, Any] = {}
    try:
        if is_host and address == "127.0.0.1":
            # torch would listen on all interfaces.
            own = {"master_listen_fd": socket.create_server((address, int(port))).detach()}
        return tcp_store(
            address,
            int(port),
            world.world_size,
            is_host,
            timedelta(seconds=world.timeout_s),
            wait_for_workers=False,
            multi_tenant=True,
            **own,
        )
    except (dist.DistError, ValueError, OSError) as error:
        raise MusterError(
            f"the ranks did not find each other: {str(error).splitlines()[0]}",
            seen=f"MASTER_ADDR:MASTER_PORT={address}:{port}, rank {world.rank} of {world.world_size} on {world.host}",
            fix="see that rank 0 runs on that host, that the port is free there, and that no firewall blocks it",
            code=ExitCode.FAILED,
        ) from error


def device_for(world: World, wanted: str, *, share_gpus: bool = False) -> torch.device:
    """The device that `--device` stands for in this process.

    A process that sees one GPU takes it, whatever its local rank: Slurm's --gpus-per-task=1 shows each task
    only its own, as number 0.

    Raises:
        MusterError: a GPU was asked for and there is none, or not one for each process.
    """
    num_gpus = 0 if wanted == "cpu" else torch.cuda.device_count()
    if num_gpus == 1 or (num_gpus and share_gpus):
        return torch.device("cuda", world.local_rank % num_gpus)
    processes = world.local_rank + 1 if world.local_world_size is None else world.local_world_size
    if num_gpus >= processes:
        return torch.device("cuda", world.local_rank)
    if num_gpus:
        raise MusterError(
            f"{processes} processes on this host, but {num_gpus} GPUs",
            seen=f"LOCAL_RANK={world.local_rank} LOCAL_WORLD_SIZE={processes}, GPUs visible: {num_gpus}",
            fix=f"start {num_gpus} processes a host, or ask for {processes} GPUs, or give --device=cpu",
        )
    if wanted == "cuda":
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "(unset)")
        raise MusterError(
            "no GPU can be seen",
            seen=f"--device=cuda, CUDA_VISIBLE_DEVICES={visible}",
            fix="in Apptainer add --nv, in docker --gpus all, in the job script ask for GPUs; or give --device=cpu",
        )
    return torch.device("cpu")


def open_mesh(world: World, **sizes: int) -> DeviceMesh:
    """A device mesh of all ranks, with the `sizes` of its dimensions by name; the last one groups consecutive ranks."""
    with silent_stdout(), world.status.connecting():
        mesh = init_device_mesh(world.device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    for group in mesh.get_all_groups():
        limit_waits(world, group)
    return mesh


def limit_waits(world: World, group: Any) -> None:
    """Sets the time-out of `world` for the collectives of `group`: torch makes groups of a mesh with its default."""
    if world.backend == "mpi":
        return  # which knows no time-out
    timeout = timedelta(seconds=world.timeout_s)
    if hasattr(dist, "set_timeout"):
        dist.set_timeout(timeout, group)
        return
    # torch before 2.15: its own function does not recognise groups of gloo with one thread (backends.py) as gloo's.
    for device in group._device_types:
        backend = group._get_backend(device)
        # TORCH_DISTRIBUTED_DEBUG=DETAIL wraps it.
        getattr(backend, "wrapped_pg", backend)._set_default_timeout(timeout)


def open_side_group(world: World) -> Any:
    """A second group of all ranks, for CPU collectives beside the training; None where there is no first group.

    With MPI it is a group of MPI too: gloo's ranks need a store to find each other, which a group of MPI does not have.
    """
    if world.backend is None:
        return None
    backend, timeout = "mpi" if world.backend == "mpi" else "gloo", timedelta(seconds=world.timeout_s)
    with silent_stdout(), world.status.connecting():
        group: Any = dist.new_group(backend=backend, timeout=timeout)
    # Before another thread uses the group: its first collective registers it with torch's flight recorder, which takes
    # no lock in torch 2.10. Where two threads register two groups, one may search the recorder's map for ever.
    # Source: https://github.com/pytorch/pytorch/pull/179313
    dist.all_reduce(torch.zeros(1), group=group)
    return group


@contextmanager
def silent_stdout() -> Iterator[None]:
    """A context without standard output, on which gloo of torch 2.10 prints how many peers each rank has."""
    own, nothing = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    sys.stdout.flush()
    os.dup2(nothing, 1)
    try:
        yield
    finally:
        os.dup2(own, 1)
        os.close(own)
        os.close(nothing)


def close_group() -> None:
    """Ends the process group, where there is one: without this, exits can hang."""
    if dist.is_initialized():
        dist.destroy_process_group()
