"""Measures the steps of a run and their waits, its memory and its energy, without making the device wait."""

import resource
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any

import numpy as np
import psutil
import torch

from muster.train.reporting.profile import Profile

Mark = float | torch.cuda.Event


class Stopwatch:
    """Adds up stretches of time; on a GPU they are measured by events, which are read when the device has passed them.

    Args:
        note: takes the seconds of each stretch, in their order, in place of `add`.

    Attributes:
        is_counting: whether stretches that begin now count.
    """

    def __init__(
        self, device: torch.device, note: Callable[[float], None] | None = None, *, is_counting: bool = True
    ) -> None:
        self.device = device
        self.note = note or self.add
        self.pending: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()
        self.seconds = 0.0
        self.is_counting = is_counting

    def add(self, seconds: float) -> None:
        """Counts a stretch."""
        self.seconds += seconds

    def now(self) -> Mark:
        """The current time, by the device's clock."""
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def begin(self) -> Mark | None:
        """Begins a stretch, and returns its start for `end`; None where it does not count."""
        return self.now() if self.is_counting else None

    def end(self, before: Mark | None) -> Mark | None:
        """Ends the stretch that began at `before`, if it counts; returns the current time, the start of the next."""
        if before is None:
            return None
        now = self.now()
        if isinstance(before, torch.cuda.Event) and isinstance(now, torch.cuda.Event):
            self.pending.append((before, now))
            self.read(wait=False)
        elif isinstance(before, float) and isinstance(now, float):
            self.note(now - before)
        return now

    @contextmanager
    def running(self) -> Iterator[None]:
        """A context whose time is counted."""
        before = self.begin()
        yield
        self.end(before)

    def read(self, *, wait: bool) -> None:
        """Notes the stretches that the GPU has completed; with `wait`, waits until it has completed all."""
        while self.pending and (wait or self.pending[0][1].query()):
            before, after = self.pending.popleft()
            after.synchronize()
            self.note(before.elapsed_time(after) / 1000)

    def total(self) -> float:
        """Seconds of all stretches; waits until the device has completed them."""
        self.read(wait=True)
        return self.seconds


