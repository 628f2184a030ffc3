"""A rank's heartbeat: every few seconds it sends its progress, and reads that of other ranks.

Rank 0 reads the beats of all ranks, the others read that of rank 0. So a rank that is dead or hangs is named and ends
the run; the collective in which the others wait would not notice it.
"""

import faulthandler
import json
import math
import os
import pickle
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch._C._distributed_c10d as c10d
import torch.distributed as dist

from muster import interruption
from muster.errors import ExitCode, MusterError
from muster.train.distributed.world import LEFT, World
from muster.train.health import faults
from muster.train.health.parent import GONE
from muster.train.reporting import console
from muster.units import listed

BEAT_S = 3.0
"""Seconds between two beats."""

GONE_S = 45
"""Seconds without an answer of the store after which it counts as gone; DUMP_S is added, as a dump delays beats too."""

SILENT_S = 300
"""Default seconds without a beat after which a rank counts as dead; others report the end of its process sooner.
While storage fails over, for minutes, a read of a memory-mapped file can block a process that holds Python's lock."""

BEATS_AFTER_LOSS = 3
"""Missing beats after which a rank counts as dead where some rank has lost a connection."""

PATIENT = 5
"""The factor by which a rank may stand still longer at set-up, while it compiles, at a checkpoint and at the end.

Kernels are compiled there, and files of any size read and written, without progress that could be counted.
"""

DUMP_S = 15.0
"""Seconds in which a rank has to write its stacks when it is asked for them."""

STORE_S = 10.0
"""Time-out of a request to the store, in seconds."""

FLIGHT = "flight"
"""The folder of the flight recorder's files, one for all hosts, as `torchfrtrace FOLDER` reads a single folder."""

OURS = f"{os.sep}train{os.sep}"


class Beat(NamedTuple):
    """One heartbeat of a rank.

    Attributes:
        requests_dump: set by rank 0: whether all ranks are to write their stacks.
    """

    number: int
    ticks: int
    step: int
    phase: str
    is_patient: bool
    lost_peer: bool
    requests_dump: bool
    host: str

    @classmethod
    def read(cls, text: bytes) -> "Beat | None":
        """Decodes a beat as the store has it, in JSON; None where the rank has not sent one yet."""
        return cls(*json.loads(text)) if text else None


@dataclass
class Monitor:
    """The `last` beat of each rank, and for how many turns it has been `silent` (no beat) or `still` (no progress).

    Time is counted in turns of reading the beats, so a job that is suspended as a whole misses none.
    """

    last: dict[int, Beat] = field(default_factory=dict)
    silent: dict[int, int] = field(default_factory=dict)
    still: dict[int, int] = field(default_factory=dict)

    def update(self, beats: Mapping[int, Beat | None]) -> None:
        """Adds the beats of a turn, by rank; None for a rank that has not sent one yet."""
        for rank, beat in beats.items():
            if beat is None:
                continue
            last = self.last.get(rank)
            self.silent[rank] = 0 if last is None or beat.number != last.number else self.silent[rank] + 1
            has_moved = last is None or (beat.ticks, beat.phase) != (last.ticks, last.phase)
            self.still[rank] = 0 if has_moved else self.still[rank] + 1
            self.last[rank] = beat

    @property
    def present(self) -> list[int]:
        """The ranks that have sent a beat and have not left."""
        return [rank for rank, beat in self.last.items() if beat.phase != LEFT]

    def dead(self, turns: int) -> list[int]:
        """The ranks without a new beat for `turns` turns; where there is one, also those one turn short of that."""
        if not any(self.silent[rank] >= turns for rank in self.present):
            return []
        return sorted(rank for rank in self.present if self.silent[rank] >= max(1, turns - 1))

    def is_hung(self, turns: float) -> bool:
        """Whether a rank has stood still for `turns` turns, or PATIENT times as many while any rank is patient."""
        # A rank that has lost a connection waits for the cause (`wait_for_cause`), and then ends.
        limit = turns * (PATIENT if any(self.last[rank].is_patient for rank in self.present) else 1)
        return any(self.still[rank] >= limit for rank in self.present if not self.last[rank].lost_peer)

    def lagging(self, collectives: Mapping[int, Sequence[int]]) -> list[int]:
        """The ranks that are behind all others: by their ticks, then by their collectives.

        Args:
            collectives: how many each rank has enqueued, started and completed, where that is known.
        """
        fewest = min(self.last[rank].ticks for rank in self.present)
        behind = [rank for rank in self.present if self.last[rank].ticks == fewest]
        if len(behind) > 1 and all(rank in collectives for rank in behind):
            # Where a kernel hangs on a GPU, its process too has enqueued all collectives after it.
            least = min(list(collectives[rank]) for rank in behind)
            behind = [rank for rank in behind if list(collectives[rank]) == least]
        return sorted(behind)


