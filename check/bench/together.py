"""How the ranks of a measurement meet and end: one of them tells what happened, all have the same exit code."""

import os
import traceback
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from check.bench import transport
from check.doctor.odd import named
from train import console, faults
from train.errors import FAILED, MusterError
from train.world import World, connect, read_environment

WAIT_S = 10
"""For so long ranks that can't go on wait for each other: who does not come is the one to be named."""


class Broken(Exception):
    """A rank can't go on because of another one: what its backend said."""


def join(timeout_s: int) -> World:
    """This rank, connected to the store of all, and told all hosts. A rank alone has a store too.

    Raises:
        MusterError: rank 0 can't be reached, or a rank did not come.
    """
    world = read_environment(os.environ, timeout_s)
    store = PrefixStore("muster", connect(world) or dist.HashStore())  # pyright: ignore[reportPrivateImportUsage]
    world = replace(world, store=store)
    world = replace(world, hosts=tuple(world.gather(world.host)))
    return replace(world, local_world_size=world.local_world_size or world.hosts.count(world.host))


def answer(world: World | None, error: Exception, doing: str) -> int:
    """Says what happened, once for all ranks; returns the exit code.

    Args:
        error: what ended this rank's part.
        doing: what the ranks were at.
    """
    if isinstance(error, faults.SharedFault) and world is not None:
        if world.main:
            console.tell(str(error))
        return error.code
    if world is None:
        console.tell(str(error) if isinstance(error, MusterError) else "".join(traceback.format_exception(error)))
        return error.code if isinstance(error, MusterError) else FAILED
    told = explain(world, error, doing)
    if told is None:
        return FAILED
    if faults.publish(world, told.code, told.wrong).rank == world.rank:
        console.tell(str(told))
    return told.code


def explain(world: World, error: Exception, doing: str) -> MusterError | None:
    """What this rank has to tell of its `error`; None where another rank tells it."""
    is_of_others = isinstance(error, Broken) or (isinstance(error, MusterError) and "did not come" in error.wrong)
    if isinstance(error, MusterError) and not is_of_others:
        return error
    said = error.seen if isinstance(error, MusterError) else (str(error).strip().splitlines() or ["no message"])[0]
    said = "; NCCL says: ".join(filter(None, [said, transport.complaints()]))
    if not is_of_others:
        return MusterError(
            f"rank {world.rank} on {world.host} failed at {doing}: {type(error).__name__}",
            seen=said,
            fix="muster bench --debug shows the traceback; a smaller --max-size needs less memory",
            code=FAILED,
        )
    present = there(world)
    if present is not None and world.rank != min(present):
        return None
    fix = "muster doctor looks at the nodes and the network between them; more time: --timeout-s"
    if present is None:
        wrong = f"rank {world.rank} on {world.host} lost the others at {doing}"
    elif len(present) == world.world_size:
        wrong = f"the ranks are all there, but {doing} failed"
    else:
        missing = [rank for rank in range(world.world_size) if rank not in present]
        wrong = f"{_named(missing, world)} did not come back from {doing}"
    return MusterError(wrong, seen=f"rank {world.rank} on {world.host}: {said}", fix=fix, code=FAILED)


def _named(ranks: list[int], world: World) -> str:
    """`ranks` with their hosts: "ranks 2, 3 on node02"."""
    places = named(list(dict.fromkeys(world.hosts[rank] for rank in ranks)))
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {named([str(rank) for rank in ranks], 8)} on {places}"


def there(world: World) -> list[int] | None:
    """The ranks that can't go on either, and so are alive; None where the store is gone."""
    assert world.store is not None
    keys = [f"broken/{rank}" for rank in range(world.world_size)]
    try:
        world.store.set(keys[world.rank], "")
        with suppress(dist.DistStoreError):
            world.store.wait(keys, timedelta(seconds=WAIT_S))
        return [rank for rank, key in enumerate(keys) if world.store.check([key])]
    except dist.DistError:
        return None