class StepTimes:
    """Seconds of each step, of the waits in them, and of the first step, which compiles, allocates and starts workers.

    A step lasts from the end of the one before (or the start of its epoch) to its own end. On a GPU that is the
    device's time, and a wait for data is the time in which the device had nothing to do before they came.

    Args:
        profile: traces some steps, which then don't count.
        started: when the run began, by `time.perf_counter`; earlier by the time that a resumed run has trained already.

    Attributes:
        seconds: of each step that counts.
        data: the waits for data in them.
        waits: the waits for other ranks in them; the trainer puts its world's stopwatch here.
    """

    def __init__(self, device: torch.device, profile: Profile | None = None, started: float | None = None) -> None:
        self.stretches = Stopwatch(device, self.note)
        self.data = Stopwatch(device, is_counting=False)
        self.waits = Stopwatch(device, is_counting=False)
        self.energy = Energy(device)
        self.profile = profile
        self.started = time.perf_counter() if started is None else started
        self.num_reported = 0
        self.seconds: list[float] = []
        self.first_s: float | None = None
        self.num_steps = 0
        self.last: Mark | None = None

    def start(self) -> None:
        """Begins a step, which counts unless it is the first or is profiled; called at the start of each epoch."""
        if self.profile is not None:
            self.profile.begin(self.num_steps)
        self.count(self.num_steps > 0 and (self.profile is None or not self.profile.running))
        self.last = self.stretches.now()

    def stop(self) -> None:
        """Ends an epoch: waits from now on are not those of a step."""
        self.stretches.read(wait=True)  # waits for the device, as the epoch's loss has to anyway
        self.count(False)
        if self.profile is not None:
            self.profile.leave(self.num_steps)

    def count(self, is_counting: bool) -> None:
        """Switches the counting of waits and energy on or off."""
        if is_counting != self.data.is_counting:
            self.energy.count(is_counting)
        self.data.is_counting = self.waits.is_counting = is_counting

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """A context whose time counts as waiting for data."""
        before = self.data.begin()
        with self.part("data"):
            yield
        self.data.end(before)

    def part(self, name: str) -> AbstractContextManager[object]:
        """A context that appears as `name` in the trace, while one is taken."""
        return nullcontext() if self.profile is None else self.profile.part(name)

    def step(self) -> None:
        """Ends a step, and begins the next."""
        assert self.last is not None
        is_first = self.num_steps == 0
        self.num_steps += 1
        if is_first or self.data.is_counting:
            self.last = self.stretches.end(self.last)
        if self.profile is not None:
            self.profile.end(self.num_steps)
        if is_first or self.profile is not None:
            self.start()

    def note(self, seconds: float) -> None:
        if self.first_s is None:
            self.first_s = seconds
        else:
            self.seconds.append(seconds)

    def recent(self, num_targets: int, unit: str) -> dict[str, float | None]:
        """Rate and mean time of the steps, of `num_targets` images or tokens each, measured since the last call."""
        steps, self.num_reported = self.seconds[self.num_reported :], len(self.seconds)
        mean_s = sum(steps) / len(steps) if steps else None
        return {
            "seconds": round(time.perf_counter() - self.started, 3),
            f"{unit}_per_second": None if not mean_s else round(num_targets / mean_s, 2),
            "step_time_s": None if mean_s is None else round(mean_s, 6),
            "memory_gib": round(memory_gib(self.stretches.device), 3),
        }

    def of_this_rank(self, waits_s: float | None) -> dict[str, float | None]:
        """Mean seconds of a step and its parts; `waits_s` is the sum of the waits for other ranks (None: not known)."""
        self.stretches.read(wait=True)
        number = len(self.seconds)
        if number == 0:
            return {"step_s": self.first_s or 0.0, "data_wait_s": None, "waits_s": None, "busy_s": None}
        step_s, data_s = sum(self.seconds) / number, self.data.total() / number
        waits_s = None if waits_s is None else min(waits_s / number, step_s)
        busy_s = None if waits_s is None else step_s - waits_s
        return {"step_s": step_s, "data_wait_s": min(data_s, step_s), "waits_s": waits_s, "busy_s": busy_s}

    def summary(self, global_batch: int, world_size: int, unit: str = "images") -> dict[str, object]:
        """Rates and times of the steps, of `global_batch` images or tokens each; of the first if it is the only one."""
        self.stretches.read(wait=True)
        if self.first_s is None:
            names = "step_time_s", "first_step_s", "data_wait_share"
            rates = f"{unit}_per_second", f"{unit}_per_second_per_rank"
            return {**dict.fromkeys((*rates, *names)), "num_timed_steps": 0}
        first_s = self.first_s
        seconds = self.seconds or [first_s]
        total_s = sum(seconds)
        rate = len(seconds) * global_batch / total_s if total_s else 0.0
        found = np.percentile(seconds, (50, 95, 99), method="inverted_cdf").tolist()
        times = dict(zip(("p50", "p95", "p99"), found, strict=True))
        times |= {"max": max(seconds), "mean": total_s / len(seconds)}
        wait_s = self.data.total() if self.seconds else 0.0
        return {
            f"{unit}_per_second": round(rate, 2),
            f"{unit}_per_second_per_rank": round(rate / world_size, 2),
            "step_time_s": {name: round(value, 6) for name, value in times.items()},
            "first_step_s": round(first_s, 6),
            "num_timed_steps": len(self.seconds),
            "data_wait_share": round(min(1.0, wait_s / total_s), 4) if total_s else 0.0,
        }


class Energy:
    """The energy that this rank's GPU uses while counting is on, in joules; None where it is not known.

    It is read from the counter that NVML keeps for each whole card. Where a card is divided (MIG), or has no counter,
    the energy is not known.
    """

    def __init__(self, device: torch.device) -> None:
        self.joules: float | None = None
        self.before: float | None = None
        self.nvml: Any = None
        if device.type == "cuda":
            # No driver library, no such card, no counter, an old binding: in all cases the energy is not known.
            with suppress(Exception):
                import pynvml  # only where there is a GPU: it takes time to load

                pynvml.nvmlInit()
                # By its UUID: torch numbers the cards of CUDA_VISIBLE_DEVICES, NVML numbers all cards.
                name = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
                self.nvml, self.handle = pynvml, pynvml.nvmlDeviceGetHandleByUUID(name)
                self.read()
                self.joules = 0.0

    def read(self) -> float:
        """Joules that the card has taken until now."""
        return self.nvml.nvmlDeviceGetTotalEnergyConsumption(self.handle) / 1000

    def count(self, is_counting: bool) -> None:
        """Switches counting on or off; a card that no longer answers does not end training."""
        if self.joules is None:
            return
        try:
            if is_counting:
                self.before = self.read()
            elif self.before is not None:
                self.joules, self.before = self.joules + self.read() - self.before, None
        except Exception:
            self.joules = None


def peak_memory_gib(device: torch.device) -> float:
    """The most memory that this process held, in GiB: of the GPU where it trains on one, else resident in RAM."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def memory_gib(device: torch.device) -> float:
    """The memory that this process holds now, in GiB: of the GPU where it trains on one, else resident in RAM."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device) / 2**30
    return psutil.Process().memory_info().rss / 2**30
