"""Who was slow: what the ranks have told of their steps, put together."""

import statistics
from typing import Any

from muster.train.world import World


def compare(world: World, owns: list[dict[str, Any]]) -> dict[str, Any]:
    """`ranks`, `slowest_rank` and `shares` of a summary.

    When ranks train in step each of their steps lasts as long. What tells them apart is how much of it they were busy:
    the slowest waits for nobody.

    Args:
        owns: of each rank, what `StepTimes.own` says, and its peak memory.
    """
    ranks = [
        {
            "rank": rank,
            "host": host,
            "step_s": rounded(own["step_s"]),
            "busy_s": rounded(own["busy_s"]),
            "data_wait_s": rounded(own["data_wait_s"]),
            "peak_memory_gib": round(own["peak_memory_gib"], 3),
        }
        for rank, (host, own) in enumerate(zip(world.hosts or (world.host,), owns, strict=True))
    ]
    return {"ranks": ranks, "slowest_rank": slowest(ranks), "shares": shares(owns, alone=world.backend is None)}


def slowest(ranks: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The rank that was busy longest; None of one, and where a rank can't tell how long it was."""
    if len(ranks) == 1 or any(not rank["busy_s"] for rank in ranks):
        return None
    worst = max(ranks, key=lambda rank: rank["busy_s"])
    median_s = statistics.median(rank["busy_s"] for rank in ranks)
    return {
        "rank": worst["rank"],
        "host": worst["host"],
        "seconds": worst["busy_s"],
        "median_s": round(median_s, 6),
        "ratio": round(worst["busy_s"] / median_s, 4),
    }


def shares(owns: list[dict[str, Any]], *, alone: bool) -> dict[str, float | None] | None:
    """The parts of the mean step of all ranks; None where no step was timed.

    What is neither a wait for data nor one for other ranks is `compute`. Where waits for others are not known, they are
    in it, and `communication` is None.
    """
    total_s = sum(own["step_s"] for own in owns)
    if not total_s or any(own["data_wait_s"] is None for own in owns):
        return None
    data = sum(own["data_wait_s"] for own in owns) / total_s
    waits = [0.0 if alone else own["waits_s"] for own in owns]
    communication = None if None in waits else sum(waits) / total_s
    compute = max(0.0, 1 - data - (communication or 0.0))
    return {"data": rounded(data, 4), "compute": rounded(compute, 4), "communication": rounded(communication, 4)}


def rounded(value: float | None, digits: int = 6) -> float | None:
    """`value`, rounded, if it is known."""
    return None if value is None else round(value, digits)
