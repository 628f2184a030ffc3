"""What the agents of a launch tell each other while it runs: that each node lives, and what failed on it.

The ranks beat for themselves (train/health/heartbeat.py), but not before they have met; and a rank that was stopped or
killed tells nothing. The words are those of train/health/faults.py, in its store.
"""

import json
import os
import signal
import socket
import threading
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from muster.entrypoint.agent.failures import cause_of, is_ours
from muster.entrypoint.rendezvous.network import within
from muster.errors import ExitCode
from muster.processes import how_ended

BEAT_S = 5.0
DEAD_BEATS = 9
"""So many beats missed in a row are a death: 45 s, as in train/health/heartbeat.py."""

STORE_S = 10.0
"""Seconds for one answer of the store."""

GRACE_S = 10.0
"""Seconds in which ranks that know of a fault have ended by themselves."""

LEAVE_S = 6.0
"""Seconds for which the node of the store waits for others to read why it ends."""


class Nodes:
    """This node among the others, from a start of its workers on: to the end, or until they `leave` to start again.

    `ended` takes the workers that this ends, by process id, and why. `reason`: why a node has failed, if one has.
    `others_left`: whether another one has left, to start its workers again. What has failed on a node ends all others
    only where they are fixed (`is_fixed`).
    """

    def __init__(self, agent: Any, group: Any, ended: dict[int, str], is_fixed: bool) -> None:
        self._agent = agent
        self._is_fixed = is_fixed
        self._has_left = False
        self._group = group
        self._ended = ended
        self.reason = ""
        self.others_left = False
        self._must_wait = False
        self._seen: dict[int, tuple[bytes, int]] = {}
        # Each with a connection of its own: a blocked wait holds its one. Nodes that meet anew have a new prefix.
        self._store: Any = PrefixStore("muster", group.store.underlying_store if is_fixed else group.store).clone()
        self._beats: Any = self._store.clone()
        self._beats.set_timeout(timedelta(seconds=STORE_S))
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        """The thread: beats until something has failed, then ends the ranks that are still there."""
        missed = 0
        # Counted, and not timed: a job may be suspended as a whole. A beat that is missed takes the time of two.
        while not self.reason and not self._has_left and 2 * missed < DEAD_BEATS:
            missed += 1
            try:
                within(BEAT_S, self._beat)
                missed = 0
            except dist.DistNetworkError:  # the store has closed, and does not come back
                break
            except (TimeoutError, RuntimeError):  # it is slow, or its host is gone, which the time limit decides
                continue
            finally:
                time.sleep(BEAT_S)
        if not self.reason:
            self.reason = f"the node at {self._group.master_addr}:{self._group.master_port} does not answer any more"
        if not is_ours():  # such ranks read nothing of a fault
            self._end_workers(signal.SIGTERM)
        time.sleep(GRACE_S)
        self._end_workers(signal.SIGKILL)

    def _beat(self) -> None:
        """Sends this node's beat, and reads whether something has failed."""
        store, group = self._beats, self._group
        text = f"{time.monotonic()} {group.workers[0].global_rank} {socket.gethostname()}"
        store.set(f"node/{group.group_rank}", text)
        # The first watches all others, and each of them the first: the store may be on a third node.
        self._receive((0,) if group.group_rank else range(1, group.group_world_size))
        if store.check(["fault"]):
            self.reason = why(store.get("fault"))
            if self._is_fixed and not is_ours():
                self._must_wait = True
                self._acknowledge(store)

    def leave(self) -> None:
        """Ends this node's beats, which the others don't miss from now on."""
        self._has_left = True
        with suppress(TimeoutError, RuntimeError):  # the store is gone
            within(STORE_S, lambda: self._store.set(f"node/{self._group.group_rank}", ""))

    def _end_workers(self, number: signal.Signals) -> None:
        for pid, code in self._agent.processes().values():
            if code is None and not self._has_left:
                self._ended[pid] = self.reason
                with suppress(ProcessLookupError):
                    os.kill(pid, number)

    def _acknowledge(self, store: Any) -> None:
        """Acknowledges the fault to the node of the store, which waits for that before it ends."""
        keys = [f"left/{worker.global_rank}" for worker in self._group.workers]
        store.multi_set(keys, [""] * len(keys))

    def _receive(self, nodes: Iterable[int]) -> None:
        """Publishes the death of one of `nodes` whose beats have stopped, or that was ended before its first one."""
        for node in nodes:
            unheard = f"0 {node * len(self._group.workers)} node rank {node}".encode()
            text = self._beats.get(f"node/{node}") if self._beats.check([f"node/{node}"]) else unheard
            before, silent = self._seen.get(node, (b"", 0))
            self.others_left |= bool(before) and not text
            self._seen[node] = text, silent + 1 if text and text == before else 0
            if self._seen[node][1] >= DEAD_BEATS:
                _, rank, host = text.decode().split(" ", 2)
                wrong = f"its host gave no sign of life for {DEAD_BEATS * BEAT_S:.0f} s"
                publish(self._beats, self._group, int(rank), host, ExitCode.FAILED, wrong)

    def publish_failures(self, failures: Mapping[int, Any]) -> str:
        """Publishes to the other nodes a failure that this node's ranks perhaps could not publish.

        Returns:
            the failure on another node that was published before, in words; nothing if this is the first.
        """
        rank = cause_of(failures)
        if rank is None or not self._is_fixed:
            return ""
        codes = {failure.exitcode for failure in failures.values()}
        code = ExitCode.USER_MUST_CHANGE if ExitCode.USER_MUST_CHANGE in codes else ExitCode.FAILED

        def tell() -> bytes:
            store, wrong = self._store, f"it {how_ended(failures[rank].exitcode)}"
            store.set_timeout(timedelta(seconds=STORE_S))
            first = publish(store, self._group, rank, socket.gethostname(), code, wrong)
            if not is_ours():
                self._acknowledge(store)
            return first

        self._must_wait = True
        # RuntimeError: the store is gone. A store whose node is gone answers nobody.
        with suppress(TimeoutError, RuntimeError):
            first = within(STORE_S, tell)
            if json.loads(first)["rank"] not in {worker.global_rank for worker in self._group.workers}:
                return why(first)
        return ""

    def wait_for_others(self) -> None:
        """Returns, on the node of the store, when all others know of a failure; on others at once."""
        if self._group.group_rank or not self._must_wait:
            return
        own = {worker.global_rank for worker in self._group.workers}
        others = [f"left/{other}" for other in range(self._group.workers[0].world_size) if other not in own]
        # RuntimeError: another rank will never leave.
        with suppress(TimeoutError, RuntimeError):
            within(LEAVE_S + STORE_S, lambda: self._store.wait(others, timedelta(seconds=LEAVE_S)))


def publish(store: Any, group: Any, rank: int, host: str, code: int, wrong: str) -> bytes:
    """Publishes this fault to all ranks, or the one that was published before; returns which it was."""
    first = store.compare_set("fault", "", json.dumps({"rank": rank, "host": host, "code": code, "wrong": wrong}))
    # Rank 0 waits until each rank has left, and this one has ended without a word.
    keys = [f"left/{rank}", *(f"end/{number}" for number in range(group.workers[0].world_size))]
    store.multi_set(keys, [first] * len(keys))
    return first


def why(text: bytes) -> str:
    """A published fault, in words."""
    fault = json.loads(text)
    return f"rank {fault['rank']} on {fault['host']} failed: {fault['wrong']}"
