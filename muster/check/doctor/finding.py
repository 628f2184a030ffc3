"""Findings: what is wrong, on which host, and what to do about it; most are differences between nodes."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from muster.errors import ExitCode, one_line
from muster.units import listed

Result = TypeVar("Result")

Level = Literal["failed", "warning"]

DIED = "died"
"""The value of `Finding.about` where the check itself failed: a rank died, or lost the others."""


@dataclass(frozen=True)
class Finding:
    """A problem of one host, of several or of all.

    Attributes:
        level: `failed`: a training would fail, hang or be wrong; `warning`: it may.
        about: a short word for programs: image, torch, clock, port, name.
        host: one or several hosts; `a -> b` for a connection; empty for all.
        wrong: what is wrong.
        seen: the values, with their hosts.
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
    """The exit code for `findings`; with warnings alone it is 0, as a training may start."""
    if any(finding.about == DIED for finding in findings):
        return ExitCode.FAILED
    return ExitCode.USER_MUST_CHANGE if worst(findings) == "failed" else ExitCode.DONE


def attempt(function: Callable[[], Result]) -> Result | None:
    """The result of `function`; None where it raises, as one missing fact must not cost the others."""
    try:
        return function()
    except Exception:
        return None


def differences(
    values: Mapping[str, Any], level: Level, about: str, what: str, fix: str, shown: Callable[[Any], str] = str
) -> list[Finding]:
    """One finding if `values` are not the same on all nodes, as they should be; none if they are.

    It names the nodes whose value is not that of the majority; all nodes where no value has a majority.

    Args:
        values: by host; hosts whose value is None are ignored.
        what: the name of the values in the message: "torch".
        shown: turns a value into text.
    """
    by_value = hosts_by_value(values)
    if len(by_value) < 2:
        return []
    # The rarest value first; values on equally many hosts stay in the order of the hosts.
    ordered = sorted(by_value.items(), key=lambda item: len(item[1]))
    has_majority = len(ordered[-1][1]) > sum(len(hosts) for _, hosts in ordered[:-1])
    outliers = [host for _, hosts in (ordered[:-1] if has_majority else ordered) for host in hosts]
    seen = listed((f"{shown(value)} on {listed(hosts)}" for value, hosts in ordered), most=8)
    return [Finding(level, about, listed(outliers), f"not all nodes have the same {what}", seen, fix)]


def alike(values: Mapping[str, str], level: Level, about: str, wrong: str, fix: str) -> list[Finding]:
    """The findings of one problem: one for all hosts on which the same is `seen`.

    Args:
        values: what is seen, by host; empty where nothing is wrong.
    """
    by_seen = hosts_by_value(values).items()
    return [Finding(level, about, listed(hosts), wrong, seen, fix) for seen, hosts in by_seen if seen]


def hosts_by_value(values: Mapping[str, Any]) -> dict[Any, list[str]]:
    """The hosts of each value except None."""
    found: dict[Any, list[str]] = {}
    for host, value in values.items():
        if value is not None:
            found.setdefault(value, []).append(host)
    return found
