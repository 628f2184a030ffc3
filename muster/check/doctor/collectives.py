"""A call of each collective of bench, with its values checked: who spoils them, and who does not come back."""

import json
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist

from muster.check.bench.collectives import ALL, BARRIER, Collective, is_lacking
from muster.check.bench.sizes import ELEMENT
from muster.check.doctor.findings import Finding, Part
from muster.check.options import DoctorOptions
from muster.check.ranks import listed
from muster.errors import MusterError
from muster.train.backends import backend_for, open_group
from muster.train.world import World, close_group, device_for, silent_stdout

SIZE = 64 << 10
"""Bytes of each message."""

SUMS = ("all_reduce", "reduce_scatter", "reduce")
"""What is received is made by all ranks: only pairs of them tell who spoilt it."""

MOST_S, SLACK_S = 30.0, 10.0
"""Seconds for one collective; seconds by which a rank may be later than another."""

PAIRS_UP_TO = 64
"""Up to so many ranks a wrong sum is tried again between pairs."""

START = "the start of the process group"
NOT_OVER = "not over"
"""What a rank says that had to be left where it was."""

ORDER = ("", START, *(one.name for one in ALL), BARRIER)

MOST = 4


@dataclass
class Progress:
    """How far a rank has come.

    Attributes:
        at: what it came to last; empty when all was over; None where the rank has said nothing.
        wrong: (the rank that the values came from, None for several; what was seen), by collective.
        missing: the collectives that its backend does not have.
        stuck: what did not come back.
        why: what was said then.
        pairs: those between which a sum was wrong.
    """

    rank: int
    at: str | None = None
    wrong: dict[str, tuple[int | None, str]] = field(default_factory=dict[str, tuple[int | None, str]])
    missing: list[str] = field(default_factory=list[str])
    stuck: str = ""
    why: str = ""
    pairs: list[list[int]] = field(default_factory=list[list[int]])


def check(world: World, options: DoctorOptions) -> Part:
    """What comes of one call of each collective. Opens the process group, and closes it.

    Ports that are closed between nodes stop it too: where `ports` has found a fault there is nothing to be learnt here.
    """
    if world.store is None:
        return Part("collectives", "one rank: nothing to say to others")
    world, unlike = _with_device(world, options)
    if unlike:
        return Part("collectives", "not tried", [unlike] if world.main else [])
    started = time.monotonic()
    trial = Trial(world, max(5.0, min(MOST_S, options.timeout_s / 2)))
    part = trial.run()
    values = {**part.values, "seconds": round(time.monotonic() - started, 2), "backend": world.backend}
    return replace(part, values=values)


def _with_device(world: World, options: DoctorOptions) -> tuple[World, Finding | None]:
    """`world` with its device and backend, or why the ranks can't communicate at all."""
    try:
        device, wrong = device_for(world, options.device), ""
        world = replace(world, device=device, backend=backend_for("auto", device, "ddp"))
    except MusterError as error:
        wrong = f"{error.wrong} ({error.seen})"
    kinds = world.gather([world.host, wrong or world.device.type, bool(wrong)])
    if not any(is_wrong for *_, is_wrong in kinds) and len({kind for _, kind, _ in kinds}) == 1:
        return world, None
    return world, Finding(
        "fault",
        "device",
        ", ".join(dict.fromkeys(host for host, kind, is_wrong in kinds if is_wrong or kind == "cpu")),
        "the ranks do not all have the same kind of device",
        "; ".join(dict.fromkeys(f"{host}: {kind}" for host, kind, _ in kinds)),
        "ask for as many GPUs on each node as it has ranks, or give --device=cpu",
    )


