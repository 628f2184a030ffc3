"""What a run measures, without holding up the device."""

import math
import re
import resource
import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any, NamedTuple, TypeVar

import psutil
import torch
from torch.utils.flop_counter import FlopCounterMode

from muster.config import Options
from muster.train.models import IGNORED, gpt, images, loss_of
from muster.train.reporting.profile import Profile
from muster.train.reporting.stopwatch import Mark, Stopwatch
from muster.units import perplexity

Item = TypeVar("Item")


class StepTimes:
    """Seconds of each step, of the waits in them, and of the first step.

    A step lasts from the end of the one before (or the start of its epoch) to its own end. On a GPU that is the
    device's time, by events that are read once they have come to pass; nothing waits for them. A wait for data is then
    the time in which the device had nothing to do before the data came.
    The first step of the process is kept apart: it compiles, allocates and starts workers.

    Args:
        profile: takes a trace of some steps, which then don't count.
        energy: is told when the steps that count begin and end.
        started: when the run began, by `time.perf_counter`; of a continued one, as long ago as it has trained.

    Attributes:
        seconds: of each step that counts.
        data: counts the waits for data in them.
        waits: counts the waits for other ranks in them; a loop puts that of its world here.
    """

    def __init__(
        self,
        device: torch.device,
        profile: Profile | None = None,
        energy: "Energy | None" = None,
        started: float | None = None,
    ) -> None:
        self.stretches = Stopwatch(device, self.note)
        self.data = Stopwatch(device, counts=False)
        self.waits = Stopwatch(device, counts=False)
        self.profile = profile
        self.energy = energy
        self.started = time.perf_counter() if started is None else started
        self.num_told = 0
        self.seconds: list[float] = []
        self.first_s: float | None = None
        self.num_steps = 0
        self.last: Mark | None = None

    def start(self) -> None:
        """Begins a step, which counts unless it is the first or is profiled.

        What lies between epochs is no part of a step: this is called after it.
        """
        if self.profile is not None:
            self.profile.begin(self.num_steps)
        counts = self.num_steps > 0 and (self.profile is None or not self.profile.running)
        if self.energy is not None and counts != self.data.counts:
            self.energy.count(counts)
        self.data.counts = self.waits.counts = counts
        self.last = self.stretches.now()

    def stop(self) -> None:
        """Ends an epoch: what is waited for from now on is none of a step's."""
        if self.energy is not None and self.data.counts:
            self.stretches.read(wait=True)  # the device is through, as it has to be for the epoch's loss anyway
            self.energy.count(False)
        self.data.counts = self.waits.counts = False
        if self.profile is not None:
            self.profile.leave(self.num_steps)

    def waiting(self, items: Iterable[Item]) -> Iterator[Item]:
        """`items`, with the time it takes to get each counted as waiting for data."""
        source = iter(items)
        while True:
            before = self.data.begin()
            try:
                with self.part("data"):
                    item = next(source)
            except StopIteration:
                return
            self.data.end(before)
            yield item

    def part(self, name: str) -> AbstractContextManager[object]:
        """A context that has a name in the trace, while there is one."""
        return nullcontext() if self.profile is None else self.profile.part(name)

    def step(self) -> None:
        """Ends a step, and begins the next."""
        assert self.last is not None
        is_first = self.num_steps == 0
        self.num_steps += 1
        if is_first or self.data.counts:
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

    def lately(self, num_targets: int, unit: str) -> dict[str, float | None]:
        """Rate and time of the steps since this was called before, as far as they are known: nothing is waited for.

        Args:
            num_targets: images or tokens of a step.
        """
        steps, self.num_told = self.seconds[self.num_told :], len(self.seconds)
        mean_s = sum(steps) / len(steps) if steps else None
        return {
            "seconds": round(time.perf_counter() - self.started, 3),
            f"{unit}_per_second": None if not mean_s else round(num_targets / mean_s, 2),
            "step_time_s": None if mean_s is None else round(mean_s, 6),
            "memory_gib": round(memory_gib(self.stretches.device), 3),
        }

    def own(self, waits_s: float | None) -> dict[str, float | None]:
        """Mean seconds of this rank's steps, and of the parts of them.

        Args:
            waits_s: seconds of all steps that count in which this rank waited for others; None: not known.
        """
        self.stretches.read(wait=True)
        number = len(self.seconds)
        if number == 0:
            return {"step_s": self.first_s or 0.0, "data_wait_s": None, "waits_s": None, "busy_s": None}
        step_s, data_s = sum(self.seconds) / number, self.data.total() / number
        waits_s = None if waits_s is None else min(waits_s / number, step_s)
        busy_s = None if waits_s is None else step_s - waits_s
        return {"step_s": step_s, "data_wait_s": min(data_s, step_s), "waits_s": waits_s, "busy_s": busy_s}

    def summary(self, global_batch: int, world_size: int, unit: str = "images") -> dict[str, object]:
        """Rates and times of the steps after the first; of the first where it is the only one.

        Args:
            global_batch: images or tokens of a step, whichever is the `unit`.
        """
        self.stretches.read(wait=True)
        first_s = self.first_s or 0.0
        seconds = self.seconds or [first_s]
        total_s = sum(seconds)
        rate = len(seconds) * global_batch / total_s if total_s else 0.0
        times = {f"p{share}": percentile(seconds, share) for share in (50, 95, 99)}
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


