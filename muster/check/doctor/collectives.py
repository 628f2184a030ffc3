"""A call of each collective of bench, with its values checked: who spoils them, and who does not come back."""

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from threading import Thread
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from muster.check.bench.collectives import ALL, BARRIER, ELEMENT, WrongValues, by_name
from muster.check.doctor.finding import Finding, distinct
from muster.check.options import DoctorOptions
from muster.check.ranks import LOOK_S, fault_in, listed
from muster.check.ranks import gather as gather_values
from muster.train.distributed.backends import backend_for, open_group
from muster.train.distributed.world import World, close_group, device_for, silent_stdout
from muster.train.health.faults import agree

NAME = "collectives"

SIZE = 64 << 10
"""Bytes of each message."""

SUMS = ("all_reduce", "reduce_scatter", "reduce")
"""What is received is made by all ranks: only pairs of them tell who spoilt it."""

MOST_S, SLACK_S = 30.0, 10.0
"""Seconds for one collective; seconds by which a rank may be later than another."""

PAIRS_UP_TO = 64
"""Up to so many ranks a wrong sum is looked for between pairs."""

START = "the start of the process group"
NOT_OVER = "not over"
"""What a rank says that had to be left where it was."""

ORDER = (START, *(one.name for one in ALL), BARRIER)

MOST = 4


@dataclass
class Progress:
    """How far a rank has come.

    Attributes:
        at: what it came to last; empty when all was over.
        why: why it came no further; empty where nothing stopped it.
        wrong: what was wrong in what it got, by collective.
        pairs: those between which a sum was wrong.
    """

    rank: int
    at: str = START
    why: str = ""
    wrong: dict[str, WrongValues] = field(default_factory=dict[str, WrongValues])
    pairs: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])


@dataclass(frozen=True)
class Facts:
    """What came of the collectives on one rank.

    Attributes:
        progress: how far it came; None where nothing was tried.
        device: the kind that it has.
        limit_s: seconds that a collective was given.
    """

    progress: Progress | None
    device: str
    backend: str = ""
    limit_s: float = 0.0


def gather(world: World, options: DoctorOptions) -> Facts:
    """What comes of one call of each collective. Opens the process group, and closes it.

    Ports that are closed between nodes stop it too: where `ports` has found a fault there is nothing to be learnt here.

    Raises:
        MusterError: on all ranks: one has no device, or has died in it.
    """
    device = agree(world, lambda: device_for(world, options.device))
    if world.world_size == 1 or len(set(gather_values(world, device.type))) > 1:
        return Facts(None, device.type)
    world = replace(world, device=device, backend=backend_for("auto", device, "ddp"))
    trial = Trial(world, max(5.0, min(MOST_S, options.timeout_s / 2)))
    trial.run(trial.call_all)
    told = msgspec.convert(gather_values(world, asdict(trial.own), to_all=False), list[Progress])
    # What a rank has told only rank 0 knows: it chooses for all.
    name = gather_values(world, wrong_sum(told) if world.main and 2 < world.world_size <= PAIRS_UP_TO else "")[0]
    if name:
        trial.run(lambda: trial.call_pairs(name))
    trial.close()
    return Facts(trial.own, device.type, world.backend or "", trial.limit_s)


def findings(by_host: Mapping[str, Sequence[Facts]]) -> list[Finding]:
    """What is wrong with the collectives."""
    devices = {host: distinct([one.device for one in facts]) for host, facts in by_host.items()}
    if len({one.device for facts in by_host.values() for one in facts}) > 1:
        fix = "ask for as many GPUs on each node as it has ranks, or give --device=cpu"
        seen = "; ".join(f"{host}: {device}" for host, device in devices.items())
        hosts = ", ".join(host for host, device in devices.items() if "cpu" in device)
        return [Finding("failed", "device", hosts, "the ranks do not all have the same kind of device", seen, fix)]
    told = [(one.progress, host) for host, facts in by_host.items() for one in facts if one.progress is not None]
    told.sort(key=lambda one: one[0].rank)
    ranks, hosts = [one for one, _ in told], [host for _, host in told]
    limit_s = next(iter(by_host.values()))[0].limit_s
    found = [_stuck(ranks, hosts, limit_s)] if any(one.why for one in ranks) else []
    pairs = {pair for one in ranks for pair in one.pairs}
    by_culprits: dict[tuple[int, ...], list[str]] = {}
    for name in ORDER:
        if any(name in one.wrong for one in ranks):
            by_culprits.setdefault(_culprits(name, ranks, pairs), []).append(name)
    return found + [_spoilt(culprits, names, ranks, hosts) for culprits, names in by_culprits.items()]


