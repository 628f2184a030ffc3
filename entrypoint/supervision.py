"""What the agent adds to torchrun while workers run: signs of life, who is started again, who began together."""

import os
import socket
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch.distributed.elastic.agent.server import api
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.rendezvous import RendezvousConnectionError
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.utils import store as store_util

from muster.entrypoint.last_words import how_ended
from muster.entrypoint.network import within
from muster.errors import ExitCode

SILENT_S = 60
"""Seconds without a sign of life after which a worker is ended. It gives one every few (train/heartbeat.py)."""

LOOK_S = 1.0
TELL_S = 5.0
STORE_S = 30.0
LEAVE_LOOK_S = 0.02

LEFT = "muster/left"
"""The key under which agents count those that ask the store no more."""

LOST: set[int] = set()
"""Stores that are asked no more."""


class Beats:
    """Counts for how many looks in a row each file of beats has not changed.

    Looks and not seconds: a suspended job stops the agent too, and nobody is to blame for that time.
    """

    def __init__(self) -> None:
        self._seen: dict[Path, tuple[int, int]] = {}

    def look(self, files: Iterable[Path]) -> dict[Path, int]:
        """The number of looks since each of `files` changed; those that don't exist are left out."""
        seen: dict[Path, tuple[int, int]] = {}
        for file in files:
            try:
                changed = file.stat().st_mtime_ns
            except OSError:
                continue
            before, count = self._seen.get(file, (None, 0))
            seen[file] = (changed, count + 1 if changed == before else 0)
        self._seen = seen
        return {file: count for file, (_, count) in seen.items()}


class Supervision:
    """One node's workers, from the agent's side.

    Attributes:
        has_started: whether there were workers yet.
        ended: the workers that were ended by this agent, by process id, and why.
    """

    def __init__(self, silent_s: float = SILENT_S) -> None:
        self.has_started = False
        self._is_warned: Callable[[], bool] = lambda: False
        self.ended: dict[int, str] = {}
        self._limit = silent_s / LOOK_S
        self._beats = Beats()
        self._polls = 0
        self._num_nodes = 0

    def take_over(self, is_warned: Callable[[], bool]) -> None:
        """From now on torchrun's agents of this process ask this one too. It has no options for any of it.

        Args:
            is_warned: whether a scheduler has warned this node.
        """
        self._is_warned = is_warned
        torchs: Any = LocalElasticAgent  # of which these are private
        start, monitor, invoke = torchs._start_workers, torchs._monitor_workers, torchs._invoke_run
        barrier = torchs._exit_barrier

        def start_workers(agent: Any, group: Any) -> Any:
            self._before_start(group)
            return start(agent, group)

        def monitor_workers(agent: Any, group: Any) -> Any:
            self._end_silent(agent, group)
            result = monitor(agent, group)
            if result.failures:
                self._judge(agent, group.spec, result.failures)
            return result

        def invoke_run(agent: Any, *arguments: Any) -> Any:
            result = invoke(agent, *arguments)
            if result.is_failed():
                check_out(agent)
            return result

        def exit_barrier(agent: Any) -> None:
            barrier(agent)
            leave(agent)

        torchs._start_workers, torchs._monitor_workers, torchs._invoke_run = start_workers, monitor_workers, invoke_run
        torchs._exit_barrier = exit_barrier
        give_up_on_lost_stores()

    def _before_start(self, group: Any) -> None:
        self.has_started = True
        word = "" if group.spec.rdzv_handler.get_backend() == "static" else launch_word(group.store)
        # With the agent's process id: what a worker starts inherits the variable, and is no part of this launch.
        os.environ["MUSTER_LAUNCH"] = f"{word}.{os.getpid()}"
        before, self._num_nodes = self._num_nodes, group.group_world_size
        if group.group_rank == 0 and before not in (0, self._num_nodes):
            nodes = "1 node" if self._num_nodes == 1 else f"{self._num_nodes} nodes"
            tell(f"goes on with {nodes} instead of {before}")

    def _end_silent(self, agent: Any, group: Any) -> None:
        self._polls += 1
        if self._polls % max(1, round(LOOK_S / group.spec.monitor_interval)):
            return
        context = agent._pcontext
        # Of functions, which torchrun can run too, there are none.
        handlers: dict[int, Any] = getattr(context, "subprocess_handlers", {})
        running = {
            Path(f"{context.error_files[local_rank]}.beat"): local_rank
            for local_rank, handler in handlers.items()
            if handler.proc.poll() is None
        }
        for file, count in self._beats.look(running).items():
            if count < self._limit:
                continue
            local_rank = running[file]
            process = handlers[local_rank].proc
            if process.pid not in self.ended:
                rank, silent_s = group.workers[local_rank].global_rank, count * LOOK_S
                tell(f"rank {rank} on {socket.gethostname()} gave no sign of life for {silent_s:.0f} s: it is ended")
                self.ended[process.pid] = f"it gave no sign of life for {silent_s:.0f} s"
                process.kill()

    def _judge(self, agent: Any, spec: Any, failures: Mapping[int, Any]) -> None:
        """Restarts are for accidents: torchrun counts them down whatever the reason."""
        most = spec.max_restarts
        done = most - agent._remaining_restarts
        codes = {failure.exitcode for failure in failures.values()}
        if codes == {ExitCode.PREEMPTED} and not self._is_warned() and spec.rdzv_handler.num_nodes_waiting() > 0:
            # A node comes. Another agent was the first to see it, and to stop its workers, and all heard of that.
            agent._remaining_restarts += 1  # for this one, which doesn't count
            return
        if codes & {ExitCode.USER_MUST_CHANGE, ExitCode.PREEMPTED}:
            agent._remaining_restarts = 0
            return
        if not most:
            return
        rank, first = min(failures.items(), key=lambda item: item[1].timestamp)
        how = how_ended(first.exitcode)
        if agent._remaining_restarts:
            tell(f"rank {rank} on {socket.gethostname()} {how}: the ranks start again, restart {done + 1} of {most}")
        else:
            times = "1 restart" if done == 1 else f"{done} restarts"
            tell(f"rank {rank} on {socket.gethostname()} {how} after {times}, and --max-restarts={most} allows no more")