def percentile(values: list[float], share: float) -> float:
    """The smallest of `values` that at least `share` percent of them don't exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(len(ordered) * share / 100) - 1)]


class Energy:
    """What this rank's GPU takes while it is counted; nothing where nobody knows.

    It is read from the counter that NVML keeps of each whole card. Where a card is divided (MIG), or has none, nothing
    is told.
    """

    def __init__(self, device: torch.device) -> None:
        self.joules: float | None = None
        self.before: float | None = None
        self.nvml: Any = None
        if device.type == "cuda":
            # No driver library, no such card, none that counts, an old binding: all mean that nobody knows.
            with suppress(Exception):
                import pynvml  # only where there is a GPU: it takes time to load

                pynvml.nvmlInit()
                # By its name in the driver: numbers are those of CUDA_VISIBLE_DEVICES here, and all cards' there.
                name = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
                self.nvml, self.handle = pynvml, pynvml.nvmlDeviceGetHandleByUUID(name)
                self.read()
                self.joules = 0.0

    def read(self) -> float:
        """Joules that the card has taken until now."""
        return self.nvml.nvmlDeviceGetTotalEnergyConsumption(self.handle) / 1000

    def count(self, counts: bool) -> None:
        """Begins to count, or ends it; a card that tells no more ends no training."""
        if self.joules is None:
            return
        try:
            if counts:
                self.before = self.read()
            elif self.before is not None:
                self.joules, self.before = self.joules + self.read() - self.before, None
        except Exception:
            self.joules = None


class Sums:
    """Loss, hits and targets (images, or tokens to predict), added up on the device.

    Attributes:
        values: [summed loss, hits, targets], float64.
        num_batches: how many were added.
        first_bad: which of them (from 0) was the first whose loss is no number; -1 for none.
    """

    def __init__(self, device: torch.device) -> None:
        self.values = torch.zeros(3, dtype=torch.float64, device=device)
        self.num_batches = 0
        self.first_bad = torch.full((), -1, device=device)

    @torch.no_grad()
    def add(self, loss: torch.Tensor, logits: torch.Tensor, targets: torch.Tensor) -> None:
        """Adds a batch with the mean `loss` over those of its `targets` (N or NT) that count."""
        num_targets = (targets != IGNORED).sum()
        # The first of the largest, as argmax gives it, which takes six times as long over many bf16 numbers on CPUs.
        hits = (logits.max(-1).indices == targets).sum()
        # The mean over no target is no number.
        total = torch.where(num_targets > 0, loss.detach().double() * num_targets, 0.0)
        is_first_bad = ~total.isfinite() & (self.first_bad < 0)
        self.first_bad = torch.where(is_first_bad, self.num_batches, self.first_bad)
        self.num_batches += 1
        self.values += torch.stack((total, hits.double(), num_targets.double()))


class Readout:
    """A look at a tensor on the device that arrives later, so that nobody waits for the device."""

    def __init__(self, values: torch.Tensor) -> None:
        self.event: torch.cuda.Event | None = None
        if values.device.type == "cuda":
            self.host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self.host.copy_(values, non_blocking=True)
            self.event = torch.cuda.Event()
            self.event.record()
        else:
            self.host = values.clone()

    def wait(self) -> list[float]:
        """The numbers, when they are there."""
        if self.event is not None:
            self.event.synchronize()
        return self.host.tolist()


def averages(sums: list[float]) -> tuple[float, float]:
    """Mean loss and accuracy (0 to 1) of [summed loss, hits, targets]."""
    loss, hits, num_targets = sums
    return loss / num_targets, hits / num_targets


def results(part: str, loss: float, accuracy: float, unit: str) -> dict[str, float]:
    """What a line of metrics.jsonl says of a `part`, train or valid; of tokens the perplexity too."""
    found = {f"{part}_loss": loss, f"{part}_accuracy": accuracy}
    return found | ({f"{part}_perplexity": perplexity(loss)} if unit == "tokens" else {})


def peak_memory_gib(device: torch.device) -> float:
    """The most memory that this process held: of the GPU where it trains on one, else resident in RAM."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def memory_gib(device: torch.device) -> float:
    """The memory that this process holds now: of the GPU where it trains on one, else resident in RAM."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device) / 2**30
    return psutil.Process().memory_info().rss / 2**30


BATCH = 2
"""Samples that are counted: one alone can't be normalised where its features are one number."""


