"""One rank's error ends all ranks, with one message and one exit code.

At set-up points the ranks meet and tell (`agree`). Between them a rank that fails leaves its fault in the
store, and writes it to each other rank's own key, on which that rank's watch waits: whoever is stuck in a
collective with the dead is ended by its watch.
"""

import json
import os
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist

from train.errors import FAILED, MusterError
from train.world import World

Result = TypeVar("Result")

GRACE_S = 5
"""Seconds in which a rank told of a fault may end by itself, and in which a failing rank 0 keeps the store up."""


class SharedFault(MusterError):
    """A fault that all ranks know of: rank 0 prints it, all exit with its code."""


@dataclass(frozen=True)
class Fault:
    """What a rank that fails tells the others."""

    rank: int
    host: str
    code: int
    wrong: str

    def __str__(self) -> str:
        return f"rank {self.rank} on {self.host} failed: {self.wrong}"


def agree(world: World, function: Callable[[], Result]) -> Result:
    """What `function` returns on this rank, once it has returned on all ranks.

    Raises:
        SharedFault: on all ranks alike, where it raised a MusterError on any.
    """
    result, told = None, None
    try:
        result = function()
    except MusterError as error:
        told = {"wrong": error.wrong, "seen": error.seen, "fix": error.fix, "code": error.code}
    answers = [told] if world.store is None else world.gather(told)
    for rank, answer in enumerate(answers):
        if answer is None:
            continue
        if world.world_size > 1 and any(other != answer for other in answers):
            answer["seen"] += f" (rank {rank} of {world.world_size} on {world.hosts[rank]})"
        raise SharedFault(**answer)
    return result  # type: ignore[return-value]


class Watch:
    """Waits, in a thread of its own, for the news that another rank has failed, and then ends this process.

    A rank blocked in NCCL does not notice a dead peer before the time-out; this one does. The thread blocks on the
    network: it costs the trainer nothing.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        self.thread: threading.Thread | None = None
        if world.store is not None:
            # Its own connection: a blocked wait would hold up everybody else's.
            self.store = world.store.clone()
            self.thread = threading.Thread(target=self._wait, name="watch", daemon=True)
            self.thread.start()

    def _wait(self) -> None:
        key = f"end/{self.world.rank}"
        try:
            self.store.wait([key], timedelta(days=365))
            text = self.store.get(key).decode()
        except dist.DistError:
            return  # the store is gone, and with it the means to know
        if text:
            end_soon(json.loads(text)["code"])

    def close(self) -> None:
        """Ends the thread: it must not be inside torch when the interpreter ends."""
        if self.thread is None or self.world.store is None:
            return
        try:
            if not self.world.store.check([f"end/{self.world.rank}"]):
                self.world.store.set(f"end/{self.world.rank}", "")
        except dist.DistError:
            pass
        self.thread.join(GRACE_S)


def publish(world: World, code: int, wrong: str) -> None:
    """Tells all ranks that this one fails; the first to fail is the one that counts."""
    if world.store is None:
        return
    fault = json.dumps({"rank": world.rank, "host": world.host, "code": code, "wrong": wrong})
    try:
        if world.store.compare_set("fault", "", fault).decode() != fault:
            return
        for rank in range(world.world_size):
            if rank != world.rank:
                world.store.set(f"end/{rank}", fault)
    except dist.DistError:
        pass  # the store went down with its rank: the others have noticed


def find(world: World, limit_s: float = GRACE_S) -> Fault | None:
    """The fault of another rank, waiting `limit_s` for it, if one was published."""
    if world.store is None:
        return None
    try:
        world.store.wait(["fault"], timedelta(seconds=limit_s))
        fault = Fault(**json.loads(world.store.get("fault")))
    except dist.DistError:
        return None
    return None if fault.rank == world.rank else fault


def leave(world: World, *, failed: bool) -> None:
    """Returns when this rank may exit: rank 0, which may hold the store, only after the others."""
    if world.store is None:
        return
    try:
        world.store.set(f"left/{world.rank}", "")
        if world.main:
            others = [f"left/{rank}" for rank in range(1, world.world_size)]
            world.store.wait(others, timedelta(seconds=GRACE_S if failed else world.timeout_s))
    except dist.DistError:
        pass


def end_soon(code: int) -> None:
    """Ends this process with `code` after GRACE_S, should it not have ended by then."""

    def end() -> None:
        sys.stderr.flush()
        os._exit(code)

    timer = threading.Timer(GRACE_S, end)
    timer.daemon = True
    timer.start()


def code_of(error: BaseException) -> int:
    """The exit code that `error` asks for."""
    return error.code if isinstance(error, MusterError) else FAILED
