"""What the agents of a launch tell each other: who has come, that each node lives, and what failed on it.

The latter two are for trainings that are not started again in place. The ranks beat for themselves
(train/heartbeat.py), but not before they have met; and a rank that was stopped or killed tells nothing. The words are
those of train/faults.py, in its store.
"""

import json
import os
import socket
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

from muster.entrypoint.network import within
from muster.errors import ExitCode

WARNED = (-10, -12, -15)
"""Exit codes of workers that a warning has ended: their scheduler stops all."""

BEAT_S = 5.0
DEAD_BEATS = 9
"""So many beats missed in a row are a death: 45 s, as between ranks."""

STORE_S = 10.0
"""Seconds for one answer of the store."""

GRACE_S = 10.0
"""Seconds in which ranks that know of a fault have ended by themselves."""

LEAVE_S = 6.0
"""Seconds for which the node of the store waits for others to hear why it ends."""


class Nodes:
    """This node's agent among the others.

    Args:
        ended: takes the workers that this ends, by process id, and why.
    """

    def __init__(self, ended: dict[int, str]) -> None:
        self._ended = ended
        self._store: Any = None
        self._rounds = 0
        self._reason = ""
        self._seen: dict[int, tuple[bytes, int]] = {}

    def take_over(self) -> None:
        """From now on torchrun's agents of this process beat."""
        torchs: Any = LocalElasticAgent  # of which these are private
        start, invoke = torchs._start_workers, torchs._invoke_run

        def start_workers(agent: Any, group: Any) -> Any:
            started = start(agent, group)
            is_ours = "MUSTER_COMMAND" in os.environ and group.spec.rdzv_handler.get_backend() == "static"
            if is_ours and group.group_world_size > 1 and self._store is None:
                # With connections of their own: a blocked wait holds its one.
                self._store = PrefixStore("muster", group.store.underlying_store).clone()
                for function, arguments in ((self._speak, (self._store.clone(), group)), (self._look, (agent, group))):
                    threading.Thread(target=function, args=arguments, daemon=True).start()
            return started

        def invoke_run(agent: Any, *arguments: Any) -> Any:
            result = invoke(agent, *arguments)
            if result.failures and self._store is not None:
                self._publish_failures(agent._worker_group, result.failures)
            return result

        torchs._start_workers, torchs._invoke_run = start_workers, invoke_run

    def _speak(self, store: Any, group: Any) -> None:
        """The thread that may be held up by the store: beats until something fails."""
        store.set_timeout(timedelta(seconds=STORE_S))
        own = f"node/{group.group_rank}"
        while not self._reason:
            try:
                store.set(own, f"{self._rounds} {group.workers[0].global_rank} {socket.gethostname()}")
                if group.group_rank == 0:
                    self._listen(store, group)
                if store.check(["fault"]):
                    self._reason = why(store.get("fault"))
                self._rounds += 1
            except dist.DistNetworkError:  # the store has closed, and does not come back
                self._reason = gone(group)
            except RuntimeError:  # it was too slow, and the look counts that
                continue
            finally:
                time.sleep(BEAT_S)

    def _look(self, agent: Any, group: Any) -> None:
        """The thread that waits for nobody: when something has failed, it sees to it that this node's ranks end."""
        heard, quiet = -1, 0
        while not self._reason and quiet < DEAD_BEATS:
            time.sleep(BEAT_S)
            heard, quiet = self._rounds, (quiet + 1 if self._rounds == heard else 0)
        self._reason = self._reason or gone(group)
        time.sleep(GRACE_S)
        self._end_workers(agent, self._reason)

    def _listen(self, store: Any, group: Any) -> None:
        """Publishes the death of a node that was heard and is silent."""
        for node in range(1, group.group_world_size):
            text = store.get(f"node/{node}") if store.check([f"node/{node}"]) else b""
            before, silent = self._seen.get(node, (b"", 0))
            self._seen[node] = text, silent + 1 if text and text == before else 0
            if self._seen[node][1] >= DEAD_BEATS:
                _, rank, host = text.decode().split(" ", 2)
                wrong = f"its host gave no sign of life for {DEAD_BEATS * BEAT_S:.0f} s"
                publish(store, group, {"rank": int(rank), "host": host, "code": ExitCode.FAILED, "wrong": wrong})

    def _publish_failures(self, group: Any, failures: Mapping[int, Any]) -> None:
        """Tells the other nodes' ranks of a failure that this node's perhaps could not tell."""
        found = first_of(failures)
        if found is None:
            return
        rank, first = found
        codes = {failure.exitcode for failure in failures.values()}
        how = f"it was ended by {first.signal_name()}" if first.exitcode < 0 else f"exit code {first.exitcode}"
        code = ExitCode.USER_MUST_CHANGE if ExitCode.USER_MUST_CHANGE in codes else ExitCode.FAILED
        fault = {"rank": rank, "host": socket.gethostname(), "code": code, "wrong": how}

        def tell_all() -> None:
            store = self._store
            store.set_timeout(timedelta(seconds=STORE_S))
            publish(store, group, fault)
            if group.group_rank == 0:
                own = {worker.global_rank for worker in group.workers}
                others = [f"left/{other}" for other in range(group.workers[0].world_size) if other not in own]
                store.wait(others, timedelta(seconds=LEAVE_S))

        # RuntimeError: the store is gone, or another rank will never leave. A store whose node is gone answers nobody.
        with suppress(TimeoutError, RuntimeError):
            within(LEAVE_S + STORE_S, tell_all)

    def _end_workers(self, agent: Any, reason: str) -> None:
        """Ends the workers that have not ended by themselves."""
        handlers: dict[int, Any] = getattr(agent._pcontext, "subprocess_handlers", {})
        for handler in handlers.values():
            if handler.proc.poll() is None:
                self._ended[handler.proc.pid] = reason
                handler.proc.kill()


def first_of(failures: Mapping[int, Any]) -> tuple[int, Any] | None:
    """The rank that failed first, and how; None where a warning has ended all, which is no failure of this node's."""
    if any(failure.exitcode == ExitCode.PREEMPTED for failure in failures.values()):
        return None
    # Once one has failed, torchrun ends the others by SIGTERM.
    own = {rank: failure for rank, failure in failures.items() if failure.exitcode not in WARNED}
    # A worker that was killed has no record of the time; the others' records know it to the second only.
    return min(own.items(), key=lambda item: (item[1].exitcode >= 0, item[1].timestamp), default=None)


def publish(store: Any, group: Any, fault: Mapping[str, Any]) -> None:
    """Tells all ranks of `fault`, or of the one that was told before."""
    first = store.compare_set("fault", "", json.dumps(fault))
    keys = [f"end/{rank}" for rank in range(group.workers[0].world_size)]
    store.multi_set(keys, [first] * len(keys))


def gone(group: Any) -> str:
    """That the node of the store is gone, in words."""
    return f"the node at {group.master_addr}:{group.master_port} does not answer any more"


def why(text: bytes) -> str:
    """A published fault, in words."""
    fault = json.loads(text)
    return f"rank {fault['rank']} on {fault['host']} failed: {fault['wrong']}"


# The start: torch itself tells only how many nodes came, and not which did not.


def wait_for_all() -> None:
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
