"""What differs between nodes, and which of them is the odd one."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from check.doctor.findings import Finding

MOST_NAMED = 4


def named(hosts: Sequence[str], most: int = MOST_NAMED) -> str:
    """`hosts` in a few words: "a, b, c, d and 5 more"."""
    # One too many is shown as it is: to say "and 1 more" takes as much room.
    if len(hosts) <= most + 1:
        return ", ".join(hosts)
    return f"{', '.join(hosts[:most])} and {len(hosts) - most} more"


def split(values: Mapping[str, Any]) -> tuple[Any, dict[Any, list[str]]]:
    """The value of most hosts, None where none has a majority; and the hosts of each other value.

    Args:
        values: by host; None is no value, and nobody is odd by it.
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
    values: Mapping[str, Any], level: str, about: str, what: str, fix: str, shown: Callable[[Any], str] = str
) -> list[Finding]:
    """The findings of `values` that are to be the same on all nodes: none, one for each odd value, or one of all.

    Args:
        what: what the values are of, after "another" and "the same": "torch".
        shown: makes words of a value.
    """
    usual, others = split(values)
    if len(others) < (1 if usual is not None else 2):
        return []
    if usual is None:
        # As many on each side: none of them can be called the right one.
        seen = ", ".join(f"{shown(value)} on {named(hosts)}" for value, hosts in others.items())
        everyone = [host for hosts in others.values() for host in hosts]
        return [_finding(level, about, everyone, f"not all nodes have the same {what}", seen, fix)]
    there = [host for host, value in values.items() if value == usual]
    return [
        _finding(
            level,
            about,
            hosts,
            f"{'it has' if len(hosts) == 1 else 'they have'} another {what} than most nodes",
            f"{shown(value)} on {named(hosts)}, {shown(usual)} on {named(there)}",
            fix,
        )
        for value, hosts in others.items()
    ]


def _finding(level: str, about: str, hosts: Sequence[str], wrong: str, seen: str, fix: str) -> Finding:
    return Finding("fault" if level == "fault" else "warning", about, named(hosts), wrong, seen, fix)


def all_of(found: Sequence[Any]) -> str:
    """The different values of `found` in words."""
    return ", ".join(dict.fromkeys(str(each) for each in found if each is not None))
