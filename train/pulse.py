"""A rank's beat: it says every few seconds that it lives and how far it is, and hears whether others do.

Rank 0 listens to all, all listen to rank 0. So a rank that is dead or stands still is named, and the run ends, also
where the others wait for it in a collective that does not notice.
"""

import faulthandler
import json
import math
import os
import threading
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from train import console, faults, logs, stacks, verdicts
from train.errors import FAILED, MusterError
from train.vitals import LEFT, Beat, Ear
from train.world import World

BEAT_S = 3.0
"""Seconds between two beats."""

DEAD_BEATS = 15
"""So many beats missed in a row are a death: 45 s. All shall have ended a minute after one, and a process may be
silent though it lives: native code that keeps Python's lock while a file system stands still."""

DOUBTED_BEATS = 3
"""The same where some rank has lost a connection, so that a death is likely."""

DUMP_S = 15.0
"""Seconds in which a rank that is asked for its stacks has to have written them."""

STORE_S = 10.0
"""Seconds for one answer of the store."""


class Pulse:
    """This rank's beat, in two threads: one speaks through the store, one looks that this comes to an end.

    Args:
        hang_s: seconds in which a rank that stands still counts as hung; 0: none does.
        parent: the process that started this one, with which it ends; None for a rank that nobody launched.
    """

    def __init__(self, world: World, hang_s: float, parent: int | None) -> None:
        self.world, self.vitals = world, world.vitals
        self.hang_beats = hang_s / BEAT_S if hang_s else math.inf
        self.ear = Ear()
        self.number = 0
        self.rounds = 0
        self.asks = self.has_dumped = self.is_over = False
        self.lost = ""
        self.stopped = threading.Event()
        error_file = os.environ.get("TORCHELASTIC_ERROR_FILE")
        self.file = Path(f"{error_file}.beat") if error_file else None
        self.parent = parent
        self.store: Any = None
        if world.store is not None:
            self.store = world.store.clone()
            self.store.set_timeout(timedelta(seconds=STORE_S))
        self.threads = [
            threading.Thread(target=function, name=name, daemon=True)
            for name, function in (("pulse", self._speak), ("look", self._look))
        ]
        for thread in self.threads:
            thread.start()

    def close(self) -> None:
        """Ends the threads; the others hear that this rank has left and is not dead."""
        self.stopped.set()
        for thread in self.threads:
            thread.join(faults.GRACE_S)
        if self.file is not None:
            self.file.unlink(missing_ok=True)

    def doubt(self) -> None:
        """For a rank that has lost a connection: returns when the reason is known, or after some beats without."""
        self.vitals.doubts = True
        end = time.monotonic() + (DOUBTED_BEATS + 3) * BEAT_S
        while time.monotonic() < end and not (self.is_over or self.lost):
            with suppress(RuntimeError):
                if self.world.store is None or self.world.store.check(["fault"]):
                    return
            time.sleep(BEAT_S / 10)

    def beat(self) -> Beat:
        """What this rank says now."""
        vitals = self.vitals
        self.number += 1
        return Beat(
            number=self.number,
            ticks=vitals.ticks,
            step=vitals.step,
            place=LEFT if self.stopped.is_set() else vitals.place,
            is_patient=vitals.is_patient,
            doubts=vitals.doubts,
            asks=self.asks,
            host=self.world.host,
        )

    def _speak(self) -> None:
        """The thread that may be held up by the store."""
        try:
            if self.store is not None and self.world.main:
                # So that each can be read, and no beat of a rank that was quicker is lost.
                for rank in range(self.world.world_size):
                    for kind in ("pulse", "dumped"):
                        self.store.compare_set(f"{kind}/{rank}", "", "")
            while not self.is_over:
                is_last = self.stopped.is_set()
                own = self._say()
                if is_last:
                    return
                self._hear(own)
                self.rounds += 1
                self.stopped.wait(BEAT_S)
        except RuntimeError as error:  # of the store: DistError, and others of its kind
            self.lost = str(error).partition("\n")[0] or type(error).__name__

    def _say(self) -> Beat:
        """This rank's beat, which the others can hear now."""
        own = self.beat()
        if self.store is not None:
            self.store.set(f"pulse/{self.world.rank}", own.text())
        return own

    def _hear(self, own: Beat) -> None:
        """Hears the others' beats, and acts on them."""
        if self.store is None:
            self.ear.hear({0: own})
        elif self.world.main:
            texts = self.store.multi_get([f"pulse/{rank}" for rank in range(self.world.world_size)])
            self.ear.hear({rank: Beat.read(text) for rank, text in enumerate(texts)})
        elif self.store.check(["pulse/0"]):
            self.ear.hear({0: Beat.read(self.store.get("pulse/0"))})
            first = self.ear.last.get(0)
            if first is not None and first.asks and not self.has_dumped:
                self._dump()
        doubts = self.vitals.doubts or self.ear.doubts
        dead = self.ear.dead(DOUBTED_BEATS if doubts else DEAD_BEATS)
        if dead:
            self._end(*verdicts.dead(self.ear, dead, BEAT_S, self.world))
        elif self.world.main and self.ear.is_hung(self.hang_beats):
            self._tell_hung()

    def _tell_hung(self) -> None:
        """Has all ranks write what they do, and ends the run, as one stands still."""
        self.asks = True
        answers = self._answers()
        self._end(*verdicts.hung(self.ear, answers, BEAT_S, self.vitals.folder))

    def _answers(self) -> dict[int, dict[str, Any]]:
        """What each rank said of what it does, as far as they answered in time; empty for those that did not."""
        self._say()
        if self.store is None:
            return {0: self._dump()}
        own = self._dump()
        keys = [f"dumped/{rank}" for rank in range(self.world.world_size)]
        end = time.monotonic() + DUMP_S + 2 * BEAT_S
        while True:
            answers = {rank: json.loads(text or b"{}") for rank, text in enumerate(self.store.multi_get(keys))}
            answers[self.world.rank] = own
            living = [rank for rank, beat in self.ear.last.items() if beat.place != LEFT]
            if time.monotonic() > end or all(answers[rank].get("written") for rank in living):
                return {rank: answers[rank] for rank in living}
            time.sleep(BEAT_S / 3)
            self.rounds += 1

    def _dump(self) -> dict[str, Any]:
        """Writes what this process does; returns it in short, and tells it the others."""
        self.has_dumped = True
        # Should the device's own code never come back, and keep Python's lock: this ends the process all the same.
        faulthandler.dump_traceback_later(4 * DUMP_S, exit=True)
        told: dict[str, Any] = {"where": stacks.where()}
        self._tell_answer(told)
        written: dict[str, Any] = {}
        backend = torch_backend()

        def write() -> None:
            written.update(stacks.dump(self.vitals.folder, self.world.rank, backend))

        # A file system that hangs is a frequent reason to be here.
        writer = threading.Thread(target=write, name="dump", daemon=True)
        writer.start()
        writer.join(DUMP_S)
        told |= {"written": True, **dict(written)}
        self._tell_answer(told)
        return told

    def _tell_answer(self, told: dict[str, Any]) -> None:
        if self.store is not None:
            self.store.set(f"dumped/{self.world.rank}", json.dumps(told))

    def _look(self) -> None:
        """The thread that waits for nobody."""
        heard, quiet = -1, 0
        self._touch()
        while not self.stopped.wait(BEAT_S) and not self.is_over:
            self._touch()
            if self.parent is not None and os.getppid() != self.parent:
                self._tell_orphaned(self.parent)
                return
            heard, quiet = self.rounds, (quiet + 1 if self.rounds == heard else 0)
            # A store that has closed may be that of a rank which has told why: who heard of it ends before this does.
            if quiet >= (2 * faults.GRACE_S / BEAT_S + 1 if self.lost else DEAD_BEATS + DUMP_S / BEAT_S):
                self.is_over = True
                seen = self.lost or f"no answer for {quiet * BEAT_S:.0f} s"
                tell(verdicts.alone(self.world, seen))
                faults.end_soon(FAILED, 0)
                return

    def _touch(self) -> None:
        """Shows the agent that this process lives."""
        if self.file is not None:
            with suppress(OSError):
                self.file.touch()

    def _tell_orphaned(self, parent: int) -> None:
        told, fault = verdicts.orphaned(self.world, parent)
        # The store may be gone with it, and not answer: nothing below is sure to return.
        tell(told)
        faults.end_soon(FAILED, 2 * faults.GRACE_S)
        faults.publish_of(self.world, fault, self.store)

    def _end(self, told: MusterError, fault: faults.Fault) -> None:
        """Tells all ranks of the `fault` of one, and ends this one; says what is `told` where it is the first."""
        first = faults.publish_of(self.world, fault, self.store)
        self.is_over = True
        if first == fault:
            tell(told)
        faults.end_soon(first.code, faults.GRACE_S, self._leave)

    def _leave(self) -> None:
        faults.leave(self.world, self.store, failed=True, main=self.world.main)


def torch_backend() -> str:
    """What the ranks' group speaks through; nothing before there is one."""
    return str(dist.get_backend()) if dist.is_initialized() else ""


def tell(told: MusterError) -> None:
    """Says `told` to the user; the agent need not show this rank's log."""
    console.tell(str(told))
    logs.leave_word(logs.TOLD)
