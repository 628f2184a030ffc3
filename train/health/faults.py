"""One rank's error ends all ranks, with one message and one exit code.

At points of the set-up the ranks exchange their errors (`agree`). Between them a failing rank writes its fault to the
store, under one key for all and one for each other rank. Each rank's watch waits for that rank's key: it ends a rank
that is stuck in a collective with the failed one.
"""

import json
import os
import re
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from muster import interruption
from muster.errors import ExitCode, MusterError
from muster.train.distributed.world import World
from muster.train.reporting import console
from muster.variables import RankReport

Result = TypeVar("Result")

GRACE_S = 3
"""Seconds that a rank has to end by itself after a fault; a failing rank 0 serves the store for up to twice as long."""

ECHO = r"connection (was )?(likely )?(closed|reset|refused)|broken pipe|remote process exited|communicator was aborted"
"""A pattern for the messages by which gloo, NCCL and the store report that another rank is gone."""


class SharedFault(MusterError):
    """A fault that all ranks know: rank 0 prints it, and all exit with its code."""


@dataclass(frozen=True)
class Fault:
    """A rank's failure, as it is published to the others."""

    rank: int
    host: str
    code: int
    wrong: str

    def __str__(self) -> str:
        return f"rank {self.rank} on {self.host} failed: {self.wrong}"


def agree(world: World, function: Callable[[], Result]) -> Result:
    """Calls `function` on each rank; returns its result on this rank, once it has returned on all ranks.

    Raises:
        SharedFault: on all ranks alike, where it raised a MusterError on any.
    """
    result, failure = None, None
    try:
        result = function()
    except MusterError as error:
        failure = error.parts
    answers = world.gather(failure)
    for rank, answer in enumerate(answers):
        if answer is not None:
            if any(other != answer for other in answers):
                answer["seen"] += f" (rank {rank} of {world.world_size} on {world.hosts[rank]})"
            raise SharedFault(**answer)
    return result  # type: ignore[return-value]


class Watch:
    """Waits, in a thread of its own, until another rank has published a fault, and then ends this process.

    A rank that is blocked in NCCL does not notice a dead peer before the time-out; the watch does. Its thread waits for
    the network, which costs the trainer nothing.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        # A connection of its own: a wait blocks all other requests on the same connection.
        self.store: Any = world.store.clone()
        self.thread = threading.Thread(target=self._wait, name="watch", daemon=True)
        self.thread.start()

    def _wait(self) -> None:
        key = f"end/{self.world.rank}"
        try:
            self.store.wait([key], timedelta(days=365))
            text = self.store.get(key).decode()
        except dist.DistError:
            return  # without the store, faults can't be read
        if text:
            fault = Fault(**json.loads(text))
            end_soon(fault.code, GRACE_S, lambda: self._report(fault))

    def _report(self, fault: Fault) -> None:
        report_end(self.world, fault, is_shown=fault.code != ExitCode.INTERRUPTED or fault.host != self.world.host)
        # By this connection, as the trainer's own may be blocked by a wait.
        leave(self.world, self.store, failed=True, main=False)

    def close(self) -> None:
        """Ends the thread: it must not be inside torch when the interpreter ends."""
        with suppress(dist.DistError):
            if not self.world.store.check([f"end/{self.world.rank}"]):
                self.world.store.set(f"end/{self.world.rank}", "")
        self.thread.join(GRACE_S)


def publish(world: World, fault: Fault, store: Any) -> Fault:
    """Publishes `fault` to all ranks; returns the fault that counts, which is the first that was published.

    A rank that fails by itself publishes its fault before its connections close. So an error that other ranks get from
    those connections is always published second, and recognised as a consequence.

    Args:
        fault: of this rank, or of another one that may not be able to publish it.
        store: the connection of the thread that publishes it.
    """
    text = json.dumps(asdict(fault))
    with suppress(dist.DistError):
        first = store.compare_set("fault", "", text).decode()
        # Also where this reports another rank's fault: the rank that was first may have died before it reached all.
        if first == text or fault.rank != world.rank:
            others = [f"end/{rank}" for rank in range(world.world_size) if rank != world.rank]
            store.multi_set(others, [first] * len(others))
        return Fault(**json.loads(first))
    return fault  # the store went down with its rank: the others have noticed


def report_end(world: World, fault: Fault, *, is_shown: bool) -> None:
    """Reports once that another rank's `fault` ends this one: in the log; if `is_shown`, to the user once per host."""
    if not world.status.end_reported:
        world.status.end_reported = True
        # Where Ctrl-C has come here too, this rank's own launch reports it.
        is_news = is_shown and world.local_rank == 0 and not interruption.current.has_come
        report = console.notify if is_news else console.log_line
        report(f"rank {world.rank} on {world.host} ends: {fault}")
        console.report_to_agent(RankReport.ERROR_SHOWN)


def leave(world: World, store: Any, *, failed: bool, main: bool) -> None:
    """Publishes that this rank leaves; returns when it may exit: `main`, which may host the store, after the others.

    Args:
        store: a connection that no wait blocks.
    """
    with suppress(dist.DistError):
        store.set(f"left/{world.rank}", "")
        if main:
            others = [f"left/{rank}" for rank in range(world.world_size) if rank != world.rank]
            store.wait(others, timedelta(seconds=2 * GRACE_S if failed else world.timeout_s))


def is_echo(error: BaseException) -> bool:
    """Whether `error` says that the other end of a connection is gone: some rank failed before this one."""
    return isinstance(error, RuntimeError) and bool(re.search(ECHO, str(error), re.IGNORECASE))


def connection_lost(error: BaseException, world: World) -> MusterError:
    """The error for the user in place of `error`, for which `is_echo` is True."""
    # Without the place in gloo's source, and without its guesses.
    seen = re.sub(r".*\.cc:\d+\] ", "", str(error).strip().partition("\n")[0]).partition(". This is typically")[0]
    return MusterError(
        "the connection to another rank is lost: that rank failed before, or is cut off",
        seen=f"rank {world.rank} on {world.host}: {seen}",
        fix="find the rank that was ended by a signal, in the log of its node or of the scheduler; "
        + interruption.current.advice,
        code=ExitCode.FAILED,
    )


def end_soon(code: int, limit_s: float, before: Callable[[], None] | None = None) -> None:
    """Ends this process with `code` after `limit_s`, should it not have ended by then; calls `before` first."""

    def end() -> None:
        if before is not None:
            # `before` may need a store that no longer answers.
            last = threading.Thread(target=before, daemon=True)
            last.start()
            last.join(3 * GRACE_S)
        console.flush()
        os._exit(code)

    timer = threading.Timer(limit_s, end)
    timer.daemon = True
    with suppress(RuntimeError):  # out of memory, a process gets no further thread, and ends without this limit
        timer.start()
