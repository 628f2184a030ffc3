"""What a trace says: the shares of its steps, and the operations that took longest."""

import gzip
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypedDict

from torch.profiler import profile

Span = tuple[float, float]
"""Begin and end, in microseconds."""

TOP = 8
"""How many operations are told."""

COMPILED = "## Call CompiledFxGraph"
"""How the range of a graph begins that torch.compile has made for a CPU: its own kernels have no names there."""

STEP = re.compile(r"step \d+")


class Operation(TypedDict):
    """An operation of the profiled steps: how often, and how long without those it calls, in all."""

    name: str
    calls: int
    seconds: float


def operations(tracer: profile, *, is_gpu: bool) -> list[Operation]:
    """Those that took longest, on the device."""
    key = "self_device_time_total" if is_gpu else "self_cpu_time_total"
    events: Any = tracer.key_averages()
    found: dict[str, Operation] = {}
    for event in events:
        name = "kernels of compiled graphs" if event.key.startswith(COMPILED) else event.key
        is_kernel = event.device_type.name == "CUDA" and not event.is_user_annotation
        if is_kernel if is_gpu else "::" in name or name != event.key:  # and no range of ours
            one = found.setdefault(name, Operation(name=name, calls=0, seconds=0.0))
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
