"""The rendezvous of a launch's agents: extensions of torch's two kinds of rendezvous.

StaticNodes  for a fixed number of nodes, which meet at a known endpoint: the error names those that do not come
Backend      for nodes that come and go: a store that does not answer counts as lost
"""

import argparse
import json
import os
import re
import socket
import time
import uuid
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.elastic import rendezvous
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend, create_backend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

from muster.entrypoint.rendezvous.network import REFUSED_TIMEOUT_S, call_within
from muster.errors import MusterError, notify_if_slow, one_line
from muster.variables import LaunchVariable

BACKEND = "muster"
"""The name by which torch's registry knows these handlers."""
LOOPBACK_ADDRESS = "127.0.0.1"
ALL_CAME, REFUSAL, HAS_HEARD = "all came", "refusal", "has heard"
"""Keys: all nodes have come, or are no longer waited for; why a node can't take part; how many have read that."""
NOTICE_AFTER_S = 20.0
POLL_S = 0.2

STORE_S = 30.0
"""Seconds for one answer of a store."""


def endpoint_of(arguments: argparse.Namespace) -> tuple[str, int]:
    """The address and port at which the nodes meet."""
    if arguments.nnodes == "1":
        return LOOPBACK_ADDRESS, arguments.master_port
    if arguments.rdzv_backend == "static":
        return arguments.master_addr, arguments.master_port
    address, _, port = arguments.rdzv_endpoint.rpartition(":")
    return address.strip("[]"), int(port)


def joins_other_store(arguments: argparse.Namespace) -> bool:
    """Whether another node's store has to listen before this one can join."""
    return arguments.node_rank > 0 or "is_host=0" in arguments.rdzv_conf.split(",")


def timeout_s(arguments: argparse.Namespace) -> int:
    """Seconds that --rdzv-conf allows for meeting."""
    match = re.search(r"(?:^|,)(?:join_)?timeout=(\d+)", arguments.rdzv_conf)
    return int(match[1]) if match else 600  # torchrun's own default


def handler_of(config: Any) -> rendezvous.RendezvousHandler:
    """The rendezvous handler of this node, by the configuration that torch makes of torchrun's arguments."""
    known = {name: getattr(config, name) for name in ("run_id", "min_nodes", "max_nodes", "local_addr")}
    parameters = rendezvous.RendezvousParameters(BACKEND, config.rdzv_endpoint, **known, **config.rdzv_configs)
    return rendezvous.rendezvous_handler_registry.create_handler(parameters)


def create(parameters: rendezvous.RendezvousParameters) -> rendezvous.RendezvousHandler:
    """The handler for a fixed number of nodes, if torchrun gave this one a rank; else for nodes that come and go."""
    if (rank := parameters.get("rank")) is not None:
        address, _, port = parameters.endpoint.rpartition(":")
        where = LOOPBACK_ADDRESS if parameters.max_nodes == 1 else address, int(port)
        return StaticNodes(*where, rank, parameters.max_nodes, parameters.run_id, int(parameters.get("timeout", 600)))
    # torch's own time limit ends this first. In another thread, so that this one can handle signals meanwhile.
    limit_s = int(parameters.get("read_timeout", 60)) + STORE_S
    _, store = call_within(limit_s, lambda: create_backend(parameters))
    # A client makes one request at a time: while the agent waits for a key, its keep-alive would come too late.
    _, for_records = call_within(limit_s, lambda: create_backend(parameters))
    return create_handler(store, Backend(for_records, parameters.run_id), parameters)


rendezvous.rendezvous_handler_registry.register(BACKEND, create)


class StaticNodes(StaticTCPRendezvous):
    """The rendezvous of a fixed number of nodes.

    With several nodes, its error names those that do not come: torch's has only their number. For one node it makes a
    new store each time, which listens on 127.0.0.1 alone (port 0 takes a free one): torch's listens on all interfaces,
    and everyone who can reach a store can make its processes run code.

    Source: https://github.com/pytorch/pytorch/security/policy (using distributed features)
    """

    def get_backend(self) -> str:
        return BACKEND

    def next_rendezvous(self) -> rendezvous.RendezvousInfo:
        """Waits until all nodes have come; returns their store, and this node's rank.

        Raises:
            OSError: the port is taken.
            MusterError: another process has come as this node, or a node can't take part: see `wait_for_all`.
            TimeoutError: some nodes did not come in time: see `wait_for_all`.
        """
        torchs: Any = dist.TCPStore  # pyright: ignore[reportPrivateImportUsage]
        if self.world_size == 1:
            # Restarted ranks get another port: the store before this one may still listen on its own.
            listener = socket.create_server((LOOPBACK_ADDRESS, 0 if self._store else self.master_port))
            self.master_port = int(listener.getsockname()[1])
            where = (LOOPBACK_ADDRESS, self.master_port)
            self._store = torchs(*where, is_master=True, multi_tenant=True, master_listen_fd=listener.detach())
        elif self._store is None:
            # As torch makes it, but ready at once, and not only when all have come: `wait_for_all` counts them.
            server = (self.master_addr, self.master_port, self.world_size, self.rank == 0, self.timeout)
            # In another thread: inside torch this one could not handle signals while the other end does not answer.
            limit_s = self.timeout.total_seconds() + STORE_S
            self._store = call_within(limit_s, lambda: torchs(*server, multi_tenant=True, wait_for_workers=False))
            refusal = os.environ.get(LaunchVariable.REFUSAL, "")
            wait_for_all(self._store, self.rank, self.world_size, self.timeout, refusal)
        return super().next_rendezvous()


