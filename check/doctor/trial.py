"""A short collective of each kind, with values that are known."""

import contextlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from threading import Thread
from typing import Any

import torch
import torch.distributed

from check.doctor.circle import COLLECTIVES, Circle, dist
from check.doctor.findings import Finding, Part
from check.doctor.verdict import NOT_OVER, START, Told, judge, needs_pairs
from check.options import DoctorOptions
from train.backends import backend_for, open_group
from train.errors import MusterError
from train.world import World, close_group, device_for, silent_stdout

MOST_S, SLACK_S = 30.0, 10.0
"""Seconds for one collective; seconds by which a rank may be later than another."""

PAIRS_UP_TO = 64


@dataclass
class Progress:
    """How far this rank is.

    Attributes:
        told: what it will say.
        since: when it came to what it does now, by the monotonic clock.
        pairs: of the second round, those whose sum was wrong.
    """

    told: Told
    since: float = field(default_factory=time.monotonic)
    pairs: list[list[int]] = field(default_factory=list[list[int]])


def look(world: World, options: DoctorOptions) -> Part:
    """What comes of one collective of each kind. Opens the process group, and closes it.

    Ports that are closed between nodes stop it too: where `reach` has found a fault there is nothing to be learnt here.
    """
    if world.store is None:
        return Part("collectives", "one rank: nothing to say to others")
    world, unlike = _with_device(world, options)
    if unlike:
        return Part("collectives", "not tried", [unlike] if world.main else [])
    limit_s = max(5.0, min(MOST_S, options.timeout_s / 2))
    turn = f"trial/{next(world.turns)}"
    started = time.monotonic()
    progress = Progress(Told(world.rank))
    _within(limit_s, progress, lambda: _all(world, turn, limit_s, progress))
    _set(world, f"{turn}/told/{world.rank}", progress.told.text())
    part = _conclude(world, turn, limit_s, progress) if world.main else _follow(world, turn, limit_s, progress)
    _close(world, progress)
    took_s = round(time.monotonic() - started, 2)
    return replace(part, values={**part.values, "seconds": took_s, "backend": world.backend})


def _with_device(world: World, options: DoctorOptions) -> tuple[World, Finding | None]:
    """`world` with what it speaks through, or what keeps the ranks from speaking at all."""
    try:
        device, wrong = device_for(world, options.device), ""
        world = replace(world, device=device, backend=backend_for("auto", device, "ddp"))
    except MusterError as error:
        wrong = f"{error.wrong} ({error.seen})"
    kinds = world.gather([world.host, wrong or world.device.type, bool(wrong)])
    if not any(is_wrong for *_, is_wrong in kinds) and len({kind for _, kind, _ in kinds}) == 1:
        return world, None
    seen = dict.fromkeys(f"{host}: {kind}" for host, kind, _ in kinds)
    hosts = dict.fromkeys(host for host, kind, is_wrong in kinds if is_wrong or kind == "cpu")
    return world, Finding(
        "fault",
        "device",
        ", ".join(hosts),
        "the ranks do not all have the same kind of device",
        "; ".join(seen),
        "ask for as many GPUs on each node as it has ranks, or give --device=cpu",
    )


def _all(world: World, turn: str, limit_s: float, progress: Progress) -> None:
    """Opens the group and calls each collective once; stops at the first that does not come back."""
    # gloo itself gives up after the time of its group. NCCL would end the process, so here that is left to `_within`.
    group_s = int(limit_s) if world.backend == "gloo" else 10 * int(limit_s)
    _enter(world, turn, START, progress)
    open_group(replace(world, timeout_s=group_s))
    circle = Circle(range(world.world_size), world.rank, world.device)
    for name, call in COLLECTIVES.items():
        _enter(world, turn, name, progress)
        try:
            progress.told.wrong[name] = [list(wrong) for wrong in call(circle)]
        except (RuntimeError, NotImplementedError) as error:
            if "not support" not in str(error) and "not implemented" not in str(error):
                raise
            progress.told.missing.append(name)
    progress.told.at = ""


def _enter(world: World, turn: str, name: str, progress: Progress) -> None:
    progress.told.at, progress.since = name, time.monotonic()
    _set(world, f"{turn}/at/{world.rank}", name)


