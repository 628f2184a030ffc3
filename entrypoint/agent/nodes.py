"""Heartbeats and failures of nodes, which the agents of a launch exchange while it runs.

The ranks have heartbeats of their own (train/health/heartbeat.py), but not before they have met; and a rank that was
stopped or killed reports nothing. Keys and values are those of train/health/faults.py, in the same store.
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

from muster import interruption
from muster.entrypoint.agent.failures import cause_of, is_ours
from muster.entrypoint.rendezvous.network import call_within
from muster.errors import ExitCode, MusterError, notify
from muster.processes import how_ended

BEAT_S = 5.0
DEAD_BEATS = 9
"""Heartbeats missed in a row after which a node counts as dead: 45 s, as in train/health/heartbeat.py."""

STORE_S = 10.0
"""Seconds for one answer of the store."""

GRACE_S = 10.0
"""Seconds in which ranks that have read of a fault can end by themselves."""

LEAVE_S = 6.0
"""Seconds for which the node with the store waits for the others to read why it ends."""


class Nodes:
    """This node's exchange with the others: from a start of its workers to their end, or to `leave` and a restart.

    `ended` receives the reason for each worker that this ends, by process id. `reason`: why a node has failed; empty if
    none has. `others_left`: whether another node has left, to restart its workers. A failure on one node ends all
    others only if the nodes of the launch are fixed (`is_fixed`).
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
        # Two connections, as a wait blocks its own. At each new rendezvous, torch gives the store a new prefix.
        self._store: Any = PrefixStore("muster", group.store.underlying_store if is_fixed else group.store).clone()
        self._beats: Any = self._store.clone()
        self._beats.set_timeout(timedelta(seconds=STORE_S))
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        """Sends heartbeats, in a thread, until something has failed; then ends the ranks that still run."""
        missed = 0
        # Missed heartbeats are counted, not timed: a whole job may be suspended. A missed one takes the time of two.
        while not self.reason and not self._has_left and 2 * missed < DEAD_BEATS:
            missed += 1
            try:
                call_within(BEAT_S, self._beat)
                missed = 0
            except dist.DistNetworkError:  # the store has closed, and does not come back
                break
            except (TimeoutError, RuntimeError):  # it is slow, or its host is gone: DEAD_BEATS decides
                continue
            finally:
                time.sleep(BEAT_S)
        if not self.reason:
            self.reason = f"the node at {self._group.master_addr}:{self._group.master_port} does not answer any more"
        if not is_ours():  # other programs do not read the fault
            self._end_workers(signal.SIGTERM)
        time.sleep(GRACE_S)
        self._end_workers(signal.SIGKILL)

    def _beat(self) -> None:
        """Sends this node's heartbeat, and reads whether something has failed."""
        store, group = self._beats, self._group
        text = f"{time.monotonic()} {group.workers[0].global_rank} {socket.gethostname()}"
        store.set(f"node/{group.group_rank}", text)
        # Node 0 watches all others, and each of them node 0: the store may be on a third node.
        self._receive((0,) if group.group_rank else range(1, group.group_world_size))
        if store.check(["fault"]):
            self.reason = why(store.get("fault"))
            if self._is_fixed and not is_ours():
                self._must_wait = True
                self._acknowledge(store)

    def leave(self) -> None:
        """Ends this node's heartbeat, and tells the others, so that they do not take it for dead."""
        self._has_left = True
        with suppress(TimeoutError, RuntimeError):  # the store is gone
            call_within(STORE_S, lambda: self._store.set(f"node/{self._group.group_rank}", ""))

    def _end_workers(self, number: signal.Signals) -> None:
        for pid, code in self._agent.processes().values():
            if code is None and not self._has_left:
                self._ended[pid] = self.reason
                with suppress(ProcessLookupError):
                    os.kill(pid, number)

    def _acknowledge(self, store: Any) -> None:
        """Acknowledges the fault to the node with the store, which waits for that before it ends."""
        keys = [f"left/{worker.global_rank}" for worker in self._group.workers]
        store.multi_set(keys, [""] * len(keys))

    def _receive(self, nodes: Iterable[int]) -> None:
        """Reads the heartbeats of `nodes`; publishes the death of a node whose heartbeat has stopped or never began."""
        for node in nodes:
            unheard = f"0 {node * len(self._group.workers)} node rank {node}".encode()
            text = self._beats.get(f"node/{node}") if self._beats.check([f"node/{node}"]) else unheard
            before, silent = self._seen.get(node, (b"", 0))
            self.others_left |= bool(before) and not text
            self._seen[node] = text, silent + 1 if text and text == before else 0
            if self._seen[node][1] >= DEAD_BEATS:
                _, rank, host = text.decode().split(" ", 2)
                wrong = f"gave no sign of life for {DEAD_BEATS * BEAT_S:.0f} s"
                is_news = self._is_fixed and not self._beats.check(["fault"])
                publish(self._beats, self._group, int(rank), host, ExitCode.FAILED, f"its host {wrong}")
                if is_news:  # no process on that host can report it
                    seen = f"its last heartbeat, by node rank {self._group.group_rank} on {socket.gethostname()}"
                    fix = f"see whether that host is up; without it, {interruption.advice_of_ranks()}"
                    notify(MusterError(f"{host} {wrong}", seen=seen, fix=fix))

    def publish_failures(self, failures: Mapping[int, Any]) -> str:
        """Publishes to the other nodes a failure that this node's ranks perhaps could not publish.

        Returns:
            the failure on another node that was published before, in words; empty if this is the first.
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
        # RuntimeError: the store has closed. TimeoutError: its node is gone, so that it does not answer.
        with suppress(TimeoutError, RuntimeError):
            first = call_within(STORE_S, tell)
            if json.loads(first)["rank"] not in {worker.global_rank for worker in self._group.workers}:
                return why(first)
        return ""

    def wait_for_others(self) -> None:
        """On node 0, which has the store, waits until all others have read of a failure, LEAVE_S seconds at most."""
        if self._group.group_rank or not self._must_wait:
            return
        own = {worker.global_rank for worker in self._group.workers}
        others = [f"left/{other}" for other in range(self._group.workers[0].world_size) if other not in own]
        # RuntimeError: another rank has not left in time.
        with suppress(TimeoutError, RuntimeError):
            call_within(LEAVE_S + STORE_S, lambda: self._store.wait(others, timedelta(seconds=LEAVE_S)))


def publish(store: Any, group: Any, rank: int, host: str, code: int, wrong: str) -> bytes:
    """Publishes this fault to all ranks, or again the first one if there is one already; returns the published one."""
    first = store.compare_set("fault", "", json.dumps({"rank": rank, "host": host, "code": code, "wrong": wrong}))
    # Rank 0 waits until each rank has left, which this one can no longer write itself.
    keys = [f"left/{rank}", *(f"end/{number}" for number in range(group.workers[0].world_size))]
    store.multi_set(keys, [first] * len(keys))
    return first


def why(text: bytes) -> str:
    """A published fault, in words."""
    fault = json.loads(text)
    return f"rank {fault['rank']} on {fault['host']} failed: {fault['wrong']}"
