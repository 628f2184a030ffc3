"""A trace of a few steps of rank 0, which opens in Perfetto: its computation, and its communication with other ranks.

Beside it lies torch's table of the operations that took longest.
"""

import os
from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils.hooks import RemovableHandle

WARM_UP = 10
"""Steps before the first that is traced, where there are as many."""

NUM_STEPS, NUM_ROWS = 5, 30
NAME = "profile/rank-0.json.gz"

OPERATIONS = "profile/operations.txt"
"""torch's table of the operations that took longest."""


class Profile:
    """Traces some steps, once, on rank 0; on the other ranks it only tells which steps these are.

    The steps are left out of the times of all ranks, and so is the one after them, in which the others wait for rank 0.

    Args:
        num_steps: the number of steps that this process will take.
        layers: the modules that are named in the trace, by name.

    Attributes:
        running: whether the step that `begin` has begun is left out of the times.
        num_traced: the number of steps in the trace that was written.
        problem: why the trace could not be written; None if it could.
    """

    def __init__(
        self, run: Path, num_steps: int, layers: Mapping[str, nn.Module], device: torch.device, *, main: bool
    ) -> None:
        self.path = run / NAME
        self.num_steps = min(NUM_STEPS, max(1, num_steps - 1))
        self.first = min(WARM_UP, num_steps - self.num_steps)
        self.layers = layers
        self.device = device
        self.main = main
        self.running = False
        self.done = False
        self.num_traced = 0
        self.problem: str | None = None
        self.tracer: profile | None = None
        self.range: record_function | None = None
        self.trace = ExitStack()
        self.began = self.step = 0

    def begin(self, step: int) -> None:
        """Called before each step, when `step` are done."""
        self.step = step + 1
        if self.done:
            self.running = self.running and step <= self.began + self.num_traced
        elif not self.running and step >= self.first:
            self.running, self.began = True, step

    def part(self, name: str) -> AbstractContextManager[object]:
        """A context called `name` in the trace. The first one begins the trace; the first in a step, its range."""
        if not self.running or self.done or not self.main:
            return nullcontext()
        if self.tracer is None:
            self.tracer = self.start()
        if self.range is None:
            self.range = record_function(f"step {self.step}")
            self.range.__enter__()
        return record_function(name)

    def end(self, step: int) -> None:
        """Called after each step, when `step` are done."""
        if not self.running or self.done:
            return
        if self.range is not None:
            self.range.__exit__(None, None, None)
            self.range = None
        if step - self.began == self.num_steps:
            self.finish(step)

    def leave(self, step: int) -> None:
        """Called at the end of an epoch: ends the trace, or, if it has no steps yet, leaves it to the next epoch."""
        if not self.running or self.done:
            return
        if step > self.began:
            self.finish(step)
        else:
            self.running = False

    def start(self) -> profile:
        """Starts the trace, with the names of the model's layers."""
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # it complains of each GPU that is not there
        is_gpu = self.device.type == "cuda"
        tracer = profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if is_gpu else [])])
        self.trace.enter_context(tracer)
        for name, layer in self.layers.items():
            kind = type(layer).__name__.removeprefix("FSDP")  # which fully_shard adds to the name of a class
            for hook in named(layer, f"{kind} {name}"):
                self.trace.enter_context(hook)
        return tracer

    def finish(self, step: int) -> None:
        """Ends the trace and writes it."""
        self.done, self.num_traced = True, step - self.began
        tracer, self.tracer = self.tracer, None
        if tracer is None:
            return
        self.trace.close()
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            tracer.export_chrome_trace(str(self.path))
            key = "self_device_time_total" if self.device.type == "cuda" else "self_cpu_time_total"
            table = tracer.key_averages().table(sort_by=key, row_limit=NUM_ROWS, max_name_column_width=80)
            (self.path.parent.parent / OPERATIONS).write_text(table)
        except OSError as error:
            self.problem = f"the trace could not be written: {error.strerror}: {self.path}"


def named(module: nn.Module, name: str) -> list[RemovableHandle]:
    """Registers hooks that make the forward pass of `module` a range called `name` in the trace."""
    open_ranges: list[record_function] = []

    def before(*_: Any) -> None:
        open_ranges.append(record_function(name))
        open_ranges[-1].__enter__()

    def after(*_: Any) -> None:
        if open_ranges:
            open_ranges.pop().__exit__(None, None, None)

    return [module.register_forward_pre_hook(before), module.register_forward_hook(after, always_call=True)]