def describe_ranks(ranks: list[int], beats: Mapping[int, Beat]) -> str:
    """`ranks` with their hosts, in words: "ranks 8, 9 on node02"."""
    hosts = listed((beats[rank].host for rank in ranks), 3)
    return f"rank{'s' if len(ranks) > 1 else ''} {listed(ranks, 8)} on {hosts}"


def report_dead(monitor: Monitor, ranks: list[int], world: World) -> tuple[MusterError, faults.Fault]:
    """The error and the fault for `ranks`, from which no beat reaches the rank of `world` any more."""
    first = max(ranks, key=lambda rank: monitor.silent[rank])
    last = monitor.last[first]
    silent_s = monitor.silent[first] * BEAT_S
    wrong = f"gave no sign of life for {silent_s:.0f} s: the process was stopped or killed, or its host is gone"
    error = MusterError(
        f"{describe_ranks(ranks, monitor.last)} {wrong}",
        seen=f"last heard of in step {last.step + 1}, {last.phase}, by rank {world.rank} on {world.host}",
        fix="look for what ended it (memory, its host? dmesg, the scheduler's accounting); if storage may hang "
        f"that long: --silence-timeout SECONDS; {interruption.current.advice}",
        code=ExitCode.FAILED,
    )
    return error, faults.Fault(first, last.host, ExitCode.FAILED, wrong)


def report_hung(
    monitor: Monitor, answers: Mapping[int, Mapping[str, Any]], folder: Path | None
) -> tuple[MusterError, faults.Fault]:
    """The error and the fault for the rank that the others wait for, by the `answers` of all (`Heartbeat._answers`)."""
    mute = [rank for rank, answer in answers.items() if not answer and monitor.last[rank].phase != LEFT]
    counts = {rank: answer.get("collectives") for rank, answer in answers.items()}
    behind = mute or monitor.lagging({rank: count for rank, count in counts.items() if count is not None})
    first = behind[0]
    last = monitor.last[first]
    still_s = max(monitor.still.values()) * BEAT_S
    wrong = f"made no progress for {still_s:.0f} s in step {last.step + 1}, {last.phase}"
    is_all = len(behind) == len(answers) > 1
    who = f"each of the {len(answers)} ranks" if is_all else describe_ranks(behind, monitor.last)
    at = answers[first].get("where", "it did not answer when it was asked for its stacks")
    error = MusterError(
        f"{who} {wrong}",
        seen=f"rank {first}: {at}; stacks of all ranks: {'standard error' if folder is None else folder.parent}",
        fix="read its file there; if a step may take that long: --hang-timeout SECONDS; " + interruption.current.advice,
        code=ExitCode.FAILED,
    )
    return error, faults.Fault(first, last.host, ExitCode.FAILED, wrong)


def report_lost_store(world: World, seen: str) -> MusterError:
    """The error for the rank of `world` where the store, its only connection to the others, is gone."""
    place = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    return MusterError(
        f"rank {world.rank} on {world.host} lost the other ranks: the store at {place} is gone",
        seen=seen,
        fix=f"look on that host for what ended rank 0 or its agent; {interruption.current.advice}",
        code=ExitCode.FAILED,
    )


