"""A finding: what is wrong, on which host, and what to do about it; most of them are nodes that differ."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from muster.check.ranks import listed
from muster.errors import ExitCode, one_line

Result = TypeVar("Result")

Level = Literal["failed", "warning"]

DIED = "died"
"""What a finding is about where the check itself failed, as a rank of it died."""


@dataclass(frozen=True)
class Finding:
    """What is wrong somewhere.

    Attributes:
        level: `failed`: a training would fail, hang or be wrong; `warning`: it may.
        about: a short word for programs: image, lock, clock, port, name.
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
    """The verdict in one word."""
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


def outliers(values: Mapping[str, Any]) -> tuple[Any, dict[Any, list[str]]]:
    """The value of most hosts, None where none has a majority; and the hosts of each other value.

    Args:
        values: by host; None is no value, and nobody is an outlier by it.
    """
    known = {host: value for host, value in values.items() if value is not None}
    counts = Counter(known.values())
    usual, number = counts.most_common(1)[0] if counts else (None, 0)
    if number * 2 <= len(known):
        usual = None
    others: dict[Any, list[str]] = {}
    for host, value in known.items():
        if value != usual:
            others.setdefault(value, []).append(host)
    return usual, others


def differences(
    values: Mapping[str, Any], level: Level, about: str, what: str, fix: str, shown: Callable[[Any], str] = str
) -> list[Finding]:
    """The findings of `values` that should be the same on all nodes: none, one for each outlier, or one of all.

    Args:
        what: what the values are of, after "another" and "the same": "torch".
        shown: makes words of a value.
    """
    usual, others = outliers(values)
    if len(others) < (1 if usual is not None else 2):
        return []
    if usual is None:
        # As many on each side: none of them can be called the right one.
        seen = ", ".join(f"{shown(value)} on {listed(hosts)}" for value, hosts in others.items())
        everyone = [host for hosts in others.values() for host in hosts]
        return [Finding(level, about, listed(everyone), f"not all nodes have the same {what}", seen, fix)]
    there = listed(host for host, value in values.items() if value == usual)
    return [
        Finding(
            level,
            about,
            listed(hosts),
            f"{'it has' if len(hosts) == 1 else 'they have'} another {what} than most nodes",
            f"{shown(value)} on {listed(hosts)}, {shown(usual)} on {there}",
            fix,
        )
        for value, hosts in others.items()
    ]


def alike(values: Mapping[str, str], level: Level, about: str, wrong: str, fix: str) -> list[Finding]:
    """One finding for all hosts of which the same is `seen`.

    Args:
        values: what is seen, by host; empty where nothing is wrong.
    """
    by_seen: dict[str, list[str]] = {}
    for host, seen in values.items():
        if seen:
            by_seen.setdefault(seen, []).append(host)
    return [Finding(level, about, listed(hosts), wrong, seen, fix) for seen, hosts in by_seen.items()]


def size(number: int) -> str:
    """Bytes in words: "1.5 GiB"."""
    for unit, name in ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB")):
        if number >= unit:
            return f"{number / unit:.1f} {name}"
    return f"{number // 2**10} KiB"
