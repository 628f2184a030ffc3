"""How the ranks of doctor and bench meet, exchange answers, and end with one exit code."""

import json
import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any, NoReturn

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from muster import interruption
from muster.errors import ExitCode, MusterError
from muster.train.distributed.backends import backend_for, compare_devices
from muster.train.distributed.world import World, connect, device_for, read_environment
from muster.train.health import faults
from muster.train.health.faults import agree
from muster.train.reporting import console
from muster.units import listed, plural
from muster.variables import LaunchVariable, RankReport

ALL_PAIRS_UP_TO = 32
"""Up to so many nodes each one is paired with each other one."""

STYLES = {"ok": "green", "warning": "yellow", "failed": "bold red", "-": "dim"}
"""How the word of an answer is shown."""

FAULT_POLL_S = 1.0
"""How often rank 0, while it waits for others, reads whether an agent has published that a rank died."""


class Absent(MusterError):
    """Some ranks did not come, or had come and gave no more answer; all the others know of it.

    Args:
        world: of the rank that raises this; with its hosts where these ranks had met the others.
        ranks: those without an answer.
        fault: what a node's agent has published of a rank that died.

    Attributes:
        host: where these ranks are, or should be; empty where that is not known.
        has_died: whether a rank ended, or hangs; not one that never came.
    """

    def __init__(self, world: World, ranks: Sequence[int], fault: faults.Fault | None = None) -> None:
        which = f"{'rank' if len(ranks) == 1 else 'ranks'} {listed(ranks)}"
        waited = f"waited {world.timeout_s} s on rank {world.rank} of {world.world_size} ({world.host})"
        had_come = bool(world.hosts)
        if fault is not None:
            wrong, seen = f"rank {fault.rank} on {fault.host} died in the check", fault.wrong
            fix = "look what it wrote, and at its node's log (dmesg): memory ran out, or a GPU or a driver failed"
        elif had_come:
            wrong, seen = f"{which} had come, and gave no more answer", waited
            fix = "look what they wrote, and at their nodes' log (dmesg): they died, or hang"
        else:
            wrong, seen = f"{which} did not come", waited
            fix = "look at that node: does it answer, did the command start there? A slow start: --timeout-s"
        super().__init__(wrong, seen=seen, fix=fix, code=ExitCode.FAILED)
        self.world, self.has_died = world, had_come or fault is not None
        self.host = listed([fault.host] if fault else [host_of(rank, world) for rank in ranks])


def join(timeout_s: int) -> World:
    """This rank, connected to the store of all ranks, with the hosts of all of them. A rank alone has a store too.

    Unlike a training's the store is up as soon as rank 0 is: so it knows who has not come.

    Raises:
        Absent: not all came within `timeout_s`.
        MusterError: rank 0 can't be reached, or its port is taken.
    """
    world = read_environment(os.environ, timeout_s)
    world = replace(world, store=PrefixStore("muster", connect(world, waits_for_all=False)))
    return replace(world, hosts=tuple(gather(world, world.host)))


def with_device(world: World, wanted: str, backend: str = "auto") -> World:
    """`world` with its device and backend, as `--device` and `--backend` want them. To be called on all ranks.

    Raises:
        SharedFault: on all ranks alike: a GPU is missing, or is another rank's too, or the backend is; or ranks have
            different kinds of devices.
    """
    kind = "cpu" if backend == "gloo" and wanted == "auto" else wanted
    world = replace(world, device=agree(world, lambda: device_for(world, kind)))
    compare_devices(world)
    return replace(world, backend=agree(world, lambda: backend_for(backend, world.device, "ddp")))


def gather(world: World, value: Any, *, to_all: bool = True) -> list[Any]:
    """`value` of each rank, by rank. Unlike `world.gather`, those that came end at once where others did not.

    Args:
        to_all: False for what rank 0 alone has to know: others get nothing.

    Raises:
        Absent: on all ranks that came.
    """
    if world.store is None:
        return [value]
    turn = f"check/{next(world.turns)}"
    world.store.set(f"{turn}/{world.rank}", json.dumps(value))
    if world.main:
        keys = [f"{turn}/{rank}" for rank in range(world.world_size)]
        absent = _wait_for(keys, world)
        values = [] if absent else [json.loads(text) for text in world.store.multi_get(keys)]
        world.store.set(f"{turn}/all", json.dumps([absent, values if to_all else []]))
    else:
        world.wait([f"{turn}/all"])
        absent, values = json.loads(world.store.get(f"{turn}/all"))
    if absent:
        raise Absent(world, absent, fault_in(world.store))
    return values


