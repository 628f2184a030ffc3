"""What a look has seen so far."""

from dataclasses import dataclass, field

from check.doctor.facts import Facts
from check.doctor.findings import Finding, Part, code_of


@dataclass
class Looked:
    """What is known so far, on rank 0.

    Attributes:
        facts: None until all have told.
        why: why the look ended early.
        seconds: how long it took, from when all ranks had met.
    """

    facts: Facts | None = None
    parts: list[Part] = field(default_factory=list[Part])
    why: list[Finding] = field(default_factory=list[Finding])
    seconds: float | None = None

    @property
    def findings(self) -> list[Finding]:
        """All that was found: faults first."""
        found = [*self.why, *(finding for part in self.parts for finding in part.findings)]
        return sorted(found, key=lambda finding: finding.level != "fault")

    @property
    def code(self) -> int:
        return code_of(self.findings)
