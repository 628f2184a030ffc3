"""An extension of torchrun's agent: it restarts ranks only after accidents, and ends the nodes of a launch in order.

`Agent` is a subclass of torch's agent and overrides its hooks; nothing in torch is replaced.
"""

import argparse
import os
import runpy
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, fields
from multiprocessing import resource_tracker
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.elastic import events
from torch.distributed.elastic.agent.server import api
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.events.handlers import get_logging_handler
from torch.distributed.elastic.multiprocessing.api import MultiprocessContext, SignalException
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.utils import store as store_util
from torch.distributed.run import config_from_args  # pyright: ignore[reportUnknownVariableType]

from muster import interruption
from muster.entrypoint.agent import nodes, rendezvous
from muster.entrypoint.agent.failures import cause_of, first_of, is_ours, is_training, not_started
from muster.entrypoint.rendezvous.network import call_within
from muster.errors import ExitCode, MusterError, notify
from muster.processes import how_ended
from muster.units import plural
from muster.variables import LaunchVariable

BRIEFLY_S = 5.0
LEAVE_POLL_S = 0.02
BARRIER_POLL_S = 0.5
FOR_EVER_S = 365 * 86400.0
GROUP_S = 3.0
"""Seconds from SIGTERM to SIGKILL for processes that a worker leaves running."""

LEFT = "muster/left"
"""The store's key for the number of agents that no longer use the store."""

BRIEF_S = 30.0
"""Seconds: a program that ends sooner does not train, but shows hosts or devices, for example."""

STARTER = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, 9)  # PR_SET_PDEATHSIG, SIGKILL
if os.getppid() != int(sys.argv[1]):  # the agent ended before that
    os._exit(1)
if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
try:
    os.execvp(sys.argv[2], sys.argv[2:])
except OSError as reason:
    fix = "give the path of an executable file"
    sys.exit(f"error: the program can't be started: {reason.strerror}\\n seen: {sys.argv[2]!r}\\n  fix: {fix}")
"""
"""A Python program that starts a worker which the kernel kills when its agent ends, in whatever way.

The agent starts it with SIGINT blocked: a Ctrl-C while Python starts takes effect here, without a traceback.

