"""Names the nodes that do not come to the start of a launch: torch itself tells only how many did.

agent.py loads it by its path; like that file it imports nothing of this project.
"""

import os
import socket
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous


def take_over() -> None:
    """From now on nodes that meet at a fixed place say who they are, and the one at that place waits for all."""
    handlers: Any = StaticTCPRendezvous
    meet = handlers.next_rendezvous

    def next_rendezvous(handler: Any) -> Any:
        if handler._store is None and handler.world_size > 1:
            handler._store = _store(handler)
            call(handler._store, handler.rank, handler.world_size, handler.timeout)
        return meet(handler)

    handlers.next_rendezvous = next_rendezvous


def _store(handler: Any) -> Any:
    # As torch makes it, but at the meeting place up at once, and not when all have come. The others are counted there.
    store: Any = dist.TCPStore  # pyright: ignore[reportPrivateImportUsage]
    place = (handler.master_addr, handler.master_port, handler.world_size, handler.rank == 0, handler.timeout)
    return store(*place, multi_tenant=True, wait_for_workers=handler.rank > 0)


def call(store: Any, node_rank: int, num_nodes: int, limit: timedelta) -> None:
    """Returns, on node rank 0, when all nodes have come; on others at once.

    Raises:
        TimeoutError: some did not within `limit`; it names them.
    """
    here = PrefixStore("muster", store)
    here.set(f"came/{node_rank}", socket.gethostname())
    if node_rank:
        return
    keys = [f"came/{number}" for number in range(num_nodes)]
    try:
        here.wait(keys, limit)
    except dist.DistError:
        absent = [number for number, key in enumerate(keys) if not here.check([key])]
        if absent:
            raise TimeoutError(told(absent, num_nodes, limit.total_seconds())) from None


def told(absent: list[int], num_nodes: int, limit_s: float, most: int = 8) -> str:
    """Who did not come, by the names of MUSTER_NODES where the launch has told them."""
    names = os.environ.get("MUSTER_NODES", "").split(",")
    known = len(names) == num_nodes
    shown = [names[number] if known else f"node rank {number}" for number in absent[:most]]
    more = f" and {len(absent) - most} more" if len(absent) > most else ""
    return f"{', '.join(shown)}{more} did not come within {limit_s:.0f} s; {num_nodes - len(absent)} of {num_nodes} did"