def summary(by_host: Mapping[str, Sequence[Facts]]) -> str:
    """How many were called, and by which backend."""
    ranks = [one for facts in by_host.values() for one in facts]
    if len(ranks) == 1:
        return "one rank: nothing to say to others"
    return f"{len(ALL) + 1} kinds between {len(ranks)} ranks by {ranks[0].backend}, all values right"


@dataclass
class Trial:
    """The calls of all collectives, which may hang: they are made in a thread, and what came of them is in `own`.

    Attributes:
        limit_s: seconds that a collective is given.
    """

    world: World
    limit_s: float

    def __post_init__(self) -> None:
        self.own = Progress(self.world.rank)
        self.since = time.monotonic()

    def run(self, calls: Callable[[], None]) -> None:
        """Returns when `calls` are over, or have been at one of them for too long; `own` tells it then."""
        raised: list[str] = []

        def call() -> None:
            try:
                calls()
            except Exception as error:
                raised.append(f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}")

        self.since = time.monotonic()
        thread = Thread(target=call, daemon=True)
        thread.start()
        # NCCL may wait for a rank that died; its own connection, as a collective may hold the other one.
        store: Any = self.world.store and self.world.store.clone()
        while thread.is_alive() and time.monotonic() < self.since + self.limit_s + SLACK_S:
            thread.join(LOOK_S)
            if store and fault_in(store):
                break
        if thread.is_alive() or raised:
            self.own.why = raised[0] if raised else f"{NOT_OVER} after {time.monotonic() - self.since:.0f} s"

    def call_all(self) -> None:
        """Opens the group and calls each collective once; stops at the first that does not come back."""
        # gloo gives up after the time of its group. NCCL would end the process: that is left to `run`.
        group_s = int(self.limit_s) if self.world.backend == "gloo" else 10 * int(self.limit_s)
        open_group(replace(self.world, timeout_s=group_s))
        for collective in ALL:
            self._enter(collective.name)
            wrong = collective.check(self.world, SIZE, 1)
            if wrong is not None:
                self.own.wrong[collective.name] = wrong
        self._enter(BARRIER)
        dist.barrier()
        self.own.at = ""

    def call_pairs(self, name: str) -> None:
        """The collective once more between each rank and the next: a rank whose share is wrong spoils two of these."""
        world = self.world
        if world.device.type == "cuda":
            torch.cuda.set_device(world.device)  # each thread has one of its own
        collective = by_name(name)
        for rank in range(world.world_size):
            pair = sorted((rank, (rank + 1) % world.world_size))
            self._enter(name)
            with silent_stdout():
                group: Any = dist.new_group(pair)
            if world.rank in pair:
                of_two = replace(world, rank=pair.index(world.rank), world_size=2)
                if collective.check(of_two, SIZE, 2, group) is not None:
                    self.own.pairs.append((pair[0], pair[1]))

    def _enter(self, name: str) -> None:
        self.own.at, self.since = name, time.monotonic()

    def close(self) -> None:
        """Ends the group; one that is stuck is given up."""
        if not self.own.why:
            close_group()
            return
        abort: Any = getattr(dist.distributed_c10d, "_abort_process_group", None)
        if self.world.backend != "gloo" and abort is not None and dist.is_initialized():
            thread = Thread(target=abort, daemon=True)
            thread.start()
            thread.join(SLACK_S)


