"""What a part of the launch adds to it: the driver, the fabric, the site."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Additions:
    """Variables that the launched process gets, and lines for the user."""

    variables: Mapping[str, str] = field(default_factory=dict[str, str])
    notes: tuple[str, ...] = ()


def defaults(wanted: Mapping[str, str], env: Mapping[str, str]) -> Additions:
    """`wanted` without what the user set, which stays; a line tells of each that has another value."""
    kept = sorted(name for name in wanted if env.get(name, wanted[name]) != wanted[name])
    return Additions(
        {name: value for name, value in wanted.items() if name not in env},
        tuple(f"{name}={env[name]} is yours: it was kept" for name in kept),
    )