@dataclass
class Trial:
    """The calls of all collectives, which may hang: they are made in a thread, and what a rank knows is in the store.

    Attributes:
        limit_s: seconds that a collective is given.
    """

    world: World
    limit_s: float

    def __post_init__(self) -> None:
        assert self.world.store is not None
        self.store = self.world.store
        self.turn = f"collectives/{next(self.world.turns)}"
        self.own = Progress(self.world.rank)
        self.since = time.monotonic()

    def run(self) -> Part:
        """The answer, on rank 0; the others do what it asks for."""
        self._within_limit(self._all)
        self._tell("first")
        if self.world.main:
            part = self._conclude()
        else:
            part = Part("collectives")
            self._second_round()
        self._close()
        return part

    def _all(self) -> None:
        """Opens the group and calls each collective once; stops at the first that does not come back."""
        # gloo gives up after the time of its group. NCCL would end the process: that is left to `_within_limit`.
        group_s = int(self.limit_s) if self.world.backend == "gloo" else 10 * int(self.limit_s)
        self._enter(START)
        open_group(replace(self.world, timeout_s=group_s))
        for collective in ALL:
            self._enter(collective.name)
            try:
                self._check(collective)
            except (RuntimeError, NotImplementedError) as error:
                if not is_lacking(str(error)):
                    raise
                self.own.missing.append(collective.name)
        self._enter(BARRIER)
        dist.barrier()
        self.own.at = ""

    def _check(self, collective: Collective) -> None:
        wrong = collective.check(self.world, SIZE, 1)
        if wrong is None:
            return
        size = collective.size(self.world, SIZE)
        part = size // ELEMENT // self.world.world_size
        # More than fits into the part of one rank is wrong: it is of several.
        source = {
            "all_gather": wrong.index // part if wrong.count <= part else None,
            "all_to_all": wrong.index // part if wrong.count <= part else None,
            "broadcast": 0,
            "send_recv": (self.world.rank - 1) % self.world.world_size,
        }.get(collective.name)
        seen = f"{wrong.found} in place of {wrong.expected:g}, {wrong.count} of {size // ELEMENT} numbers"
        self.own.wrong[collective.name] = (source, seen)

    def _pairs(self, name: str) -> None:
        """The collective once more between each rank and the next: a rank whose share is wrong spoils two of these."""
        world = self.world
        if world.device.type == "cuda":
            torch.cuda.set_device(world.device)  # each thread has one of its own
        collective = next(one for one in ALL if one.name == name)
        for rank in range(world.world_size):
            pair = sorted((rank, (rank + 1) % world.world_size))
            self._enter(name)
            with silent_stdout():
                group: Any = dist.new_group(pair)
            if world.rank in pair:
                of_two = replace(world, rank=pair.index(world.rank), world_size=2)
                if collective.check(of_two, SIZE, 2, group) is not None:
                    self.own.pairs.append(pair)

    def _enter(self, name: str) -> None:
        self.own.at, self.since = name, time.monotonic()
        self.store.set(f"{self.turn}/at/{self.world.rank}", name)

    def _within_limit(self, body: Callable[[], None]) -> None:
        """Runs `body` until it is over, or has been at one thing for too long; says so in `own`."""
        raised: list[str] = []

        def run() -> None:
            try:
                body()
            except Exception as error:
                raised.append(f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}")

        self.since = time.monotonic()
        thread = Thread(target=run, daemon=True)
        thread.start()
        while thread.is_alive() and time.monotonic() < self.since + self.limit_s + SLACK_S:
            thread.join(0.2)
        if thread.is_alive() or raised:
            self.own.stuck = self.own.at or START
            self.own.why = raised[0] if raised else f"{NOT_OVER} after {time.monotonic() - self.since:.0f} s"

    def _conclude(self) -> Part:
        """Rank 0's part: hears all, and asks for a second round where that can tell more."""
        ranks = self._hear("first")
        places = [self._get(f"{self.turn}/at/{rank}") for rank in range(self.world.world_size)]
        name = wrong_sum(ranks) if 2 < self.world.world_size <= PAIRS_UP_TO else ""
        self.store.set(f"{self.turn}/again", name)
        pairs: set[tuple[int, int]] = set()
        if name:
            self._within_limit(lambda: self._pairs(name))
            self._tell("second")
            pairs = {(pair[0], pair[1]) for rank in self._hear("second") for pair in rank.pairs}
        hosts = self.world.hosts or [f"rank {rank}" for rank in range(self.world.world_size)]
        missing = sorted({name for rank in ranks for name in rank.missing})
        says = f"{len(ALL) + 1 - len(missing)} kinds between {len(ranks)} ranks, all values right"
        if missing:
            says += f"; this torch has no {', '.join(missing)} here"
        found = findings(ranks, places, pairs, hosts, self.limit_s)
        return Part("collectives", says, found, {"missing": missing})

    def _second_round(self) -> None:
        """What the other ranks do when they have told: what rank 0 asks for."""
        try:
            self.store.wait([f"{self.turn}/again"], timedelta(seconds=2 * self.limit_s + 4 * SLACK_S))
            name = self._get(f"{self.turn}/again")
        except dist.DistError:
            return
        if name:
            self._within_limit(lambda: self._pairs(name))
            self._tell("second")

    def _tell(self, round_: str) -> None:
        self.store.set(f"{self.turn}/{round_}/{self.world.rank}", json.dumps(asdict(self.own)))

    def _hear(self, round_: str) -> list[Progress]:
        """What each rank has told; nothing but its number of those that have not in time."""
        end = time.monotonic() + self.limit_s + 2 * SLACK_S
        ranks: list[Progress] = []
        for rank in range(self.world.world_size):
            key = f"{self.turn}/{round_}/{rank}"
            while not self._get(key) and time.monotonic() < end:
                time.sleep(0.05)
            text = self._get(key)
            ranks.append(Progress(**json.loads(text)) if text else Progress(rank))
        return ranks

    def _get(self, key: str) -> str:
        return self.store.get(key).decode() if self.store.check([key]) else ""

    def _close(self) -> None:
        """Ends the group; one that is stuck is given up."""
        if not self.own.stuck:
            close_group()
            return
        abort: Any = getattr(dist.distributed_c10d, "_abort_process_group", None)
        if self.world.backend != "gloo" and abort is not None and dist.is_initialized():
            thread = Thread(target=abort, daemon=True)
            thread.start()
            thread.join(SLACK_S)