def _wait_for(keys: Sequence[str], world: World) -> list[int]:
    """The ranks that have not set their key in time, or before an agent has published that a rank died."""
    store: Any = world.store
    ends = time.monotonic() + world.timeout_s
    while True:
        try:
            store.wait(list(keys), timedelta(seconds=max(0.1, min(FAULT_POLL_S, ends - time.monotonic()))))
        except dist.DistError:
            if fault_in(store) is not None or time.monotonic() >= ends:
                return [rank for rank, key in enumerate(keys) if not store.check([key])]
        else:
            return []


def fault_in(store: Any) -> faults.Fault | None:
    """The fault that the agent of a node has published of a rank that died (entrypoint/agent/nodes.py)."""
    return faults.Fault(**json.loads(store.get("fault"))) if store.check(["fault"]) else None


def leads_host(world: World) -> bool:
    """Whether this is the first rank of its host, which answers for the host."""
    return world.hosts.index(world.host) == world.rank


def gather_hosts(world: World, value: Any, *, to_all: bool = True) -> list[Any]:
    """`value` of the first rank of each host, by rank; the other ranks' counts for nothing. See `gather`."""
    values = gather(world, value if leads_host(world) else None, to_all=to_all)
    return [one for one in values if one is not None]


def partners(node: int, num_nodes: int) -> list[int]:
    """The nodes that `node` is paired with: all others, or of many nodes those 1, 2, 4, 8... places away, both ways.

    So each node is connected to each other one by no more than log2 n of them.
    """
    if num_nodes <= ALL_PAIRS_UP_TO:
        return [other for other in range(num_nodes) if other != node]
    steps = [1 << power for power in range((num_nodes // 2).bit_length())]
    return sorted({(node + way * step) % num_nodes for step in steps for way in (1, -1)} - {node})


def shape(world: World) -> str:
    """ "2 nodes x 4 = 8 ranks"."""
    counts = sorted({world.hosts.count(host) for host in world.nodes})
    a_node = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    return f"{plural(len(world.nodes), 'node')} x {a_node} = {plural(world.world_size, 'rank')}"


def host_of(rank: int, world: World) -> str:
    """The node that `rank` is on, or should be; empty where the launch handed no list of nodes on."""
    if world.hosts:
        return world.hosts[rank]
    nodes = [name for name in os.environ.get(LaunchVariable.NODES, "").split(",") if name]  # by node_rank
    a_node = world.local_world_size or 1
    # Where nodes have different numbers of ranks, nobody here knows whose is which.
    return nodes[rank // a_node] if nodes and len(nodes) * a_node == world.world_size else ""


def print_answer(prints: Callable[[], int]) -> int:
    """The exit code that `prints` returns once it has printed; that of a failure where the output can't be written."""
    try:
        code = prints()
        print(end="", flush=True)  # there may be no standard output
    except SystemExit:  # by rich, of a pipe whose reader has seen enough
        return ExitCode.FAILED
    except OSError as error:
        interruption.give_up_output(error)
        return ExitCode.FAILED
    return code


def leave(world: World | None, code: int) -> NoReturn:
    """Ends this process with `code`, once all that came may do without its store.

    It ends without destructors: those of a process group that broke can hang, or abort the process.

    Args:
        world: None before the ranks have met.
    """
    if code:
        console.report_to_agent(RankReport.ERROR_SHOWN)
    # The agent stops the other ranks of a node as soon as one has ended with a code: they are about to, with the same.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    faults.end_soon(code, 4 * faults.GRACE_S)
    if world is not None:
        faults.leave(world, world.store, failed=code != ExitCode.DONE, main=world.main)
    console.flush()
    os._exit(code)