Source: https://man7.org/linux/man-pages/man2/PR_SET_PDEATHSIG.2const.html
"""


@dataclass
class Status:
    """The state of this node's launch, which the parts of this process share.

    Attributes:
        warning: the name of the signal by which a scheduler has warned this node; empty until there is one.
        workers: the process ids of the workers that were started last; empty before the first.
        is_starting: whether workers are being started: an exception then would leave some running, unknown to torchrun.
        held_end: the name of a signal that came meanwhile, and ends the workers once they have started; else empty.
        ended: the reasons for which this agent ended workers, by process id.
        stopped: the process ids of the workers that were alive when torchrun began to stop them for another's failure.
        elsewhere: the failure on another node that came before this node's, in words; empty if there is none.
    """

    warning: str = ""
    workers: set[int] = field(default_factory=set[int])
    is_starting: bool = False
    held_end: str = ""
    ended: dict[int, str] = field(default_factory=dict[int, str])
    stopped: set[int] = field(default_factory=set[int])
    elsewhere: str = ""

    def end_workers(self, name: str) -> None:
        """Has torchrun end the workers, and this node, for the signal `name`: at once, or when all have started.

        Raises:
            SignalException: no workers are being started.
        """
        if self.is_starting:
            self.held_end = name
        else:
            raise SignalException(f"this process got {name}", sigval=signal.Signals[name])

    def explains(self, failures: Mapping[int, ProcessFailure]) -> bool:
        """Whether the signal `warning` ended the workers, before they could handle it; for Ctrl-C always true."""
        name = self.warning
        return name == "SIGINT" or (name != "" and all(each.signal_name() == name for each in failures.values()))


def run(arguments: argparse.Namespace, status: Status) -> dict[int, ProcessFailure]:
    """Runs this node's workers by torchrun's `arguments` to their end, and fills `status` meanwhile.

    Returns:
        the failures by rank; empty if there were none.

    Raises:
        MusterError: torchrun does not take an option's value.
        SignalException: this process got a signal to end.
        Exception: the nodes did not meet, or have lost each other.

    Source: torch.distributed.launcher.api.launch_agent, which can't run another class of agent
    """
    try:
        found: Any = config_from_args(arguments)  # pyright: ignore[reportUnknownVariableType]
        get_logging_handler(found[0].event_log_handler)
    except OSError as error:
        raise not_started(error) from None
    except (KeyError, ValueError) as error:
        seen = f"{type(error).__name__}: {error}"
        raise MusterError(
            "torchrun does not take the value of one of its options", seen=seen, fix="muster run --help-all shows them"
        ) from None
    config, program, words = found
    if arguments.run_path:
        resource_tracker.ensure_running()  # its start unblocks signals: later these have to stay blocked
        program, words = run_in_place, [arguments.module, arguments.training_script, *arguments.training_script_args]
    elif not is_ours():
        # Programs that are not ours don't notice the death of their agent.
        words = ["-I", "-S", "-c", STARTER, str(os.getpid()), program, *words]
        program = sys.executable
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = config.signals_to_handle
    # Fields that only some versions of torch have are passed on by name.
    given = {each.name for each in fields(config)}
    known = {each.name for each in fields(api.WorkerSpec)} & given
    spec = api.WorkerSpec(
        local_world_size=config.nproc_per_node,
        entrypoint=program,
        args=tuple(words),
        rdzv_handler=rendezvous.handler_of(config),
        **{name: getattr(config, name) for name in known},
    )
    agent: Any = Agent(
        status,
        spec=spec,
        logs_specs=config.logs_specs,
        start_method=config.start_method,
        log_line_prefix_template=config.log_line_prefix_template,
        **{name: getattr(config, name) for name in {"shutdown_timeout"} & given},
    )
    try:
        result = agent.run()
    except Exception as error:
        events.record(agent.get_event_failed(), config.event_log_handler)
        # An elastic launch goes on without a node that got a signal to end.
        if not isinstance(error, SignalException):
            spec.rdzv_handler.shutdown()
        raise
    events.record(agent.get_event_succeeded(), config.event_log_handler)
    spec.rdzv_handler.shutdown()
    return result.failures if result.is_failed() else {}


def run_in_place(is_module: bool, program: str, *words: str) -> None:
    """Runs a module or a script in this process, which multiprocessing has started."""
    # A terminal's Ctrl-C is for the agent, which passes it on: a second one would end a rank before it clears up.
    os.setpgid(0, 0)
    sys.argv = [program, *words]
    try:
        if is_module:
            if "PYTHONSAFEPATH" not in os.environ:
                sys.path.insert(0, os.getcwd())
            runpy.run_module(program, run_name="__main__", alter_sys=True)
        else:
            sys.path.insert(0, os.path.dirname(os.path.abspath(program)))
            runpy.run_path(program, run_name="__main__")
    except Exception:
        # torch would hand it to the agent, which reports how a rank has ended and not why.
        traceback.print_exc()
        sys.exit(ExitCode.FAILED)


class Agent(LocalElasticAgent):
    """torchrun's agent of one node, which exchanges failures with those of the other nodes."""

    def __init__(self, status: Status, **options: Any) -> None:
        super().__init__(**options)
        self._status = status
        self._num_nodes = 0
        self._launch = ""
        self._nodes: nodes.Nodes | None = None
        self._start = 0.0
        self._ended: set[int] = set()

    @property
    def _is_by_multiprocessing(self) -> bool:
        return isinstance(self._pcontext, MultiprocessContext)

    def processes(self) -> dict[int, tuple[int, int | None]]:
        """Process id and exit code of each worker, by local rank; the code is None while it runs."""
        context: Any = self._pcontext
        if self._is_by_multiprocessing:
            return {local: (each.pid, each.exitcode) for local, each in enumerate(context._pc.processes)}
        handlers: dict[int, Any] = getattr(context, "subprocess_handlers", {})
        return {local: (handler.proc.pid, handler.proc.poll()) for local, handler in handlers.items()}

    def _start_workers(self, worker_group: Any) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
        torchs: Any = super()  # torch's methods are not fully typed
        self._before_start(worker_group)
        # Ctrl-C reaches our own programs once they have a handler for it, other programs when STARTER starts them.
        is_held = is_ours() or worker_group.spec.entrypoint is not run_in_place
        with interruption.held() if is_held else nullcontext():
            self._status.is_starting = True
            try:
                started = torchs._start_workers(worker_group)
            except (OSError, RuntimeError) as error:
                raise not_started(error) from None
            finally:
                self._status.is_starting = False
        self._status.workers = {pid for pid, _ in self.processes().values()}
        if self._status.held_end:
            self._status.end_workers(self._status.held_end)
        if worker_group.group_world_size > 1:
            is_fixed = isinstance(worker_group.spec.rdzv_handler, rendezvous.StaticNodes)
            self._nodes = nodes.Nodes(self, worker_group, self._status.ended, is_fixed)
        self._ended = set()
        return started

    def _rendezvous(self, worker_group: Any) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        torchs: Any = super()
        if self._nodes:
            self._nodes.leave()
            self._nodes = None
        while True:
            try:
                return torchs._rendezvous(worker_group)
            except dist.DistStoreError as error:
                # A node has come, and ended before all knew their ranks. It costs a restart, if one is left.
                if isinstance(worker_group.spec.rdzv_handler, rendezvous.StaticNodes) or not self._remaining_restarts:
                    raise
                self._remaining_restarts -= 1
                notify(f"muster: a node joined and then ended: the others meet again ({str(error).splitlines()[0]})")

    def _assign_worker_ranks(self, *place: Any) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
        torchs: Any = super()
        # In another thread: while torch waits for other nodes by the store, this thread could not handle signals.
        return call_within(FOR_EVER_S, lambda: torchs._assign_worker_ranks(*place))

    def _monitor_workers(self, worker_group: Any) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
        torchs: Any = super()
        if not self._note_ends(worker_group):
            return api.RunResult(state=api.WorkerState.HEALTHY)
        if self._is_by_multiprocessing:
            context: Any = self._pcontext
            # torch waits for each worker's return value, and a worker that ends by os._exit returns none.
            context._return_values.update({local: None for local, (_, code) in self.processes().items() if code == 0})
        result = torchs._monitor_workers(worker_group)
        for rank, failure in list(result.failures.items()):
            # A stopped trainer that ends with a code of its own stays: the code may say more than the first failure's.
            if failure.pid in self._status.stopped and (failure.exitcode < 0 or not is_ours()):
                del result.failures[rank]
        if result.failures:
            self._check_restart(worker_group.spec, result.failures)
        return result

    def _invoke_run(self, role: str = api.DEFAULT_ROLE) -> Any:
        result = super()._invoke_run(role)
        if result.is_failed():
            leave(self, has_failed=True)
        if result.failures and self._nodes and is_ours():
            self._nodes.publish_failures(result.failures)
        if result.failures and self._nodes:
            self._nodes.wait_for_others()
        return result

    def _exit_barrier(self) -> None:
        torchs: Any = super()
        if self._nodes is None:
            torchs._exit_barrier()
        else:
            # torch's barrier gives up after 5 minutes. Then the store would end with this node, or its heartbeat would
            # be missed, and the ranks that still work on other nodes would be ended.
            self._exit_barrier_timeout = FOR_EVER_S
            barrier = threading.Thread(target=torchs._exit_barrier, daemon=True)
            barrier.start()
            while barrier.is_alive() and not self._nodes.reason and not self._nodes.others_left:
                barrier.join(BARRIER_POLL_S)
            self._nodes.wait_for_others()
        if time.monotonic() - self._start > BRIEF_S and not is_ours():
            try_briefly(lambda: warn_if_no_group(self._worker_group))
        leave(self)

    def _shutdown(self, *arguments: Any, **options: Any) -> None:
        context: Any = self._pcontext
        super()._shutdown(*arguments, **options)
        if context and self._worker_group.state != api.WorkerState.SUCCEEDED:
            end_groups(context.pids().values())

    def _note_ends(self, group: Any) -> bool:
        """Notes which workers have ended, and publishes a failure; returns whether torch has to check them.

        torchrun stops the others as soon as it sees a failure. So the workers alive are noted before it looks: they
        can't be the cause. The failure is published to the other nodes at once, before failures that it causes there.
        """
        context: Any = self._pcontext
        found = self.processes()
        ended = {local for local, (_, code) in found.items() if code is not None}
        # Workers of multiprocessing end only after torch has asked each of them for its return value.
        if ended <= self._ended and not self._is_by_multiprocessing:
            return False
        self._ended = ended
        failures = {
            group.workers[local].global_rank: ProcessFailure(
                local_rank=local, pid=pid, exitcode=code, error_file=context.error_files[local]
            )
            for local, (pid, code) in found.items()
            if code
        }
        if failures:
            self._status.stopped |= {pid for pid, code in found.values() if code is None}
        rank = cause_of(failures)
        if rank is None or self._status.warning:  # a warning reaches all nodes
            return True
        if not is_ours() and self._nodes:
            self._status.elsewhere = self._nodes.publish_failures(failures)
        is_fixed = isinstance(group.spec.rdzv_handler, rendezvous.StaticNodes)
        if is_training() and is_fixed and failures[rank].exitcode < 0:
            # A killed trainer publishes nothing: without this, the others would end only when they miss its heartbeat.
            store, host = PrefixStore("muster", group.store.underlying_store), socket.gethostname()
            wrong = f"it {how_ended(failures[rank].exitcode)}"
            with suppress(TimeoutError, RuntimeError):  # the store is gone
                call_within(BRIEFLY_S, lambda: nodes.publish(store, group, rank, host, ExitCode.FAILED, wrong))
        return True

    def _before_start(self, group: Any) -> None:
        self._start = time.monotonic()
        if not self._launch:
            # With the agent's process id: programs that a worker starts inherit the variable, but are no ranks.
            self._launch = f"{rendezvous.launch_id(group.spec.rdzv_handler, group.store)}.{os.getpid()}"
        os.environ[LaunchVariable.LAUNCH] = self._launch
        before, self._num_nodes = self._num_nodes, group.group_world_size
        if group.group_rank == 0 and before not in (0, self._num_nodes):
            notify(f"muster: goes on with {plural(self._num_nodes, 'node')} instead of {before}")

    def _check_restart(self, spec: Any, failures: Mapping[int, Any]) -> None:
        """Sets `_remaining_restarts` so that only accidents restart the ranks: torchrun does so after any failure."""
        most = spec.max_restarts
        codes = {failure.exitcode for failure in failures.values()}
        if codes == {ExitCode.PREEMPTED} and not self._status.warning and spec.rdzv_handler.num_nodes_waiting() > 0:
            # A node joins: another agent saw it first, and stopped its workers, which stopped those of all nodes.
            self._remaining_restarts += 1  # this restart doesn't count
            return
        if is_ours() and codes & {ExitCode.USER_MUST_CHANGE, ExitCode.PREEMPTED}:
            self._remaining_restarts = 0
            return
        if not most:
            return
        if self._status.explains(failures):
            # As if the signal had come before the workers were started. Other nodes go on without this one.
            self._status.end_workers(self._status.warning)
        if self._status.warning == "SIGTERM":
            self._remaining_restarts = 0
            return
        rank = first_of(failures)
        first = failures[rank]
        reason = self._status.ended.get(first.pid)
        how = f"was ended ({reason})" if reason else how_ended(first.exitcode)
        ended = f"rank {rank} on {socket.gethostname()} {how}"
        if self._remaining_restarts:
            notify(f"muster: {ended}: the ranks start again, restart {most - self._remaining_restarts + 1} of {most}")
        else:
            notify(f"muster: {ended}, and --max-restarts={most} allows no more restarts")