def count_flops(options: Options, num_classes: int, size: int) -> float:
    """Operations of one sample (an image of `size` pixels a side, a sequence of `size` tokens), forth and back.

    They are those of the model: a multiplication and an addition are two, attention counts as if it were not causal,
    and what activation checkpointing computes again counts once (the model FLOPs of arXiv 2204.02311, appendix B).
    """
    with torch.device("meta"):
        if options.predicts_tokens:
            model = gpt.GPT(gpt.shape_of(options.model), num_classes)
            inputs = targets = torch.zeros(BATCH, size, dtype=torch.int64)
        else:
            model = images.construct(options.model, num_classes, images.arguments_for(options.model, size))
            inputs, targets = torch.empty(BATCH, 3, size, size), torch.zeros(BATCH, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter:
        loss_of(model(inputs), targets).backward()
    return counter.get_total_flops() / BATCH


class Peak(NamedTuple):
    """Operations of a card, in 10^12 a second, dense.

    Attributes:
        half: bf16 (before Ampere fp16) by tensor cores.
        tf32: fp32 by tensor cores; None where they can't.
        single: fp32 without them.
    """

    half: float
    tf32: float | None
    single: float


# From NVIDIA's datasheets, and the H100's architecture whitepaper. Those of cards since Ampere give their figures with
# sparsity, or both: these are the halves without. Of A30, H100 NVL and H200 NVL only bf16 was looked up; TF32 is half
# of it, and fp32 is still to be held to the datasheet.
CARDS: dict[str, Peak] = {
    r"(NVIDIA )?A100-(SXM4|PCIE)-(40|80)GB|NVIDIA A100 80GB PCIe": Peak(312, 156, 19.5),  # nvidia-1758950-r4
    r"NVIDIA A30": Peak(165, 82, 10.3),
    r"NVIDIA A40": Peak(149.7, 74.8, 37.4),
    r"NVIDIA A10": Peak(125, 62.5, 31.2),
    # The GPU of GH200 has the 132 multiprocessors of the H100 SXM, and their clock.
    r"NVIDIA H100 80GB HBM3|NVIDIA GH200 (120GB|480GB|144G HBM3e)": Peak(989.4, 494.7, 66.9),
    r"NVIDIA H100 PCIe": Peak(756, 378, 51),
    r"NVIDIA H100 NVL": Peak(835, 417.5, 60),
    r"NVIDIA H200": Peak(989, 494, 67),
    r"NVIDIA H200 NVL": Peak(835.5, 417.5, 60),
    r"NVIDIA B200": Peak(2250, 1100, 75),  # HGX B200
    r"NVIDIA GB200": Peak(2500, 1250, 80),  # GB200 NVL72
    r"NVIDIA L40S": Peak(362.05, 183, 91.6),
    r"NVIDIA L4": Peak(121, 60, 30.3),
    r"(Tesla |NVIDIA )V100-(SXM2|SXM3)-(16|32)GB(-LS)?": Peak(125, None, 15.7),  # us-1165301-r5
    r"(Tesla |NVIDIA )V100-PCIE-(16|32)GB": Peak(112, None, 14),
    r"(Tesla |NVIDIA )V100S-PCIE-32GB": Peak(130, None, 16.4),
    r"(Tesla |NVIDIA )T4": Peak(65, None, 8.1),  # 951643
}
"""Names of cards, as torch.cuda.get_device_name tells them, as patterns."""


def find_peak_flops(name: str) -> Peak | None:
    """The peak of the card called `name`; None for one that is not known."""
    return next((peak for pattern, peak in CARDS.items() if re.fullmatch(pattern, name)), None)


def peak_flops(device: torch.device, *, bf16: bool, convolves: bool) -> float | None:
    """Operations a second of this device; None where they are not known.

    Args:
        convolves: most of the model is convolutions, which torch allows tensor cores by default, and not products of
            matrices, which it does not.
    """
    peak = None if device.type != "cuda" else find_peak_flops(torch.cuda.get_device_name(device))
    if peak is None:
        return None
    tf32 = torch.backends.cudnn.allow_tf32 if convolves else torch.get_float32_matmul_precision() != "highest"
    if bf16:
        return peak.half * 1e12
    return (peak.tf32 if tf32 and peak.tf32 is not None else peak.single) * 1e12
