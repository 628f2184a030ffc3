"""A trainer process from its first line to its exit code."""

import json
import os
import traceback
import warnings
from dataclasses import dataclass, field, replace

import torch
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.elastic.multiprocessing.errors import record

from muster import interruption
from muster.arguments import to_argv
from muster.config import Options
from muster.errors import ExitCode, MusterError, code_for_job
from muster.paths import image
from muster.train.checkpoint import manager
from muster.train.distributed.backends import backend_for, compare_devices, compare_fabrics, open_group
from muster.train.distributed.world import HashStore, World, close_group, connect, device_for, read_environment
from muster.train.health import faults, memory, parent
from muster.train.health.heartbeat import SILENT_S, Heartbeat, report_lost_store
from muster.train.reporting import console
from muster.train.reporting.metrics import Stopwatch
from muster.train.trainer import Trainer
from muster.variables import LaunchVariable, RankReport

DEBUG = bool(os.environ.get("MUSTER_DEBUG"))

PER_HOST_OPTIONS = ("--data=", "--resume=", "--runs-dir=", "--train-num-workers=", "--valid-num-workers=")
"""Options that may differ between hosts: numbers of workers, which depend on the cores, and paths, as of local data."""


@dataclass
class Process:
    """A rank's process: its world, and the threads that watch the other ranks, as far as they have been started.

    Attributes:
        world: a world of this process alone, until it has connected to the other ranks.
    """

    world: World = field(default_factory=lambda: World(store=HashStore()))
    watch: faults.Watch | None = None
    heartbeat: Heartbeat | None = None

    def train(self, strategy: str, options: Options, guard: parent.Guard) -> None:
        """Runs the training; raises errors for the user as SystemExit, which torchrun does not show as a crash."""
        try:
            alone = read_environment(os.environ, options.timeout_s)
            self.world = replace(alone, store=PrefixStore("muster", connect(alone)))
            self.world = replace(self.world, hosts=tuple(self.world.gather(self.world.host)))
            self.watch = faults.Watch(self.world)
            self.heartbeat = Heartbeat(self.world, options.hang_s, options.silence_timeout or SILENT_S)
            guard.on_orphaned = self.heartbeat.end_orphaned
            self.world = meet(self.world, strategy, options)
            trainer = Trainer(strategy, options, self.world)
            trainer.build()
            trainer.fit()
        except MusterError as error:
            raise SystemExit(error.code) from error
        except Exception as error:
            if (explained := memory.explain(error, strategy, options, self.world)) is None:
                raise
            raise SystemExit(explained.code) from explained

    def answer(self, error: BaseException) -> int:
        """Reports `error` to the user and to the other ranks; returns the exit code."""
        trace = "".join(traceback.format_exception(error)).rstrip("\n")
        if not DEBUG and faults.is_echo(error):
            console.log_line(trace)
            if self.heartbeat is not None:
                self.heartbeat.wait_for_cause()  # gives the heartbeats time to find the rank that ended
            lost = "" if self.heartbeat is None else self.heartbeat.lost
            error = report_lost_store(self.world, lost) if lost else faults.connection_lost(error, self.world)
        if isinstance(error, MusterError):
            code, wrong = error.code, error.wrong
        else:
            code, wrong = ExitCode.FAILED, f"{type(error).__name__}: {error}"
            if isinstance(error, KeyboardInterrupt):
                code, wrong = ExitCode.INTERRUPTED, "it was interrupted"
        if not isinstance(error, faults.SharedFault):
            fault = faults.Fault(self.world.rank, self.world.host, code, wrong.partition("\n")[0])
            fault = faults.publish(self.world, fault, self.world.store)
            if (fault.rank != self.world.rank or self.world.status.end_reported) and not DEBUG:
                # That rank, or this one's heartbeat, has reported the error. Each other host, which may have a terminal
                # of its own, prints one line: more would bury the report.
                console.log_line(trace)
                faults.report_end(self.world, fault, is_shown=fault.host != self.world.host)
                return fault.code
        if isinstance(error, KeyboardInterrupt) and not DEBUG:
            console.log_line("interrupted")
        elif DEBUG or not isinstance(error, MusterError):
            console.notify(trace)
        elif not isinstance(error, faults.SharedFault) or self.world.main or console.has_terminal(self.world):
            console.notify(str(error))
        if isinstance(error, MusterError):
            console.report_to_agent(RankReport.ERROR_SHOWN)
        return code

    def leave(self, *, failed: bool) -> bool:
        """Ends this rank's part in the world, in an order in which the others learn that it leaves.

        Returns:
            whether all threads that use the store have ended.
        """
        manager.release()
        close_group()
        if self.heartbeat is not None:
            self.heartbeat.close(failed=failed)
        if self.watch is not None:
            self.watch.close()
        faults.leave(self.world, self.world.store, failed=failed, main=self.world.main)
        threads = [*(self.heartbeat.threads if self.heartbeat else ()), self.watch.thread if self.watch else None]
        return not any(thread.is_alive() for thread in threads if thread is not None)