def wrong_sum(ranks: Sequence[Progress]) -> str:
    """The sum that is wrong on several ranks, so that only pairs tell whose share it was; empty if none is."""
    if any(one.stuck or one.at is None for one in ranks):
        return ""
    for name in SUMS:
        num_wrong = sum(name in one.wrong for one in ranks)
        # One rank's results alone are that rank's own fault, unless it is the only one to get any.
        if num_wrong > 1 or (num_wrong and name == "reduce"):
            return name
    return ""


def findings(
    ranks: Sequence[Progress],
    places: Sequence[str],
    pairs: Collection[tuple[int, int]],
    hosts: Sequence[str],
    limit_s: float,
) -> list[Finding]:
    """What is wrong with the collectives.

    Args:
        places: what each rank came to last, by its own word at that time.
        pairs: those between which a sum was wrong.
        hosts: by rank.
        limit_s: seconds that a collective was given.
    """
    found = [_stuck(ranks, places, hosts, limit_s)] if any(one.stuck or one.at is None for one in ranks) else []
    by_culprits: dict[tuple[int, ...], list[str]] = {}
    for name in ORDER:
        if any(name in one.wrong for one in ranks):
            by_culprits.setdefault(_culprits(name, ranks, pairs), []).append(name)
    return found + [_spoilt(culprits, names, ranks, hosts) for culprits, names in by_culprits.items()]


def _culprits(name: str, ranks: Sequence[Progress], pairs: Collection[tuple[int, int]]) -> tuple[int, ...]:
    """The ranks one of which is to blame; none where that can't be told."""
    if name in SUMS and pairs:
        spoilt = sorted({rank for pair in pairs for rank in pair})
        return tuple(rank for rank in spoilt if all(rank in pair for pair in pairs)) or tuple(spoilt)
    sources = {one.wrong[name][0] for one in ranks if name in one.wrong}
    receivers = [one.rank for one in ranks if name in one.wrong]
    known = tuple(source for source in sources if source is not None)
    if len(sources) == 1 and known:
        return known if len(receivers) > 1 else tuple(dict.fromkeys((*known, *receivers)))
    return tuple(receivers) if len(receivers) == 1 and name != "reduce" else ()


def _spoilt(culprits: Sequence[int], names: Sequence[str], ranks: Sequence[Progress], hosts: Sequence[str]) -> Finding:
    lines: list[str] = []
    for name in names:
        for one in ranks:
            source, seen = one.wrong.get(name, (None, ""))
            if seen:
                origin = "" if source is None else f" from rank {source}"
                lines.append(f"{name} on rank {one.rank} ({hosts[one.rank]}): {seen}{origin}")
    more = [f"and {len(lines) - MOST} more"] if len(lines) > MOST else []
    who = " and ".join(f"rank {rank} on {hosts[rank]}" for rank in culprits)
    by = {0: "it can't be told by which rank", 1: f"by {who}"}.get(len(culprits), f"between {who}")
    return Finding(
        "fault",
        "collective",
        " -> ".join(dict.fromkeys(hosts[rank] for rank in culprits)),
        f"{', '.join(names)} {'gives' if len(names) == 1 else 'give'} wrong values: {by}",
        "; ".join([*lines[:MOST], *more]),
        "start without that host, and tell the administrators: memory, GPU (`nvidia-smi -q -d ECC`) or network "
        "adapter; on GPUs try `export NCCL_PROTO=Simple` too",
    )


def _stuck(ranks: Sequence[Progress], places: Sequence[str], hosts: Sequence[str], limit_s: float) -> Finding:
    """What did not come back, and who did not come to it, or was lost in it."""
    began = [one.stuck for one in ranks if one.stuck] or [places[one.rank] for one in ranks if one.at is None]
    first = min(began, key=ORDER.index) or START
    late = [rank for rank, place in enumerate(places) if ORDER.index(place) < ORDER.index(first)]
    silent = [one.rank for one in ranks if one.at is None]
    # gloo gives up by itself: who is held by something else does not.
    held = [one.rank for one in ranks if one.stuck == first and one.why.startswith(NOT_OVER)]
    kinds = ((late, "did not come"), (silent, "said nothing any more"), (held, "did not come back"))
    telling = [(blamed, what) for blamed, what in kinds if 0 < len(blamed) < len(ranks)]
    blamed, what = telling[0] if telling else (held[:0], "")
    names = listed([f"rank {rank} on {hosts[rank]}" for rank in blamed], MOST)
    whys = [f"rank {one.rank} ({hosts[one.rank]}): {one.why}" for one in ranks if one.stuck == first]
    last = [f"rank {rank} came last to {places[rank] or 'nothing'}" for rank in blamed[:MOST]]
    return Finding(
        "fault",
        "collective",
        ", ".join(dict.fromkeys(hosts[rank] for rank in blamed)),
        f"{first} did not end" + (f": {names} {what}" if blamed else ", though all ranks came to it"),
        f"{limit_s:.0f} s were allowed; " + "; ".join([*whys[:1], *last]),
        "look what those ranks wrote, and start without their host"
        if blamed
        else "export TORCH_DISTRIBUTED_DEBUG=DETAIL, and on GPUs NCCL_DEBUG=INFO, and start again",
    )
