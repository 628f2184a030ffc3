"""torchrun's agent with what it lacks: only accidents are started again, and the nodes of a launch part in order."""

import argparse
import ctypes
import functools
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.elastic.agent.server import api
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler
from torch.distributed.elastic.rendezvous import (
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.utils import store as store_util

from muster import interruption
from muster.entrypoint.agent.nodes import Nodes, can_tell_others, first_of, how_ended, is_ours
from muster.entrypoint.rendezvous.network import within
from muster.errors import ExitCode
from muster.variables import LaunchVariable

TELL_S = 5.0
STORE_S = 30.0
LEAVE_LOOK_S = 0.02
PR_SET_PDEATHSIG = 1
GROUP_S = 3.0
"""Seconds from SIGTERM to SIGKILL for what a worker leaves running."""

LOOPBACK, LOOPBACK_ADDRESS = "loopback", "127.0.0.1"

AGENTS = "agent"
"""What the agent's own keys begin with in such a store."""

LEFT = "muster/left"
"""The key under which agents count those that ask the store no more."""

BRIEF_S = 30.0
"""Programs that end sooner train nothing: they show hosts, or devices."""

LOST: set[int] = set()
"""Stores that are asked no more."""


@dataclass
class Status:
    """What the parts of this process know of the launch.

    Attributes:
        warning: the name of the signal by which a scheduler has warned this node; empty until there is one.
        has_started: whether there were workers yet.
        ended: the workers that were ended by this agent, by process id, and why.
        stopped: the process ids of the workers that were alive when torchrun began to stop them for another's failure.
        elsewhere: the failure on another node that came before this node's, in words; empty if there is none.
    """

    warning: str = ""
    has_started: bool = False
    ended: dict[int, str] = field(default_factory=dict[int, str])
    stopped: set[int] = field(default_factory=set[int])
    elsewhere: str = ""


class Agent(LocalElasticAgent):
    """torchrun's agent of one node, which speaks with those of the other nodes."""

    def __init__(self, status: Status, **options: Any) -> None:
        super().__init__(**options)
        self._status = status
        self._num_nodes = 0
        self._nodes: Nodes | None = None
        self._start = 0.0

    def _start_workers(self, worker_group: Any) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
        torchs: Any = super()  # by which this one is not typed
        self._before_start(worker_group)
        # Trainers of ours hear Ctrl-C when they have their answer to it.
        with interruption.held() if is_ours() else nullcontext():
            started = torchs._start_workers(worker_group)
        if self._nodes is None and can_tell_others(worker_group):
            self._nodes = Nodes(self, worker_group, self._status.ended)
        # torchrun closes the workers' context when one has failed: who is alive at that moment can't be the cause.
        context: Any = self._pcontext
        close = context.close

        def close_and_note(*arguments: Any, **options: Any) -> None:
            self._before_stop(worker_group)
            close(*arguments, **options)

        context.close = close_and_note
        return started

    def _monitor_workers(self, worker_group: Any) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
        torchs: Any = super()
        result = torchs._monitor_workers(worker_group)
        for rank, failure in list(result.failures.items()):
            # A trainer that was stopped may still end with a code that says more than the one that failed.
            if failure.pid in self._status.stopped and (failure.exitcode < 0 or not is_ours()):
                del result.failures[rank]
        if result.failures:
            self._judge(worker_group.spec, result.failures)
        return result

    def _invoke_run(self, role: str = api.DEFAULT_ROLE) -> Any:
        result = super()._invoke_run(role)
        if result.is_failed():
            check_out(self)
        if result.failures and self._nodes and is_ours():
            self._nodes.publish_failures(result.failures)
        if result.failures and self._nodes:
            self._nodes.wait_for_others()
        return result

    def _exit_barrier(self) -> None:
        super()._exit_barrier()
        if time.monotonic() - self._start > BRIEF_S and not is_ours():
            try_briefly(lambda: tell_if_apart(self._worker_group))
        leave(self)

    def _shutdown(self, *arguments: Any, **options: Any) -> None:
        context: Any = self._pcontext
        super()._shutdown(*arguments, **options)
        if context and self._worker_group.state != api.WorkerState.SUCCEEDED:
            end_groups(context.pids().values())

    def _before_stop(self, group: Any) -> None:
        """Notes who is alive, and tells other nodes of a failure at once: theirs that follow come later."""
        context: Any = self._pcontext
        handlers = context.subprocess_handlers.values()
        self._status.stopped |= {handler.proc.pid for handler in handlers if handler.proc.poll() is None}
        failures = {group.workers[local].global_rank: failure for local, failure in context._failures.items()}
        # Trainers of ours tell each other; and a scheduler's warning reaches all nodes.
        if failures and self._nodes and not is_ours() and not self._status.warning:
            self._status.elsewhere = self._nodes.publish_failures(failures)

    def _before_start(self, group: Any) -> None:
        self._status.has_started = True
        self._start = time.monotonic()
        handler = group.spec.rdzv_handler
        if isinstance(handler, Loopback):
            word = handler.launch
        else:
            word = "" if handler.get_backend() == "static" else launch_word(group.store)
        # With the agent's process id: what a worker starts inherits the variable, and is no part of this launch.
        os.environ[LaunchVariable.LAUNCH] = f"{word}.{os.getpid()}"
        before, self._num_nodes = self._num_nodes, group.group_world_size
        if group.group_rank == 0 and before not in (0, self._num_nodes):
            nodes = "1 node" if self._num_nodes == 1 else f"{self._num_nodes} nodes"
            tell(f"goes on with {nodes} instead of {before}")

    def _judge(self, spec: Any, failures: Mapping[int, Any]) -> None:
        """Restarts are for accidents: torchrun counts them down whatever the reason."""
        most = spec.max_restarts
        codes = {failure.exitcode for failure in failures.values()}
        if codes == {ExitCode.PREEMPTED} and not self._status.warning and spec.rdzv_handler.num_nodes_waiting() > 0:
            # A node comes. Another agent was the first to see it, and to stop its workers, and all heard of that.
            self._remaining_restarts += 1  # for this one, which doesn't count
            return
        if is_ours() and codes & {ExitCode.USER_MUST_CHANGE, ExitCode.PREEMPTED}:
            self._remaining_restarts = 0
            return
        if not most:
            return
        rank = first_of(failures)
        ended = f"rank {rank} on {socket.gethostname()} {how_ended(failures[rank].exitcode)}"
        if self._remaining_restarts:
            number = most - self._remaining_restarts + 1
            tell(f"{ended}: the ranks start again, restart {number} of {most}")
        else:
            tell(f"{ended}, and --max-restarts={most} allows no more restarts")


class Loopback(RendezvousHandler):
    """The rendezvous of one node: each time a new store, which listens on 127.0.0.1 alone.

    torch's own listen on all interfaces, and whoever reaches a store can have its processes run code.

    Args:
        parameters: of torchrun; the endpoint's port is that of the first store, 0 takes a free one.

    Attributes:
        launch: a word that names this launch, and stays when its ranks are started again.

    Source: https://github.com/pytorch/pytorch/security/policy (using distributed features)
    """

    def __init__(self, parameters: RendezvousParameters) -> None:
        self.launch = uuid.uuid4().hex
        self._id = parameters.run_id
        self._port = int(parameters.endpoint.rpartition(":")[2])
        self._is_closed = False

    def next_rendezvous(self) -> RendezvousInfo:
        """A store for this agent and its ranks.

        Raises:
            OSError: the port is taken.
        """
        listener = socket.create_server((LOOPBACK_ADDRESS, self._port))
        port = int(listener.getsockname()[1])
        self._port = 0  # for ranks that are started again: the store before this one may still listen
        torchs: Any = dist.TCPStore  # pyright: ignore[reportPrivateImportUsage]
        server = torchs(LOOPBACK_ADDRESS, port, is_master=True, multi_tenant=True, master_listen_fd=listener.detach())
        return RendezvousInfo(PrefixStore(AGENTS, server), 0, 1, RendezvousStoreInfo(LOOPBACK_ADDRESS, port))

    @property
    def use_agent_store(self) -> bool:
        """True: the ranks are clients of this store."""
        return True

    def get_backend(self) -> str:
        """The name by which torchrun knows this."""
        return LOOPBACK

    def get_run_id(self) -> str:
        """The launch's id, as torchrun was given it."""
        return self._id

    def is_closed(self) -> bool:
        """Whether the launch has ended."""
        return self._is_closed

    def set_closed(self) -> None:
        """Ends the launch: nobody else takes part in it."""
        self._is_closed = True

    def num_nodes_waiting(self) -> int:
        """0: there are no other nodes."""
        return 0

    def shutdown(self) -> bool:
        """True: nothing is left open."""
        return True


def meet_on_loopback(arguments: argparse.Namespace) -> None:
    """Has torchrun take `Loopback` where its `arguments` are those of one node."""
    if not arguments.standalone and (arguments.nnodes not in ("1", "1:1") or arguments.rdzv_backend != "static"):
        return
    port = 0 if arguments.standalone else arguments.master_port
    arguments.standalone = False
    arguments.rdzv_backend, arguments.rdzv_endpoint = LOOPBACK, f"{LOOPBACK_ADDRESS}:{port}"
    rendezvous_handler_registry.register(LOOPBACK, Loopback)


def end_groups(leaders: Iterable[int]) -> None:
    """Ends what the workers `leaders` have started and left: each leads a process group."""
    left = set(leaders)
    for number, limit_s in ((signal.SIGTERM, GROUP_S), (signal.SIGKILL, 0.0)):
        for leader in list(left):
            try:
                os.killpg(leader, number)
            except ProcessLookupError:
                left.discard(leader)
        end = time.monotonic() + limit_s
        while left and time.monotonic() < end:
            left = {leader for leader in left if has_members(leader)}
            time.sleep(LEAVE_LOOK_S)


def has_members(group: int) -> bool:
    """Whether a process of this process group is there."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def tie_workers_to_agent() -> None:
    """The kernel ends the workers with this process, however that ends: other programs than ours don't look for it.

    Source: https://man7.org/linux/man-pages/man2/PR_SET_PDEATHSIG.2const.html
    """
    prctl, agent = ctypes.CDLL(None).prctl, os.getpid()

    def before_exec() -> None:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != agent:  # it ended before that
            os._exit(ExitCode.FAILED)

    torchs: Any = subprocess_handler
    torchs.Popen = functools.partial(subprocess.Popen, preexec_fn=before_exec)


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


def tell_if_apart(group: Any) -> None:
    """Says, where this agent has the store of the ranks, that none of the `group`'s world has used it.

    With a store of their own (TORCH_DISABLE_SHARE_RDZV_TCP_STORE, torchrun.py) nobody knows.
    """
    handler, world_size = group.spec.rdzv_handler, group.workers[0].world_size
    prefix = {LOOPBACK: AGENTS, "static": handler.get_run_id()}.get(handler.get_backend())
    if prefix is None or group.group_rank or world_size == 1:
        return
    keys = group.store.underlying_store.list_keys()
    if all(key.startswith((f"{prefix}/", "muster/")) for key in keys):
        tell(
            f"none of the {world_size} ranks opened a process group: each has run the whole script by itself, and a "
            "file that it writes was written by all. To train together: torch.distributed.init_process_group() and "
            "DistributedDataParallel; to run once: --nproc-per-node 1"
        )


def try_briefly(ask: Callable[[], None]) -> None:
    """Asks a store that may be gone, and then answers nobody: for TELL_S at most, and whatever it has met."""

    with suppress(Exception):
        within(TELL_S, ask)


def tell(line: str) -> None:
    """Prints a line for the user."""
    print(f"muster: {line}", file=sys.stderr, flush=True)