def wrong_sum(ranks: Sequence[Progress]) -> str:
    """The sum that is wrong on several ranks, so that only pairs tell whose share it was; empty if none is."""
    if any(one.why for one in ranks):
        return ""
    for name in SUMS:
        num_wrong = sum(name in one.wrong for one in ranks)
        # One rank's results alone are that rank's own fault, unless it is the only one to get any.
        if num_wrong > 1 or (num_wrong and name == "reduce"):
            return name
    return ""


def _culprits(name: str, ranks: Sequence[Progress], pairs: Collection[tuple[int, int]]) -> tuple[int, ...]:
    """The ranks one of which is to blame; none where that can't be told."""
    if name in SUMS and pairs:
        spoilt = sorted({rank for pair in pairs for rank in pair})
        return tuple(rank for rank in spoilt if all(rank in pair for pair in pairs)) or tuple(spoilt)
    sources = {one.wrong[name].source for one in ranks if name in one.wrong}
    receivers = [one.rank for one in ranks if name in one.wrong]
    known = tuple(source for source in sources if source is not None)
    if len(sources) == 1 and known:
        return known if len(receivers) > 1 else tuple(dict.fromkeys((*known, *receivers)))
    return tuple(receivers) if len(receivers) == 1 and name != "reduce" else ()


def _spoilt(culprits: Sequence[int], names: Sequence[str], ranks: Sequence[Progress], hosts: Sequence[str]) -> Finding:
    lines: list[str] = []
    for wrong in (one.wrong[name] for name in names for one in ranks if name in one.wrong):
        origin = "" if wrong.source is None else f" from rank {wrong.source}"
        seen = f"{wrong.found} in place of {wrong.expected:g}, {wrong.count} of {wrong.size // ELEMENT} numbers"
        lines.append(f"{wrong.collective} on rank {wrong.rank} ({wrong.host}): {seen}{origin}")
    more = [f"and {len(lines) - MOST} more"] if len(lines) > MOST else []
    who = " and ".join(f"rank {rank} on {hosts[rank]}" for rank in culprits)
    by = {0: "it can't be told by which rank", 1: f"by {who}"}.get(len(culprits), f"between {who}")
    return Finding(
        "failed",
        "collective",
        " -> ".join(dict.fromkeys(hosts[rank] for rank in culprits)),
        f"{', '.join(names)} {'gives' if len(names) == 1 else 'give'} wrong values: {by}",
        "; ".join([*lines[:MOST], *more]),
        "start without that host, and tell the administrators: memory, GPU (`nvidia-smi -q -d ECC`) or network "
        "adapter; on GPUs try `export NCCL_PROTO=Simple` too",
    )


def _stuck(ranks: Sequence[Progress], hosts: Sequence[str], limit_s: float) -> Finding:
    """The first that did not end, and who did not come back from it."""
    stopped = [one for one in ranks if one.why]
    first = min((one.at for one in stopped), key=ORDER.index)
    at_first = [one for one in stopped if one.at == first]
    # gloo gives up by itself: who is held by something else does not.
    held = [one.rank for one in at_first if one.why.startswith(NOT_OVER)]
    blamed = held if len(held) < len(ranks) else []
    names = listed([f"rank {rank} on {hosts[rank]}" for rank in blamed], MOST)
    return Finding(
        "failed",
        "collective",
        ", ".join(dict.fromkeys(hosts[rank] for rank in blamed)),
        f"{first} did not end" + (f": {names} did not come back" if blamed else ", though all ranks came to it"),
        f"{limit_s:.0f} s were allowed; rank {at_first[0].rank} ({hosts[at_first[0].rank]}): {at_first[0].why}",
        "look what those ranks wrote, and start without their host"
        if blamed
        else "export TORCH_DISTRIBUTED_DEBUG=DETAIL, and on GPUs NCCL_DEBUG=INFO, and start again",
    )