def end_groups(leaders: Iterable[int]) -> None:
    """Ends the processes that the workers `leaders` have started and left: each worker leads a process group."""
    left = [leader for leader in leaders if signal_group(leader, signal.SIGTERM)]
    end = time.monotonic() + GROUP_S
    while left and time.monotonic() < end:
        time.sleep(LEAVE_POLL_S)
        left = [leader for leader in left if signal_group(leader, 0)]
    for leader in left:
        signal_group(leader, signal.SIGKILL)


def signal_group(group: int, number: int) -> bool:
    """Sends the signal `number` (0: none) to a process group; returns whether the group has a process."""
    with suppress(ProcessLookupError):
        os.killpg(group, number)
        return True
    return False


def leave(agent: Any, *, has_failed: bool = False) -> None:
    """Leaves the launch, the node with the store as the last one: others may still use the store at torch's barrier.

    They would report a lost connection, with a traceback, after a run that went well. A failed node is counted at the
    barrier without waiting there: else the nodes whose workers have ended well would wait for it.
    """
    group = agent._worker_group
    size, is_last = group.group_world_size, group.group_rank == 0 and not has_failed

    def sign_off() -> None:
        if has_failed:
            barrier: Any = store_util
            terms: Any = api
            barrier._barrier_nonblocking(agent._store, size, terms._TERMINAL_STATE_SYNC_ID)
        end = time.monotonic() + BRIEFLY_S
        left = agent._store.add(LEFT, 1)
        while is_last and left < size and time.monotonic() < end:
            time.sleep(LEAVE_POLL_S)
            left = agent._store.add(LEFT, 0)

    if size > 1:
        try_briefly(sign_off)


def warn_if_no_group(group: Any) -> None:
    """Warns if no rank of the `group`'s world has used the store; only the agent that has the ranks' store can see it.

    No agent has it where the ranks have a store of their own (TORCH_DISABLE_SHARE_RDZV_TCP_STORE, torchrun.py).
    """
    handler, world_size = group.spec.rdzv_handler, group.workers[0].world_size
    if not isinstance(handler, rendezvous.StaticNodes) or group.group_rank or world_size == 1:
        return
    keys = group.store.underlying_store.list_keys()
    if all(key.startswith((f"{handler.get_run_id()}/", "muster/")) for key in keys):  # the agents' own
        notify(
            f"muster: none of the {world_size} ranks opened a process group: each has run the whole script by itself, "
            "and a file that it writes was written by all. To train together: torch.distributed.init_process_group() "
            "and DistributedDataParallel; to run once: --nproc-per-node 1"
        )


def try_briefly(ask: Callable[[], None]) -> None:
    """Calls `ask`, which uses a store that may be gone, for BRIEFLY_S seconds at most; ignores its errors."""
    with suppress(Exception):
        call_within(BRIEFLY_S, ask)