def launch_word(store: Any) -> str:
    """A word that the agents of a launch agree on by their `store`: it stays when they start their workers again."""
    # Each meeting has a prefix of its own in one store.
    store = getattr(store, "underlying_store", store)
    return store.compare_set("muster/launch", "", uuid.uuid4().hex).decode()


def give_up_on_lost_stores() -> None:
    """A store that does not answer counts as lost, and is asked no more.

    torch's client waits for ever where the store's host vanished: after its time-out, for the answer to its farewell.
    """
    torchs: Any = C10dRendezvousBackend
    call = torchs._call_store

    def call_store(backend: Any, *arguments: Any, **options: Any) -> Any:
        silent = RendezvousConnectionError("the store does not answer")
        if id(backend) in LOST:
            raise silent
        try:
            return within(STORE_S, lambda: call(backend, *arguments, **options))
        except TimeoutError:
            LOST.add(id(backend))
            raise silent from None
        except Exception:
            LOST.add(id(backend))
            raise

    torchs._call_store = call_store


def check_out(agent: Any) -> None:
    """Tells the nodes whose workers have ended well not to wait for this one, which has failed.

    They would for 5 minutes.
    """
    barrier: Any = store_util
    terms: Any = api

    def tell_all() -> None:
        size = agent._worker_group.group_world_size
        barrier._barrier_nonblocking(agent._store, size, terms._TERMINAL_STATE_SYNC_ID)
        agent._store.add(LEFT, 1)

    try_briefly(tell_all)


def leave(agent: Any) -> None:
    """Has the node with the store leave last: torch's barrier lets it go while others still ask whether they may.

    They would tell of a lost connection, with a traceback, after a run that went well.
    """
    group = agent._worker_group
    size, is_host = group.group_world_size, group.group_rank == 0

    def wait() -> None:
        end = time.monotonic() + TELL_S
        left = agent._store.add(LEFT, 1)
        while is_host and left < size and time.monotonic() < end:
            time.sleep(LEAVE_LOOK_S)
            left = agent._store.add(LEFT, 0)

    if size > 1:
        try_briefly(wait)


def try_briefly(ask: Callable[[], None]) -> None:
    """Asks a store that may be gone, and then answers nobody: for TELL_S at most, and whatever it has met."""

    with suppress(Exception):
        within(TELL_S, ask)


def tell(line: str) -> None:
    """Prints a line for the user."""
    print(f"muster: {line}", file=sys.stderr, flush=True)