def _within(limit_s: float, progress: Progress, body: Callable[[], None]) -> None:
    """Runs `body` until it is over, or has been at one thing for longer than `limit_s`; says so in `progress`."""
    raised: list[str] = []

    def run() -> None:
        try:
            body()
        except Exception as error:
            raised.append(f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}")

    progress.since = time.monotonic()
    thread = Thread(target=run, daemon=True)
    thread.start()
    while thread.is_alive() and time.monotonic() < progress.since + limit_s + SLACK_S:
        thread.join(0.2)
    if thread.is_alive() or raised:
        progress.told.stuck = progress.told.at or START
        progress.told.why = raised[0] if raised else f"{NOT_OVER} after {time.monotonic() - progress.since:.0f} s"


def _conclude(world: World, turn: str, limit_s: float, progress: Progress) -> Part:
    """Rank 0's part: hears all, asks for a second round where that can tell more."""
    heard = _hear(world, f"{turn}/told", limit_s + 2 * SLACK_S)
    told = [Told.read(text) if text else Told(rank) for rank, text in enumerate(heard)]
    places = {rank: _get(world, f"{turn}/at/{rank}") for rank in range(world.world_size)}
    name = needs_pairs(told) if all(heard) and 2 < world.world_size <= PAIRS_UP_TO else ""
    _set(world, f"{turn}/second", name)
    pairs: list[list[int]] = []
    if name:
        _within(limit_s, progress, lambda: _pairs(world, turn, name, progress))
        _set(world, f"{turn}/pairs/{world.rank}", json.dumps(progress.pairs))
        texts = _hear(world, f"{turn}/pairs", limit_s + 2 * SLACK_S)
        pairs = [pair for text in texts if text for pair in json.loads(text)]
    return judge(told, places, {(min(pair), max(pair)) for pair in pairs}, world.hosts or _unnamed(world), limit_s)


def _follow(world: World, turn: str, limit_s: float, progress: Progress) -> Part:
    """The others' part: does what rank 0 asks for."""
    assert world.store is not None
    with contextlib.suppress(torch.distributed.DistError):
        world.store.wait([f"{turn}/second"], timedelta(seconds=2 * limit_s + 4 * SLACK_S))
        name = _get(world, f"{turn}/second")
        if name:
            _within(limit_s, progress, lambda: _pairs(world, turn, name, progress))
            _set(world, f"{turn}/pairs/{world.rank}", json.dumps(progress.pairs))
    return Part("collectives")


def _pairs(world: World, turn: str, name: str, progress: Progress) -> None:
    """The collective once more between each rank and the next: a rank whose share is wrong spoils two of these."""
    if world.device.type == "cuda":
        torch.cuda.set_device(world.device)  # each thread has one of its own
    for rank in range(world.world_size):
        pair = sorted((rank, (rank + 1) % world.world_size))
        _enter(world, turn, name, progress)
        with silent_stdout():
            group: Any = dist.new_group(pair)
        if world.rank in pair and COLLECTIVES[name](Circle(pair, world.rank, world.device, group)):
            progress.pairs.append(pair)


def _hear(world: World, place: str, limit_s: float) -> list[str]:
    """What each rank has said at `place`; empty for those that have not by then."""
    end = time.monotonic() + limit_s
    texts: list[str] = []
    for rank in range(world.world_size):
        while not _get(world, f"{place}/{rank}") and time.monotonic() < end:
            time.sleep(0.05)
        texts.append(_get(world, f"{place}/{rank}"))
    return texts


def _set(world: World, key: str, text: str) -> None:
    assert world.store is not None
    world.store.set(key, text)


def _get(world: World, key: str) -> str:
    assert world.store is not None
    return world.store.get(key).decode() if world.store.check([key]) else ""


def _unnamed(world: World) -> Sequence[str]:
    return [f"rank {rank}" for rank in range(world.world_size)]


def _close(world: World, progress: Progress) -> None:
    """Ends the group; one that is stuck is given up."""
    if not progress.told.stuck:
        close_group()
        return
    abort: Any = getattr(torch.distributed.distributed_c10d, "_abort_process_group", None)
    if world.backend != "gloo" and abort is not None and torch.distributed.is_initialized():
        thread = Thread(target=abort, daemon=True)
        thread.start()
        thread.join(SLACK_S)