def wait_for_all(store: Any, node_rank: int, num_nodes: int, limit: timedelta, refusal: str = "") -> None:
    """Waits until all nodes have come. A `refusal` of this one (`LaunchVariable.REFUSAL`) ends the launch on all.

    Raises:
        MusterError: another process has come as this node, or for another number of nodes; or a node can't take part.
        TimeoutError: some did not come within `limit`. Node rank 0 raises it, and names them; others a DistStoreError.
    """
    here = PrefixStore("muster", store)
    if (others := here.compare_set("num_nodes", "", str(num_nodes)).decode()) != str(num_nodes):
        seen = f"{num_nodes} here, {others} elsewhere"
        raise MusterError("the nodes were given different numbers of nodes", seen=seen, fix="the same --nnodes on all")
    if refusal:
        here.set(REFUSAL, refusal)
    own, key = f"{socket.gethostname()}, process {os.getpid()}, {uuid.uuid4().hex}", f"came/{node_rank}"
    try:
        if (first := here.compare_set(key, "", own).decode()) != own:
            raise MusterError(
                f"two processes have node rank {node_rank}: one was started twice, or has the wrong node rank",
                seen=" and ".join(each.rpartition(", ")[0] for each in (first, own)),
                fix="start one process on each node, each with a node rank of its own",
            )
        if node_rank:
            # In another thread: inside torch this one could not handle signals.
            call_within(limit.total_seconds() + STORE_S, lambda: here.wait([ALL_CAME], limit))
            return raise_refusal(here)
    except SignalException:
        if (store := here.clone()).compare_set(key, own, own).decode() == own:
            store.delete_key(key)  # this node may come again; the key stays if another process wrote it
        raise
    keys = [f"came/{number}" for number in range(num_nodes)]
    end = time.monotonic() + limit.total_seconds()
    line = f"{socket.gethostname()} waits for the other nodes, {limit.total_seconds():.0f} s at most"
    with notify_if_slow(one_line(line), after_s=NOTICE_AFTER_S):
        while not (all_came := here.check(keys)) and time.monotonic() < end:
            if here.check([REFUSAL]):
                end = min(end, time.monotonic() + REFUSED_TIMEOUT_S)
            time.sleep(POLL_S)
    names = os.environ.get(LaunchVariable.NODES, "").split(",")
    if len(names) != num_nodes:
        names = [f"node rank {number}" for number in range(num_nodes)]
    absent = [name for name, key in zip(names, keys, strict=True) if not (all_came or here.check([key]))]
    if absent and not here.check([REFUSAL]):
        shown = ", ".join(absent[:8]) + (f" and {len(absent) - 8} more" if len(absent) > 8 else "")
        came = f"{num_nodes - len(absent)} of {num_nodes} did"
        raise TimeoutError(f"{shown} did not come within {limit.total_seconds():.0f} s; {came}")
    here.set(ALL_CAME, "")
    raise_refusal(here, num_others=num_nodes - len(absent) - 1)


def raise_refusal(here: Any, num_others: int = 0) -> None:
    """Raises the MusterError of a node that can't take part, if there is one: once `num_others` have read it too."""
    if here.check([REFUSAL]):
        refusal, end = json.loads(here.get(REFUSAL)), time.monotonic() + REFUSED_TIMEOUT_S
        here.add(HAS_HEARD, 1)
        while here.add(HAS_HEARD, 0) <= num_others and time.monotonic() < end:
            time.sleep(POLL_S)
        raise MusterError(**refusal)


class Backend(C10dRendezvousBackend):
    """torch's rendezvous backend, which sends no more requests to its store once one has failed.

    torch's client waits for ever if the store's host vanishes: after its time-out, for an answer to its last message.
    """

    name: Any = BACKEND
    _is_lost = False

    def _call_store(self, store_op: str, *args: Any, **kwargs: Any) -> Any:
        torchs: Any = super()  # torch's methods are not fully typed
        if not self._is_lost:
            try:
                return call_within(STORE_S, lambda: torchs._call_store(store_op, *args, **kwargs))
            except Exception as error:
                self._is_lost = True
                if not isinstance(error, TimeoutError):
                    raise
        raise rendezvous.RendezvousConnectionError("the store does not answer")


def launch_id(handler: rendezvous.RendezvousHandler, store: Any) -> str:
    """The launch's id, on which its agents agree by the `store` of their first rendezvous.

    Empty for several nodes of a fixed number, which do not restart their ranks.
    """
    if isinstance(handler, StaticNodes) and handler.world_size > 1:
        return ""
    # Each rendezvous has a prefix of its own in one store.
    store = getattr(store, "underlying_store", store)
    return store.compare_set("muster/launch", "", uuid.uuid4().hex).decode()
