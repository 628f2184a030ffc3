"""A finding and a plan, for people and for programs."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, cast

from entrypoint.fabric.model import FabricPlan, Finding

Rows = Iterable[Sequence[str]]


def as_json(found: Finding | FabricPlan) -> str:
    """One JSON object, with the names of the dataclass."""
    return json.dumps(_plain(found), indent=2)


def _plain(value: Any) -> Any:
    if is_dataclass(value):
        return {each.name: _plain(getattr(value, each.name)) for each in fields(value)}
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, dict):
        return {str(name): _plain(each) for name, each in sorted(cast("dict[str, Any]", value).items())}
    if isinstance(value, (set, frozenset)):
        return sorted(cast("set[str]", value))
    if isinstance(value, (tuple, list)):
        return [_plain(each) for each in cast("list[Any]", value)]
    return value


def of_finding(found: Finding) -> str:
    """Tables of the devices, interfaces and libraries."""
    devices = [(device.name, device.kind, device.state or "-", device.path) for device in found.devices]
    interfaces = [(each.name, _speed(each.speed), "up" if each.is_up else "down") for each in found.interfaces]
    libraries = [(name, library.path) for name, library in found.libraries.items()]
    if found.plugin:
        libraries.insert(0, (found.plugin.elf.soname, found.plugin.path))
    libraries += [(name, "not found") for name in found.missing]
    return _drawn(
        [("fabric", found.fabric), ("because of", found.why), ("driver", found.driver or "none")],
        [
            (("device", "kind", "state", "path"), devices),
            (("interface", "speed", "state"), interfaces),
            (("library", "path on the host"), libraries),
        ],
        found.notes,
    )


def of_plan(plan: FabricPlan) -> str:
    """Tables of what the container gets."""
    rows = [(each.soname, each.path, each.needed_by, "the host's" if each.wins else "") for each in plan.injected]
    head = [("fabric", plan.finding.fabric), ("because of", plan.finding.why)]
    head += [("NCCL's plugin", plan.plugin or "none"), ("NCCL_NET", plan.net or "not set")]
    return _drawn(
        head,
        [
            (("from the host", "its path there", "needed by", "wins"), rows),
            (("variable", "value"), sorted(plan.variables.items())),
            (("further files",), [(path,) for path in plan.files]),
            (("devices",), [(path,) for path in plan.devices]),
        ],
        plan.notes,
    )


def _speed(megabits: int | None) -> str:
    return "-" if megabits is None else f"{megabits / 1000:g} Gbit/s"


def _drawn(head: Rows, tables: Sequence[tuple[Sequence[str], Rows]], notes: Iterable[str]) -> str:
    # Here and not above: only what prints needs it.
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    with console.capture() as capture:
        for name, value in head:
            console.print(Text.assemble((f"{name:<14}", "bold"), value), soft_wrap=True)
        for headings, rows in tables:
            drawn = Table(box=box.SIMPLE_HEAD, pad_edge=False)
            for heading in headings:
                drawn.add_column(heading, overflow="fold")
            for row in rows:
                drawn.add_row(*map(Text, row))
            if drawn.row_count:
                console.print(drawn)
        for note in notes:
            console.print(Text(f"note: {note}"), soft_wrap=True)
    return capture.get().rstrip("\n")
