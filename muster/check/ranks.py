"""Functions that doctor and bench share: they connect the ranks, exchange results and end with one exit code."""

import os
import signal
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NoReturn

from torch.distributed.distributed_c10d import PrefixStore

from muster import interruption
from muster.errors import ExitCode
from muster.train.distributed.backends import backend_for, compare_devices
from muster.train.distributed.world import World, connect, device_for, read_environment
from muster.train.health import faults
from muster.train.reporting import console
from muster.units import plural
from muster.variables import RankReport

ALL_PAIRS_UP_TO = 32
"""The largest number of nodes for which each node is paired with every other one."""

STYLES = {"ok": "green", "warning": "yellow", "failed": "bold red", "-": "dim"}
"""The style, in rich's notation, in which each verdict is printed."""


def join(timeout_s: int) -> World:
    """The world of this rank, connected to the store of all ranks, with their hosts. A single rank has a store too.

    Raises:
        RanksMissing: a rank did not connect within `timeout_s`, or died.
        MusterError: rank 0 can't be reached, or its port is taken.
    """
    world = read_environment(os.environ, timeout_s)
    world = replace(world, store=PrefixStore("muster", connect(world)))
    return replace(world, hosts=tuple(world.gather(world.host)))


def with_device(world: World, wanted: str, backend: str = "auto") -> World:
    """`world` with the device and backend that `--device` and `--backend` ask for. To be called on all ranks.

    Raises:
        SharedFault: on all ranks: a GPU is missing or is also another rank's, the backend is missing or does not work
            on the device, or the ranks have different kinds of devices.
    """
    kind = "cpu" if backend == "gloo" and wanted == "auto" else wanted
    world = replace(world, device=faults.agree(world, lambda: device_for(world, kind)))
    compare_devices(world)
    return replace(world, backend=faults.agree(world, lambda: backend_for(backend, world.device, "ddp")))


def leads_host(world: World) -> bool:
    """Whether this is the first rank of its host, which reports for the host."""
    return world.hosts.index(world.host) == world.rank


def gather_hosts(world: World, value: Any) -> list[Any]:
    """`value` of the first rank of each host, in order of rank; other ranks' values are ignored. See `World.gather`."""
    return [one for one in world.gather(value if leads_host(world) else None) if one is not None]


def partners(node: int, num_nodes: int) -> list[int]:
    """The nodes that `node` is paired with: all others, or of many nodes those 1, 2, 4, 8... places away, both ways.

    So a chain of at most log2(num_nodes) pairs leads from each node to every other one.
    """
    if num_nodes <= ALL_PAIRS_UP_TO:
        return [other for other in range(num_nodes) if other != node]
    steps = [1 << power for power in range((num_nodes // 2).bit_length())]
    return sorted({(node + way * step) % num_nodes for step in steps for way in (1, -1)} - {node})


def shape(world: World) -> str:
    """The size of `world` in words: "2 nodes x 4 = 8 ranks"."""
    counts = sorted({world.hosts.count(host) for host in world.nodes})
    a_node = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    return f"{plural(len(world.nodes), 'node')} x {a_node} = {plural(world.world_size, 'rank')}"


def print_answer(prints: Callable[[], int]) -> int:
    """Calls `prints` and returns its exit code, or that of a failure where the output can't be written."""
    try:
        code = prints()
        print(end="", flush=True)  # there may be no standard output
    except SystemExit:  # raised by rich when the reader of a pipe has closed it
        return ExitCode.FAILED
    except OSError as error:
        interruption.give_up_output(error)
        return ExitCode.FAILED
    return code


def leave(world: World | None, code: int) -> NoReturn:
    """Ends this process with `code`; rank 0, which may hold the store, first waits for the other connected ranks.

    Destructors are skipped: those of a broken process group can hang, or abort the process.

    Args:
        world: None before the ranks are connected.
    """
    if code:
        console.report_to_agent(RankReport.ERROR_SHOWN)
    # When a rank has failed, the agent sends SIGTERM to its node's others: they are about to end with the same code.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    faults.end_soon(code, 4 * faults.GRACE_S)
    if world is not None:
        faults.leave(world, world.store, failed=code != ExitCode.DONE, main=world.main)
    console.flush()
    os._exit(code)
