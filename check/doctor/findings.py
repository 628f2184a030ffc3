"""What a look at the nodes finds: a finding names the host, and says what to do."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

FINE, WARNED, FAULTY = 0, 1, 2
"""Exit codes: nothing was found; a training may run, but slower or shorter than it could; it would fail or be wrong."""


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

    level: Literal["fault", "warning"]
    about: str
    host: str
    wrong: str
    seen: str
    fix: str


@dataclass(frozen=True)
class Part:
    """One thing that was looked at, on rank 0; other ranks make an empty one.

    Attributes:
        name: a word or two for the table.
        says: the answer in one line, where nothing was found.
        findings: what was found.
        values: what was measured, as JSON can hold it.
        is_seen: False for what was not looked at; `says` tells why.
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
