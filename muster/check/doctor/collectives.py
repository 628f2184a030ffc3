"""One call of each collective of bench, with its values checked: which rank makes them wrong, and which rank hangs."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from threading import Thread
from typing import Any

import torch.distributed as dist

from muster.check.bench.collectives import ALL, BARRIER, NAMES, WrongValues
from muster.check.doctor.finding import Finding
from muster.check.options import DoctorOptions
from muster.check.ranks import with_device
from muster.train.distributed.backends import open_group
from muster.train.distributed.world import FAULT_POLL_S, World, close_group, fault_in
from muster.units import listed

NAME = "collectives"

SIZE = 64 << 10
"""Bytes of each message."""

SLACK_S = 10.0
"""Seconds by which a rank may be later than another."""

START = "the start of the process group"
NOT_OVER = "not over"
"""The beginning of `Facts.why` of a rank whose call did not return."""

ORDER = (START, *NAMES)


@dataclass
class Facts:
    """The results of the collectives on one rank.

    Attributes:
        backend: gloo or nccl.
        at: the last step that the rank began: START or a collective's name.
        why: why it stopped there; empty where it completed all steps.
        wrong: the wrong values that it received, by collective.
    """

    rank: int
    backend: str
    at: str = START
    why: str = ""
    wrong: dict[str, WrongValues] = field(default_factory=dict[str, WrongValues])


def gather(world: World, options: DoctorOptions) -> Facts:
    """The results of one call of each collective. Opens the process group, and closes it unless a call failed or hung.

    A closed port between nodes stops the calls too: after a failure in `ports` they would show nothing new.

    Raises:
        MusterError: on all ranks: a rank's device is missing, shared or unlike the others', or a rank died meanwhile.
    """
    world = with_device(world, options.device)
    own = Facts(world.rank, world.backend or "")
    if world.world_size == 1:
        return own
    # Half of the time for each call: the results have to reach rank 0 within the whole.
    limit_s = max(5.0, options.timeout_s / 2)

    def call_all() -> None:
        # gloo raises after the group's time-out. NCCL would end the process, so it gets longer than the wait below.
        group_s = int(limit_s) if world.backend == "gloo" else 10 * int(limit_s)
        try:
            open_group(replace(world, timeout_s=group_s))
            for collective in ALL:
                own.at = collective.name
                if (wrong := collective.check(world, SIZE, 1)) is not None:
                    own.wrong[collective.name] = wrong
            own.at = BARRIER
            dist.barrier()
        except Exception as error:
            own.why = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"

    # In a thread, as the calls may hang.
    thread = Thread(target=call_all, daemon=True)
    thread.start()
    # To notice a dead rank, for which NCCL may wait; by its own connection, as a collective may block the other one.
    store: Any = world.store and world.store.clone()
    at, since = own.at, time.monotonic()
    while thread.is_alive() and time.monotonic() < since + limit_s + SLACK_S:
        thread.join(FAULT_POLL_S)
        if own.at != at:
            at, since = own.at, time.monotonic()
        if store and fault_in(store):
            break
    if thread.is_alive():
        own.why = own.why or f"{NOT_OVER} after {time.monotonic() - since:.0f} s"
    if not own.why:
        close_group()
    return own


def findings(by_host: Mapping[str, Sequence[Facts]]) -> list[Finding]:
    host_of = {one.rank: host for host, facts in by_host.items() for one in facts}
    ranks = sorted((one for facts in by_host.values() for one in facts), key=lambda one: one.rank)
    found = [_stuck(ranks, host_of)] if any(one.why for one in ranks) else []
    by_culprits: dict[tuple[int, ...], list[str]] = {}
    for name in ORDER:
        if any(name in one.wrong for one in ranks):
            by_culprits.setdefault(_culprits(name, ranks), []).append(name)
    return found + [_spoilt(culprits, names, ranks, host_of) for culprits, names in by_culprits.items()]


def summary(by_host: Mapping[str, Sequence[Facts]]) -> str:
    ranks = [one for facts in by_host.values() for one in facts]
    if len(ranks) == 1:
        return "one rank: nothing to communicate"
    return f"{len(ALL) + 1} kinds between {len(ranks)} ranks by {ranks[0].backend}, all values right"


def _culprits(name: str, ranks: Sequence[Facts]) -> tuple[int, ...]:
    """The ranks of which one makes the values wrong; empty where that is unknown."""
    receivers = tuple(one.rank for one in ranks if name in one.wrong)
    sources = {one.wrong[name].source for one in ranks if name in one.wrong}
    if len(sources) == 1 and (source := sources.pop()) is not None:
        return (source,) if len(receivers) > 1 else tuple(dict.fromkeys((source, *receivers)))
    # If a sum is wrong at several ranks, or at the only rank that receives it, any rank's addend may be the cause.
    return receivers if len(receivers) == 1 and name != "reduce" else ()


def _spoilt(
    culprits: Sequence[int], names: Sequence[str], ranks: Sequence[Facts], host_of: Mapping[int, str]
) -> Finding:
    wrong = [one.wrong[name] for name in names for one in ranks if name in one.wrong]
    lines = [f"{one.collective} on rank {one.rank} ({one.host}): {one}" for one in wrong]
    who = " and ".join(f"rank {rank} on {host_of[rank]}" for rank in culprits)
    by = {0: "the rank at fault is unknown", 1: f"by {who}"}.get(len(culprits), f"between {who}")
    return Finding(
        "failed",
        "collective",
        " -> ".join(dict.fromkeys(host_of[rank] for rank in culprits)),
        f"{', '.join(names)} {'gives' if len(names) == 1 else 'give'} wrong values: {by}",
        listed(lines, between="; "),
        "start without that host, and tell the administrators: memory, GPU (`nvidia-smi -q -d ECC`) or network "
        "adapter; on GPUs try `export NCCL_PROTO=Simple` too",
    )


def _stuck(ranks: Sequence[Facts], host_of: Mapping[int, str]) -> Finding:
    stopped = [one for one in ranks if one.why]
    at_first = [one for one in stopped if one.at == min((one.at for one in stopped), key=ORDER.index)]
    first = at_first[0]
    # A rank that waits in gloo gets a time-out; a rank that something else holds does not.
    held = [one.rank for one in at_first if one.why.startswith(NOT_OVER)]
    seen = f"rank {first.rank} ({host_of[first.rank]}): {first.why}"
    hosts, wrong = "", f"{first.at} did not end, though all ranks reached it"
    fix = "export TORCH_DISTRIBUTED_DEBUG=DETAIL, and on GPUs NCCL_DEBUG=INFO, and start again"
    if 0 < len(held) < len(ranks):
        names = listed(f"rank {rank} on {host_of[rank]}" for rank in held)
        hosts, wrong = listed(host_of[rank] for rank in held), f"{first.at} did not end: {names} did not return"
        fix = "look at the output of those ranks, and start without their host"
    return Finding("failed", "collective", hosts, wrong, seen, fix)
