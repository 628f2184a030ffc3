"""The verdict on what was measured: PASS, FAIL or NO BASELINE, with what speaks against it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from check.bench.pairs import TIMES
from check.bench.sizes import shown
from check.bench.sweep import Fault
from train.errors import MusterError

Word = Literal["PASS", "FAIL", "NO BASELINE"]


@dataclass(frozen=True)
class Verdict:
    """The answer.

    Attributes:
        held: what was held against what, in words.
        against: each thing that makes it a FAIL.
    """

    word: Word
    held: str
    against: tuple[MusterError, ...] = ()

    @property
    def code(self) -> int:
        """The exit code of all ranks."""
        return 1 if self.word == "FAIL" else 0

    def __str__(self) -> str:
        return f"{self.word}: {self.held}"


def of(against: Sequence[MusterError], held: str | None, num_checks: int = 0) -> Verdict:
    """The verdict, by what speaks against the run, and by the baseline it was `held` against, if any.

    Args:
        num_checks: how often the values of a message were looked at.
    """
    if against:
        more = f", and {len(against) - 1} more" if len(against) > 1 else ""
        return Verdict("FAIL", against[0].wrong + more, tuple(against))
    if held is None:
        told = f"values were right in {num_checks} checks; --save-baseline FILE keeps such figures for the next time"
        return Verdict("NO BASELINE", told)
    return Verdict("PASS", held)


def of_pairs(against: Sequence[MusterError], num_nodes: int, differ: float = 1.0) -> Verdict:
    """The verdict on pairs of nodes, which are held against each other.

    Args:
        differ: how many times as long as the fastest direction the slowest takes.
    """
    # Where most links are slow, as those between two racks may be, none stands out: that is no PASS.
    if not against and num_nodes > 2 and differ > TIMES:
        told = f"links differ {differ:.1f}-fold, and no node or single link stands out: see which are the slow ones"
        return Verdict("NO BASELINE", told)
    if against or num_nodes > 2:
        return of(against, "no link is slow")
    if num_nodes < 2:
        return Verdict("NO BASELINE", "one node: nothing was measured")
    return Verdict("NO BASELINE", "two nodes: their link was held against nothing but its own two directions")


def of_values(faults: Sequence[Fault]) -> list[MusterError]:
    """What to say of wrong values: one for each collective and rank, with the smallest message."""
    found: dict[tuple[str, int], list[Fault]] = {}
    for fault in sorted(faults, key=lambda each: each.size):
        found.setdefault((fault.collective, fault.rank), []).append(fault)
    return [_of_one(several) for several in found.values()]


def _of_one(several: Sequence[Fault]) -> MusterError:
    first = several[0]
    if first.size == 0:
        return MusterError(
            f"{first.collective} let rank {first.rank} on {first.host} go on before all had come",
            seen=f"{first.found} of {first.expected:.0f} ranks had come",
            fix="another version of the backend; muster doctor shows which one is loaded",
            code=1,
        )
    sizes = ", ".join(dict.fromkeys(shown(fault.size) for fault in several))
    return MusterError(
        f"{first.collective} gave wrong values to rank {first.rank} on {first.host}, at {sizes}",
        seen=f"element {first.index} of {shown(first.size)} was {first.found}, not {first.expected:.0f}; "
        f"{first.count} elements are wrong",
        fix=f"don't train here: try again without {first.host}; if it is that node's, its GPU, memory or network is "
        "broken; if not, another version of the backend",
        code=1,
    )
