"""A trace of a few steps of rank 0, which opens in Perfetto: what it computed, and when it spoke to other ranks.

Of the trace the summary tells the shares of its steps, and the operations that took longest.
"""

import gzip
import json
import os
import re
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils.hooks import RemovableHandle

from muster.train.models import units_of

WARM_UP = 10
"""Steps before the first that is traced, where there are as many."""

NUM_STEPS = 5
NAME = "profile/rank-0.json.gz"

Span = tuple[float, float]
"""Begin and end, in microseconds."""

TOP = 8
"""How many operations are told."""

COMPILED = "## Call CompiledFxGraph"
"""How the range of a graph begins that torch.compile has made for a CPU: its own kernels have no names there."""

STEP = re.compile(r"step \d+")


class Profile:
    """Traces some steps, once; on the ranks that trace nothing it only tells which steps these are.

    The steps are left out of the times of all ranks, and so is the one after them, in which the others wait for rank 0.

    Args:
        num_steps: that this process will take.
        model: whose layers are to have their names in the trace; None for one that is compiled.

    Attributes:
        running: whether the next step is one that is not timed.
        num_traced: steps in the trace that was written.
        problem: why it could not be written.
    """

    def __init__(self, run: Path, num_steps: int, model: nn.Module | None, device: torch.device, *, main: bool) -> None:
        self.path = run / NAME
        self.num_steps = min(NUM_STEPS, max(1, num_steps - 1))
        self.first = min(WARM_UP, num_steps - self.num_steps)
        self.model = model
        self.device = device
        self.main = main
        self.running = False
        self.done = False
        self.num_traced = 0
        self.operations: list[dict[str, Any]] = []
        self.problem: str | None = None
        self.tracer: profile | None = None
        self.range: record_function | None = None
        self.hooks: list[RemovableHandle] = []
        self.began = self.step = 0

    def begin(self, step: int) -> None:
        """Called before each step, when `step` are done: begins the trace where it is time, or the step in it."""
        if self.done:
            self.running = self.running and step <= self.began + self.num_traced
            return
        if not self.running and step >= self.first:
            self.running, self.began = True, step
            self.start()
        self.step = step + 1

    def end(self, step: int) -> None:
        """Called after each step, when `step` are done."""
        if not self.running or self.done:
            return
        self.close_range()
        if step - self.began == self.num_steps:
            self.finish(step)

    def leave(self, step: int) -> None:
        """Called at the end of an epoch: what follows is no step. A trace with none yet begins again later."""
        if not self.running or self.done:
            return
        self.close_range()
        if step > self.began:
            self.finish(step)
        else:
            self.stop()
            self.running = False

    def part(self, name: str) -> AbstractContextManager[object]:
        """A context that has a name in the trace, in the step's, which its first part begins."""
        if self.tracer is None:
            return nullcontext()
        if self.range is None:
            self.range = record_function(f"step {self.step}")
            self.range.__enter__()
        return record_function(name)

    def start(self) -> None:
        """Begins the trace, with the names of the model's layers."""
        if not self.main:
            return
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # it complains of each GPU that is not there
        is_gpu = self.device.type == "cuda"
        self.tracer = profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if is_gpu else [])])
        self.tracer.start()
        if self.model is not None:
            names = {module: name for name, module in self.model.named_modules()}
            for unit in units_of(self.model):
                kind = type(unit).__name__.removeprefix("FSDP")  # what fully_shard makes of a class's name
                self.hooks += named(unit, f"{kind} {names[unit]}")

    def stop(self) -> profile | None:
        """Ends the trace."""
        tracer, self.tracer = self.tracer, None
        if tracer is not None:
            tracer.stop()
        while self.hooks:
            self.hooks.pop().remove()
        return tracer

    def finish(self, step: int) -> None:
        """Ends the trace and writes it."""
        tracer = self.stop()
        self.done, self.num_traced = True, step - self.began
        if tracer is None:
            return
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            tracer.export_chrome_trace(str(self.path))
        except OSError as error:
            self.problem = f"the trace could not be written: {error.strerror}: {self.path}"
        self.operations = operations(tracer, is_gpu=self.device.type == "cuda")

    def shares(self) -> dict[str, float] | None:
        """What the steps in the trace went to; None where it does not tell."""
        try:
            return shares(self.path)
        except (OSError, ValueError, KeyError):
            return None

    def close_range(self) -> None:
        """Ends the step's range in the trace."""
        if self.range is not None:
            self.range.__exit__(None, None, None)
            self.range = None


