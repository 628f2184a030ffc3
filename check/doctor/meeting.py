"""How the ranks of a look meet, with a name for who does not come."""

import json
import os
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from check.doctor.findings import Finding
from check.doctor.odd import named
from train.errors import MusterError
from train.world import World, read_environment


class Absent(Exception):
    """Some ranks did not come; all that came know of it.

    Args:
        world: of the rank that tells it.
        ranks: those that did not.
    """

    def __init__(self, world: World, ranks: Sequence[int]) -> None:
        super().__init__(f"ranks {ranks} did not come")
        self.world, self.ranks = world, ranks


def join(timeout_s: int) -> World:
    """This rank, connected to the store of all, and told all hosts.

    Raises:
        Absent: not all came within `timeout_s`.
        MusterError: rank 0 can't be reached.
    """
    world = read_environment(os.environ, timeout_s)
    if world.world_size > 1:
        world = replace(world, store=PrefixStore("muster", connect(world)))
    world = replace(world, hosts=tuple(gather(world, world.host)))
    local_rank = world.local_rank if "LOCAL_RANK" in os.environ else world.hosts[: world.rank].count(world.host)
    local_world_size = world.local_world_size or world.hosts.count(world.host)
    return replace(world, local_rank=local_rank, local_world_size=local_world_size)


def connect(world: World) -> Store:
    """The store of all ranks, up as soon as rank 0 is: so it can tell later who has not come.

    Raises:
        MusterError: rank 0 can't be reached, or its port is taken.
    """
    address, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
    # torchrun's agent has one already.
    is_host = world.main and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    limit = timedelta(seconds=world.timeout_s)
    try:
        store: Any = dist.TCPStore  # pyright: ignore[reportPrivateImportUsage]
        return store(address, int(port), world.world_size, is_host, limit, wait_for_workers=False)
    except (dist.DistError, ValueError) as error:
        raise MusterError(
            f"rank {world.rank} can't {'be met' if is_host else 'meet rank 0'} at {address}:{port}",
            seen=f"{str(error).splitlines()[0]}, rank {world.rank} of {world.world_size} on {world.host}",
            fix="see that rank 0 runs on that host, that the port is free there and no firewall is between",
        ) from error


def gather(world: World, value: Any, *, to_all: bool = True) -> list[Any]:
    """As `world.gather`, but those that came end at once where others did not come.

    Args:
        to_all: False for what rank 0 alone has to know: others get nothing.

    Raises:
        Absent: on all ranks that came.
    """
    if world.store is None:
        return [value]
    turn = f"doctor/{next(world.turns)}"
    world.store.set(f"{turn}/{world.rank}", json.dumps(value))
    if world.main:
        answer = _collect(world, turn)
        world.store.set(f"{turn}/all", json.dumps(answer if to_all or "absent" in answer else {"values": []}))
    else:
        world.wait([f"{turn}/all"])
        answer = json.loads(world.store.get(f"{turn}/all"))
    if "absent" in answer:
        raise Absent(world, answer["absent"])
    return answer["values"]


def _collect(world: World, turn: str) -> dict[str, Any]:
    assert world.store is not None
    keys = [f"{turn}/{rank}" for rank in range(world.world_size)]
    try:
        world.store.wait(keys, timedelta(seconds=world.timeout_s))
    except dist.DistError:
        absent = [rank for rank, key in enumerate(keys) if not world.store.check([key])]
        if absent:
            return {"absent": absent}
    return {"values": [json.loads(text) for text in world.store.multi_get(keys)]}


def missing(world: World, ranks: Sequence[int]) -> list[Finding]:
    """What is said of ranks that did not come, by the host that each should be on, where that is known."""
    by_host: dict[str, list[int]] = {}
    for rank in ranks:
        by_host.setdefault(host_of(rank, world), []).append(rank)
    return [
        Finding(
            "fault",
            "absent",
            host,
            f"{'rank' if len(own) == 1 else 'ranks'} {named([str(rank) for rank in own])} did not come",
            f"waited {world.timeout_s} s on rank {world.rank} of {world.world_size} ({world.host})",
            "look at that node: does it answer, did the command start there? A slow start: --timeout-s",
        )
        for host, own in by_host.items()
    ]


def listed_nodes() -> list[str]:
    """The job's nodes by node_rank, as the launch told them; none where it did not."""
    return [name for name in os.environ.get("MUSTER_NODES", "").split(",") if name]


def host_of(rank: int, world: World) -> str:
    """The node that `rank` should be on; empty where the launch did not tell the nodes."""
    nodes = listed_nodes()
    a_node = world.local_world_size or 1
    # Where nodes have different numbers of ranks, nobody here knows whose is which.
    return nodes[rank // a_node] if nodes and len(nodes) * a_node == world.world_size else ""


def lost(world: World | None, error: Exception) -> Finding:
    """Of a rank whose connection to the others broke."""
    where = "" if world is None else world.host
    rank = os.environ.get("RANK", "0")
    first_line = str(error).strip().partition("\n")[0]
    wrong = f"rank {rank} lost the others: rank 0 or its agent is gone, or the network between"
    return Finding("fault", "absent", where, wrong, first_line, "look what the other nodes said, then look again")
