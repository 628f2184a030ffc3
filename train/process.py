"""A trainer process from its first line to its exit code."""

import os
import sys
import traceback
import warnings
from dataclasses import replace

import torch
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.elastic.multiprocessing.errors import record

from train import faults
from train.errors import MusterError
from train.faults import SharedFault, agree
from train.options import Options
from train.run import run
from train.world import World, close_group, connect, device_for, open_group, read_environment

DEBUG = bool(os.environ.get("MUSTER_DEBUG"))


def join(options: Options) -> tuple[World, faults.Watch]:
    """This process's world, all ranks met and told apart, its process group up, and its watch."""
    world = read_environment(os.environ, options.timeout_s)
    store = connect(world)
    world = replace(world, store=None if store is None else PrefixStore("muster", store))
    watch = faults.Watch(world)
    try:
        world = meet(world, options)
    except BaseException as error:
        end(world, watch, error)
        raise
    return world, watch


def meet(world: World, options: Options) -> World:
    """`world` with its devices and hosts, its process group started."""
    world = replace(world, hosts=tuple(world.gather(world.host)))
    device = agree(world, lambda: device_for(world, options.device))
    name = str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else f"cpu {world.rank}"
    places = [tuple(place) for place in world.gather([world.host, name])]
    for rank, place in enumerate(places):
        first = places.index(place)
        if first != rank:
            raise SharedFault(
                "two ranks would share one GPU",
                seen=f"ranks {first} and {rank} on {place[0]} both see GPU {name}",
                fix="start one process a GPU, or show each process its own (srun --gpus-per-task=1)",
            )
    local_world_size = world.local_world_size or sum(host == world.host for host, _ in places)
    backend = {"cpu": "gloo", "cuda": "nccl"}[device.type] if world.store is not None else None
    world = replace(world, device=device, backend=backend, local_world_size=local_world_size)
    open_group(world)
    return world


def end(world: World, watch: faults.Watch, error: BaseException | None) -> None:
    """Tells the others of `error`, if it is one, and takes this rank out of the world."""
    if error is not None:
        faults.end_soon(faults.code_of(error))
        if not isinstance(error, SharedFault):
            faults.publish(world, faults.code_of(error), str(error).partition("\n")[0] or type(error).__name__)
    close_group()
    watch.close()
    faults.leave(world, failed=error is not None)


def train(strategy: str, options: Options) -> None:
    """One rank's run; an error of one rank ends all."""
    world, watch = join(options)
    try:
        run(strategy, options, world)
    except BaseException as error:
        # An error that is no message of ours may be the echo of another rank's end: a collective that broke.
        fault = None if isinstance(error, MusterError) else faults.find(world)
        end(world, watch, error)
        if fault is not None and not DEBUG:
            print(f"rank {world.rank} on {world.host} ends: {fault}", file=sys.stderr)
            raise SystemExit(fault.code) from None
        raise
    end(world, watch, None)


@record
def run_process(strategy: str, options: Options) -> None:
    """Runs `train`, and answers what it raises by three lines and an exit code, or by a traceback."""
    if not DEBUG:
        warnings.filterwarnings("ignore", category=UserWarning, module=r"torch(vision)?\.")
        warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch(vision)?\.")
    try:
        train(strategy, options)
    except MusterError as error:
        if DEBUG:
            traceback.print_exc()
        elif not isinstance(error, SharedFault) or int(os.environ.get("RANK", "0")) == 0:
            print(error, file=sys.stderr, flush=True)
        raise SystemExit(error.code) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None