class Heartbeat:
    """This rank's heartbeat, in two threads: one exchanges beats through the store, one notices a store that blocks it.

    Args:
        hang_s: seconds without progress after which a rank counts as hung; 0: none does.
        silence_s: seconds without a beat after which a rank counts as dead.
    """

    def __init__(self, world: World, hang_s: float, silence_s: float) -> None:
        self.world, self.status = world, world.status
        self.hang_beats = hang_s / BEAT_S if hang_s else math.inf
        self.dead_beats = math.ceil(silence_s / BEAT_S)
        self.monitor = Monitor()
        self.number = 0
        self.requests_dump = self.has_dumped = self.is_over = False
        self.lost = ""
        self.stopped = threading.Event()
        self.store: Any = world.store.clone()
        self.store.set_timeout(timedelta(seconds=STORE_S))
        self.threads = [
            threading.Thread(target=function, name=name, daemon=True)
            for name, function in (("heartbeat", self._exchange), ("heartbeat watch", self._watch))
        ]
        for thread in self.threads:
            thread.start()

    def close(self, *, failed: bool) -> None:
        """Ends the threads; informs the others that this rank has left and is not dead."""
        self.stopped.set()
        for thread in self.threads:
            # For longer than a request to the store may take, unless others wait for this failed rank's end.
            thread.join(faults.GRACE_S if failed else STORE_S + faults.GRACE_S)

    def wait_for_cause(self) -> None:
        """Waits, after this rank has lost a connection, until the cause is known, or for some beats at most."""
        self.status.lost_peer = True
        end = time.monotonic() + (BEATS_AFTER_LOSS + 3) * BEAT_S
        while time.monotonic() < end and not (self.is_over or self.lost):
            with suppress(RuntimeError):
                if self.world.store.check(["fault"]):
                    return
            time.sleep(BEAT_S / 10)

    def end_orphaned(self, error: MusterError) -> None:
        """Ends this rank, whose launcher is gone, with `error`, and publishes the fault."""
        self.is_over = True
        console.report_fatal(self.world, error)
        # The store may be gone too, and not answer.
        faults.end_soon(ExitCode.FAILED, 2 * faults.GRACE_S)
        faults.publish(self.world, faults.Fault(self.world.rank, self.world.host, ExitCode.FAILED, GONE), self.store)

    def _send(self) -> None:
        """Sends this rank's beat."""
        status = self.status
        self.number += 1
        own = Beat(
            number=self.number,
            ticks=status.ticks,
            step=status.step,
            phase=LEFT if self.stopped.is_set() else status.phase,
            is_patient=status.is_patient,
            lost_peer=status.lost_peer,
            requests_dump=self.requests_dump,
            host=self.world.host,
        )
        self.store.set(f"heartbeat/{self.world.rank}", json.dumps(own))

    def _exchange(self) -> None:
        """The thread that exchanges beats, which the store may block."""
        try:
            if self.world.main:
                # Makes all keys, so that each can be read, without overwriting the beat of a rank that was quicker.
                for rank in range(self.world.world_size):
                    for kind in ("heartbeat", "hang-dump"):
                        self.store.compare_set(f"{kind}/{rank}", "", "")
            while not self.is_over:
                is_last = self.stopped.is_set()
                self._send()
                if is_last:
                    return
                self._receive()
                self.stopped.wait(BEAT_S)
        except RuntimeError as error:  # of the store: DistError, and others of its kind
            self.lost = str(error).partition("\n")[0] or type(error).__name__

    def _receive(self) -> None:
        """Reads the others' beats, and acts on them."""
        if self.world.main:
            texts = self.store.multi_get([f"heartbeat/{rank}" for rank in range(self.world.world_size)])
            self.monitor.update({rank: Beat.read(text) for rank, text in enumerate(texts)})
        elif self.store.check(["heartbeat/0"]):
            self.monitor.update({0: Beat.read(self.store.get("heartbeat/0"))})
            first = self.monitor.last.get(0)
            if first is not None and first.requests_dump and not self.has_dumped:
                self._dump()
        lost_peer = self.status.lost_peer or any(beat.lost_peer for beat in self.monitor.last.values())
        if dead := self.monitor.dead(BEATS_AFTER_LOSS if lost_peer else self.dead_beats):
            self._end(*report_dead(self.monitor, dead, self.world))
        elif self.world.main and self.monitor.is_hung(self.hang_beats):
            self._end(*report_hung(self.monitor, self._answers(), self.status.folder))

    def _answers(self) -> dict[int, dict[str, Any]]:
        """Makes all ranks dump their stacks; returns the answers by rank, empty ones where none came in time."""
        self.requests_dump = True
        self._send()
        own = self._dump()
        keys = [f"hang-dump/{rank}" for rank in range(self.world.world_size)]
        end = time.monotonic() + DUMP_S + 2 * BEAT_S
        while True:
            self._send()  # meanwhile the others must not miss this rank's beats
            answers = {rank: json.loads(text or b"{}") for rank, text in enumerate(self.store.multi_get(keys))}
            answers[self.world.rank] = own
            if time.monotonic() > end or all(answers[rank].get("written") for rank in self.monitor.present):
                return {rank: answers[rank] for rank in self.monitor.present}
            time.sleep(BEAT_S / 3)

    def _dump(self) -> dict[str, Any]:
        """Dumps this process's stacks; returns a summary of them, which it also puts into the store."""
        self.has_dumped = True
        # Ends the process even if the device's own code never returns and keeps Python's lock.
        faulthandler.dump_traceback_later(4 * DUMP_S, exit=True)
        key, place = f"hang-dump/{self.world.rank}", {"where": where()}
        self.store.set(key, json.dumps(place))
        dumped: dict[str, Any] = {}
        # A file system that hangs is a frequent reason to be here.
        write = threading.Thread(target=dump, args=(self.status.folder, self.world.rank, dumped), daemon=True)
        write.start()
        write.join(DUMP_S)
        answer = {**place, **dumped, "written": True}
        self.store.set(key, json.dumps(answer))
        return answer

    def _watch(self) -> None:
        """The thread that notices a store which is gone or does not answer; the store can't block it."""
        before, quiet = -1, 0
        while not self.stopped.wait(BEAT_S) and not self.is_over:
            before, quiet = self.number, (quiet + 1 if self.number == before else 0)
            # The rank of a closed store may have published a fault: a rank that has read it ends before this limit.
            if quiet >= (2 * faults.GRACE_S / BEAT_S + 1 if self.lost else (GONE_S + DUMP_S) / BEAT_S):
                self.is_over = True
                seen = self.lost or f"no answer for {quiet * BEAT_S:.0f} s"
                console.report_fatal(self.world, report_lost_store(self.world, seen))
                faults.end_soon(ExitCode.FAILED, 0)
                return

    def _end(self, error: MusterError, fault: faults.Fault) -> None:
        """Publishes the `fault` of a rank, and ends this one; reports `error` where no other fault came first."""
        first = faults.publish(self.world, fault, self.store)
        self.is_over = True
        if first == fault:
            console.report_fatal(self.world, error)
        world, store = self.world, self.store
        faults.end_soon(first.code, faults.GRACE_S, lambda: faults.leave(world, store, failed=True, main=world.main))