def meet(world: World, strategy: str, options: Options) -> World:
    """Checks that the ranks fit together, and starts their process group; returns `world` with device and backend."""
    faults.agree(world, lambda: check_same_start(world, strategy, options))
    if options.preflight:
        from muster.check.doctor.run import preflight  # here and not above: most runs do without

        preflight(world, options.device, options.runs_dir)
    device = faults.agree(world, lambda: device_for(world, options.device, share_gpus=options.share_gpus))
    world = replace(world, device=device, waits=Stopwatch(device, is_counting=False))
    compare_devices(world, share_gpus=options.share_gpus)
    local_world_size = world.local_world_size or world.hosts.count(world.host)
    backend = faults.agree(world, lambda: backend_for(options.backend, device, strategy, share_gpus=options.share_gpus))
    if backend == "nccl" and options.cpu_offload:
        backend = "cpu:gloo,cuda:nccl"  # gloo adds up the norms of gradients in the host's memory
    has_group = world.world_size > 1 or options.single_rank_group
    world = replace(world, backend=backend if has_group else None, local_world_size=local_world_size)
    if "nccl" in (world.backend or ""):
        compare_fabrics(world)
    faults.agree(world, lambda: open_group(world, has_powersgd=options.comm_hook == "powersgd"))
    return world


def check_same_start(world: World, strategy: str, options: Options) -> None:
    """Refuses ranks that were started differently: another learning rate alone makes replicas diverge unnoticed.

    Raises:
        MusterError: the rank that came first has another image, another torch or other options than this one.
    """
    here = [f"image {image() or 'none'}", f"torch {torch.__version__.partition('+')[0]}", strategy]
    here += [word for word in to_argv(options) if not word.startswith(PER_HOST_OPTIONS)]
    there = json.loads(world.store.compare_set("options", "", json.dumps(here)))
    if here != there:
        others = " ".join(word for word in there if word not in here) or "the default"
        own = " ".join(word for word in here if word not in there) or "the default"
        raise MusterError(
            "the ranks were started with different options, or from different images",
            seen=f"elsewhere {others}, here {own}",
            fix="give all ranks the same ones; if these are different trainings, start each in a job of its own",
        )


def run_process(strategy: str, options: Options, guard: parent.Guard) -> None:
    """Trains on this rank; reports an error in three lines or as a traceback, and ends the process with its code."""
    if not DEBUG:
        warnings.filterwarnings("ignore", category=UserWarning, module=r"(torch(vision)?|PIL)\.")
        warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch(vision)?\.")
        warnings.filterwarnings("ignore", "Image size", module=r"PIL\.")  # for scans; PIL refuses twice as large ones
    process, code = Process(), 0
    with interruption.clearing_up():
        try:
            record(process.train)(strategy, options, guard)  # so that torchrun's summary names the error
        except BaseException as error:
            cause = error.__cause__ if isinstance(error, SystemExit) else None
            # Ctrl-C also ends processes that this rank waits for, which may raise other errors here.
            code = process.answer(KeyboardInterrupt() if interruption.current.has_come else cause or error)
            faults.end_soon(code, 4 * faults.GRACE_S)
        has_left = process.leave(failed=code != 0)
        if LaunchVariable.RANK_REPORTS not in os.environ:  # without an agent, which does this otherwise
            code = code_for_job(code, prints=process.world.main)
        console.close(code)
    if code or not has_left:
        # The destructors of a broken group can abort the process, which then ends by a signal and not with the code. So
        # can a thread that returns from the store into an interpreter that has ended.
        os._exit(code)
    interruption.finish()
