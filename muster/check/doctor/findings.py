"""What is found: a finding names the host, says what is wrong and what to do; most of them are nodes that differ."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from muster.check.ranks import listed

FINE, WARNED, FAULTY = 0, 1, 2
"""Exit codes: nothing was found; a training may run, but slower or shorter than it could; it would fail or be wrong."""

Level = Literal["fault", "warning"]


@dataclass(frozen=True)
class Finding:
    """What is wrong somewhere.

    Attributes:
        level: `fault`: a training would fail, hang or be wrong; `warning`: it may.
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


@dataclass(frozen=True)
class Part:
    """The answer to one subject, on rank 0; other ranks make an empty one.

    Attributes:
        name: a word or two for the table.
        says: the answer in one line, where nothing was found.
        findings: what was found.
        values: what was measured, as JSON can hold it.
        is_seen: False for what was not checked; `says` tells why.
    """

    name: str
    says: str = ""
    findings: Sequence[Finding] = ()
    values: Mapping[str, Any] = field(default_factory=dict[str, Any])
    is_seen: bool = True


def code_of(findings: Sequence[Finding]) -> int:
    """The exit code that stands for all `findings`."""
    levels = {finding.level for finding in findings}
    return FAULTY if "fault" in levels else WARNED if levels else FINE


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
    there = listed([host for host, value in values.items() if value == usual])
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


def distinct(values: Sequence[Any]) -> str:
    """The different values in words."""
    return ", ".join(dict.fromkeys(str(each) for each in values if each is not None))


def size(number: int) -> str:
    """Bytes in words: "1.5 GiB"."""
    for unit, name in ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB")):
        if number >= unit:
            return f"{number / unit:.1f} {name}"
    return f"{number // 2**10} KiB"