def named(module: nn.Module, name: str) -> list[RemovableHandle]:
    """Hooks by which the forward pass of `module` is a range in the trace."""
    open_ranges: list[record_function] = []

    def before(*_: Any) -> None:
        open_ranges.append(record_function(name))
        open_ranges[-1].__enter__()

    def after(*_: Any) -> None:
        if open_ranges:
            open_ranges.pop().__exit__(None, None, None)

    return [module.register_forward_pre_hook(before), module.register_forward_hook(after, always_call=True)]


def operations(tracer: profile, *, is_gpu: bool) -> list[dict[str, Any]]:
    """Those that took longest on the device: how often, and how long without those they call, in all."""
    key = "self_device_time_total" if is_gpu else "self_cpu_time_total"
    events: Any = tracer.key_averages()
    found: dict[str, dict[str, Any]] = {}
    for event in events:
        name = "kernels of compiled graphs" if event.key.startswith(COMPILED) else event.key
        is_kernel = event.device_type.name == "CUDA" and not event.is_user_annotation
        if is_kernel if is_gpu else "::" in name or name != event.key:  # and no range of ours
            one = found.setdefault(name, {"name": name, "calls": 0, "seconds": 0.0})
            one["calls"] += event.count
            one["seconds"] = round(one["seconds"] + getattr(event, key) / 1e6, 6)
    longest = sorted(found.values(), key=lambda one: -one["seconds"])[:TOP]
    return [one for one in longest if one["seconds"] > 0]


def shares(path: Path) -> dict[str, float] | None:
    """The parts of the steps in the trace at `path`; None where it has none.

    `compute` is the time in which an operation runs; `communication` that in which only messages do, and `hidden` that
    in which both do; `other` is the rest: the interpreter, launches, waits.
    """
    with gzip.open(path) as file:
        events = [event for event in json.load(file)["traceEvents"] if event.get("ph") == "X"]
    steps = [span(event) for event in events if STEP.fullmatch(event["name"])]
    kernels = [event for event in events if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    if kernels:
        talk = [span(event) for event in kernels if event["name"].startswith("nccl")]
        work = [span(event) for event in kernels if not event["name"].startswith("nccl")]
        window = [(min(begin for begin, _ in talk + work), max(end for _, end in talk + work))]
    else:
        talk = [span(event) for event in events if event["name"].startswith("gloo:")]
        work = [span(event) for event in events if event["name"].startswith(("aten::", "fsdp::", COMPILED))]
        window = steps
    total = length(window)
    if not steps or not total:
        return None
    talk, work = (cut(union(spans), union(window)) for spans in (talk, work))
    hidden = length(cut(talk, work))
    parts = {"compute": length(work), "communication": length(talk) - hidden, "hidden": hidden}
    parts["other"] = total - parts["compute"] - parts["communication"]
    return {name: round(max(0.0, value / total), 4) for name, value in parts.items()}


def span(event: dict[str, Any]) -> Span:
    """When `event` was."""
    return float(event["ts"]), float(event["ts"]) + float(event["dur"])


def union(spans: Iterable[Span]) -> list[Span]:
    """`spans`, in order, those that touch as one."""
    joined: list[Span] = []
    for begin, end in sorted(spans):
        if joined and begin <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(joined[-1][1], end)
        else:
            joined.append((begin, end))
    return joined


def cut(spans: list[Span], others: list[Span]) -> list[Span]:
    """Where both are; both as `union` makes them."""
    both: list[Span] = []
    first = second = 0
    while first < len(spans) and second < len(others):
        begin = max(spans[first][0], others[second][0])
        end = min(spans[first][1], others[second][1])
        if begin < end:
            both.append((begin, end))
        if spans[first][1] < others[second][1]:
            first += 1
        else:
            second += 1
    return both


def length(spans: list[Span]) -> float:
    """How long they are together, of spans as `union` makes them."""
    return sum(end - begin for begin, end in union(spans))
