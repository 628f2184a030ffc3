"""A finding: what is wrong, on which host, and what to do about it; most of them are nodes that differ."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from muster.errors import ExitCode, one_line
from muster.units import listed

Result = TypeVar("Result")

Level = Literal["failed", "warning"]

DIED = "died"
"""What a finding is about where the check itself failed, as a rank of it died."""


@dataclass(frozen=True)
class Finding:
    """What is wrong somewhere.

    Attributes:
        level: `failed`: a training would fail, hang or be wrong; `warning`: it may.
        about: a short word for programs: image, torch, clock, port, name.
        host: where; two hosts as `a -> b`; empty where it is all of them.
        wrong: what is wrong.
        seen: the values, with the hosts that they are from.
        fix: what to type, or whom to tell.
    """

    level: Level
    about: str
    host: str
    wrong: str
    seen: str
    fix: str

    def __str__(self) -> str:
        where = f"{self.host}: " if self.host else ""
        lines = (f"{self.level}: {where}{self.wrong}", f" seen: {self.seen}", f"  fix: {self.fix}")
        return "\n".join(map(one_line, lines))


def worst(findings: Sequence[Finding]) -> Literal["ok", "warning", "failed"]:
    levels = {finding.level for finding in findings}
    return "failed" if "failed" in levels else "warning" if levels else "ok"


def code_of(findings: Sequence[Finding]) -> int:
    """The exit code that stands for all `findings`: with warnings alone a training may start."""
    if any(finding.about == DIED for finding in findings):
        return ExitCode.FAILED
    return ExitCode.USER_MUST_CHANGE if worst(findings) == "failed" else ExitCode.DONE


def attempt(function: Callable[[], Result]) -> Result | None:
    """What `function` returns; None where it fails: one answer that is missing must not cost the others."""
    try:
        return function()
    except Exception:
        return None


def differences(
    values: Mapping[str, Any], level: Level, about: str, what: str, fix: str, shown: Callable[[Any], str] = str
) -> list[Finding]:
    """The finding of `values` that should be the same on all nodes, where they are not.

    It is of the nodes that have another value than most; of all where no value has a majority.

    Args:
        values: by host; None is no value, and nobody differs by it.
        what: what the values are of: "torch".
        shown: makes words of a value.
    """
    by_value = hosts_by_value(values)
    if len(by_value) < 2:
        return []
    # The rarest first; of equally many hosts in the order in which they came.
    ordered = sorted(by_value.items(), key=lambda item: len(item[1]))
    has_majority = len(ordered[-1][1]) > sum(len(hosts) for _, hosts in ordered[:-1])
    outliers = [host for _, hosts in (ordered[:-1] if has_majority else ordered) for host in hosts]
    seen = listed((f"{shown(value)} on {listed(hosts)}" for value, hosts in ordered), most=8)
    return [Finding(level, about, listed(outliers), f"not all nodes have the same {what}", seen, fix)]


def alike(values: Mapping[str, str], level: Level, about: str, wrong: str, fix: str) -> list[Finding]:
    """One finding for all hosts of which the same is `seen`.

    Args:
        values: what is seen, by host; empty where nothing is wrong.
    """
    by_seen = hosts_by_value(values).items()
    return [Finding(level, about, listed(hosts), wrong, seen, fix) for seen, hosts in by_seen if seen]


def hosts_by_value(values: Mapping[str, Any]) -> dict[Any, list[str]]:
    """The hosts of each value, but of None."""
    found: dict[Any, list[str]] = {}
    for host, value in values.items():
        if value is not None:
            found.setdefault(value, []).append(host)
    return found
