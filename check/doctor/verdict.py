"""From the ranks' reports of a trial to the rank that is to blame."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from check.doctor.circle import COLLECTIVES, SUMS, UNKNOWN
from check.doctor.findings import Finding, Part

START = "the start of the process group"
ORDER = ("", START, *COLLECTIVES)
NOT_OVER = "not over"
"""What a rank says that had to be left where it was."""

MOST = 4


@dataclass
class Told:
    """What a rank has seen.

    Attributes:
        at: what it came to last; empty when all was over; None where the rank has said nothing.
        wrong: (source, what was seen) of the values that were wrong, by collective.
        missing: the collectives that this torch does not have here.
        stuck: what did not come back.
        why: what was said then.
    """

    rank: int
    at: str | None = None
    wrong: dict[str, list[list[Any]]] = field(default_factory=dict[str, list[list[Any]]])
    missing: list[str] = field(default_factory=list[str])
    stuck: str = ""
    why: str = ""

    def text(self) -> str:
        """As it goes through the store."""
        return json.dumps(asdict(self))

    @classmethod
    def read(cls, text: str) -> "Told":
        """The other way."""
        return cls(**json.loads(text))


def needs_pairs(told: Sequence[Told]) -> str:
    """The sum that is wrong on several ranks, so that only smaller groups tell whose share it was; empty if none is."""
    if any(one.stuck for one in told):
        return ""
    for name in SUMS:
        seen = [one.rank for one in told if one.wrong.get(name)]
        # One rank's results alone are that rank's own fault, unless it is the only one to get any.
        if len(seen) > 1 or (seen and name == "reduce"):
            return name
    return ""


def judge(
    told: Sequence[Told],
    places: Mapping[int, str],
    pairs: set[tuple[int, int]],
    hosts: Sequence[str],
    limit_s: float,
) -> Part:
    """What is wrong with the collectives.

    Args:
        told: of all ranks, by rank.
        places: what each rank came to last, by its own word at that time.
        pairs: of the second round, those whose sum was wrong.
        hosts: by rank.
        limit_s: seconds that a collective was given.
    """
    stuck = [one for one in told if one.stuck or one.at is None]
    findings = [_stuck(told, places, hosts, limit_s)] if stuck else []
    wrong = [name for name in COLLECTIVES if any(one.wrong.get(name) for one in told)]
    blamed: dict[tuple[int, ...], list[str]] = {}
    for name in wrong:
        blamed.setdefault(_culprits(name, told, pairs if name in SUMS else set()), []).append(name)
    findings += [_spoilt(ranks, names, told, hosts) for ranks, names in blamed.items()]
    missing = sorted({name for one in told for name in one.missing})
    says = f"{len(COLLECTIVES) - len(missing)} kinds between {len(told)} ranks, all values right"
    if missing:
        says += f"; this torch has no {', '.join(missing)} here"
    return Part("collectives", says, findings, {"missing": missing})


def _culprits(name: str, told: Sequence[Told], pairs: set[tuple[int, int]]) -> tuple[int, ...]:
    """The ranks one of which is to blame; one where that can be told, none where it can be any."""
    if pairs:
        spoilt = {rank for pair in pairs for rank in pair}
        return tuple(sorted({rank for rank in spoilt if all(rank in pair for pair in pairs)} or spoilt))
    seen = {(one.rank, int(source)) for one in told for source, _ in one.wrong.get(name, ())}
    getters, sources = {getter for getter, _ in seen}, {source for _, source in seen}
    if sources == {UNKNOWN} or len(sources) > 1:
        if len(getters) == 1 and name != "reduce":
            return tuple(getters)
        return () if len(told) > 2 else (0, 1)
    if len(getters) > 1 or getters == sources:
        return tuple(sources)
    return (*sources, *getters)


def _spoilt(ranks: tuple[int, ...], names: Sequence[str], told: Sequence[Told], hosts: Sequence[str]) -> Finding:
    lines = [
        f"{name} on rank {one.rank} ({hosts[one.rank]}): {text}" + (f" from rank {source}" if source != UNKNOWN else "")
        for name in names
        for one in told
        for source, text in one.wrong.get(name, ())
    ]
    more = [f"and {len(lines) - MOST} more"] if len(lines) > MOST else []
    what = f"{', '.join(names)} {'gives' if len(names) == 1 else 'give'} wrong values"
    if not ranks:
        who = "it can't be told by which rank"
    elif len(ranks) == 1:
        who = f"by rank {ranks[0]} on {hosts[ranks[0]]}"
    else:
        who = "between " + " and ".join(f"rank {rank} on {hosts[rank]}" for rank in ranks)
    return Finding(
        "fault",
        "collective",
        " -> ".join(dict.fromkeys(hosts[rank] for rank in ranks)),
        f"{what}: {who}",
        "; ".join([*lines[:MOST], *more]),
        "start without that host, and tell the administrators: memory, GPU (`nvidia-smi -q -d ECC`) or network "
        "adapter; on GPUs try `export NCCL_PROTO=Simple` too",
    )


def _stuck(told: Sequence[Told], places: Mapping[int, str], hosts: Sequence[str], limit_s: float) -> Finding:
    """What did not come back, and who did not come to it, or was lost in it."""
    began = [one.stuck for one in told if one.stuck] or [places[one.rank] for one in told if one.at is None]
    first = min(began, key=ORDER.index) or START
    late = [rank for rank in range(len(told)) if ORDER.index(places[rank]) < ORDER.index(first)]
    silent = [one.rank for one in told if one.at is None]
    # gloo gives up by itself: who is held by something else does not.
    held = [one.rank for one in told if one.stuck == first and one.why.startswith(NOT_OVER)]
    kinds = ((late, "did not come"), (silent, "said nothing any more"), (held, "did not come back"))
    telling = [(ranks, what) for ranks, what in kinds if 0 < len(ranks) < len(told)]
    blamed, what = telling[0] if telling else (held[:0], "")
    names = ", ".join(f"rank {rank} on {hosts[rank]}" for rank in blamed[:MOST]) + (
        ", ..." if len(blamed) > MOST else ""
    )
    whys = [f"rank {one.rank} ({hosts[one.rank]}): {one.why}" for one in told if one.stuck == first]
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