def where() -> str:
    """The line that the main thread executes, and the line of this program from which it was called."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    lines: list[str] = []
    while frame is not None:
        path = frame.f_code.co_filename
        if not lines or OURS in path:
            short = os.sep.join(path.rsplit(os.sep, 2)[-2:])
            lines.append(f"{frame.f_code.co_name} ({short}:{frame.f_lineno})")
            if OURS in path:
                break
        frame = frame.f_back
    return ", called by ".join(lines) or "nowhere"


def num_collectives(recorded: bytes) -> list[int] | None:
    """Numbers of collectives enqueued, started and completed, of all groups; None without the flight recorder's data.

    The number started is 0 on all ranks where NCCL measures no times (TORCH_NCCL_ENABLE_TIMING).
    """
    if not recorded:
        return None
    # Safe to unpickle: torch has made it in this process just now.
    status = pickle.loads(recorded).get("pg_status") or {}
    if not status:
        return None
    names = [f"last_{state}_collective" for state in ("enqueued", "started", "completed")]
    # -1 where there was none.
    return [sum(max(0, int(group.get(name, -1))) for group in status.values()) for name in names]


def dump(folder: Path | None, rank: int, summary: dict[str, Any]) -> None:
    """Writes stacks and flight recorder into `folder`, or stacks to stderr without one; adds to `summary`."""
    if folder is None:
        faulthandler.dump_traceback(sys.stderr, all_threads=True)
    else:
        with suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            with (folder / f"rank-{rank}.stacks.txt").open("w") as file:
                faulthandler.dump_traceback(file, all_threads=True)
    recorded = b""
    with suppress(RuntimeError):  # the device is in an error state
        if dist.is_initialized():
            name = "_dump_nccl_trace" if "nccl" in str(dist.get_backend()) else "_dump_fr_trace"
            recorded = getattr(c10d, name, bytes)()  # of torch's flight recorder, as torchfrtrace reads it
    with suppress(Exception):  # another version of torch may pickle other data
        summary["collectives"] = num_collectives(recorded)
    if folder is not None and recorded:
        with suppress(OSError):
            # Beside the folders of the hosts, for the same start of the run.
            (folder.parent / FLIGHT).mkdir(parents=True, exist_ok=True)
            (folder.parent / FLIGHT / f"rank-{rank}").write_bytes(recorded)
