"""What a part of the launch adds to it: the fabric, the driver."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Additions:
    """Variables that the launched process gets, and lines for the user."""

    variables: Mapping[str, str] = field(default_factory=dict[str, str])
    notes: tuple[str, ...] = ()
