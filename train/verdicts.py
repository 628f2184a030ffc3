"""What is told of a rank that is dead, stands still, or is left alone: in three lines, and as the fault of all."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from train import parent
from train.errors import FAILED, RESUME, MusterError
from train.faults import Fault
from train.vitals import LEFT, Ear, named
from train.world import World


def dead(ear: Ear, ranks: list[int], beat_s: float, world: World) -> tuple[MusterError, Fault]:
    """Of `ranks`, of which nothing is heard any more by the rank of `world`."""
    first = max(ranks, key=lambda rank: ear.silent[rank])
    last = ear.last[first]
    silent_s = ear.silent[first] * beat_s
    wrong = f"gave no sign of life for {silent_s:.0f} s: the process was stopped or killed, or its host is gone"
    told = MusterError(
        f"{named(ranks, ear.hosts)} {wrong}",
        seen=f"last heard of in step {last.step + 1}, {last.place}; rank {world.rank} on {world.host} listened",
        fix=f"look for what ended it (dmesg, sacct: memory? its host?); {RESUME}",
        code=FAILED,
    )
    return told, Fault(first, last.host, FAILED, wrong)


def hung(
    ear: Ear, answers: Mapping[int, Mapping[str, Any]], beat_s: float, folder: Path | None
) -> tuple[MusterError, Fault]:
    """Of the rank for which the others wait, by what all answered when they were asked for their stacks."""
    mute = [rank for rank, answer in answers.items() if not answer and ear.last[rank].place != LEFT]
    counts = {rank: told.get("collectives") for rank, told in answers.items()}
    behind = mute or ear.lagging({rank: count for rank, count in counts.items() if count is not None})
    first = behind[0]
    last = ear.last[first]
    still_s = max(ear.still.values()) * beat_s
    wrong = f"stood still for {still_s:.0f} s in step {last.step + 1}, {last.place}"
    who = f"each of the {len(answers)} ranks" if len(behind) == len(answers) > 1 else named(behind, ear.hosts)
    at = answers[first].get("where", "it did not answer when it was asked for its stacks")
    told = MusterError(
        f"{who} {wrong}",
        seen=f"rank {first}: {at}; stacks of all ranks: {'standard error' if folder is None else folder.parent}",
        fix=f"read its file there; where a step may take as long: --hang-timeout SECONDS; {RESUME}",
        code=FAILED,
    )
    return told, Fault(first, last.host, FAILED, wrong)


def orphaned(world: World, gone: int) -> tuple[MusterError, Fault]:
    """Of the rank of `world`, whose launcher, the process `gone`, is there no more."""
    return parent.orphaned(world.rank, world.host, gone), Fault(world.rank, world.host, FAILED, parent.GONE)


def alone(world: World, seen: str) -> MusterError:
    """Of the rank of `world`, which hears nothing from the others any more."""
    place = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    return MusterError(
        f"rank {world.rank} on {world.host} lost the others: the store at {place} is gone",
        seen=seen,
        fix=f"look on that host for what ended rank 0 or its agent; {RESUME}",
        code=FAILED,
    )
